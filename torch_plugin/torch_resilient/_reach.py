"""Where the store of a job is that was told an address of this host's loopback, or of none.

MASTER_ADDR is one word for all ranks in the books, and several in the wild: localhost on the master
and its service's name elsewhere (PyTorchJob), a host's own name, which Debian's and Ubuntu's
/etc/hosts lead to 127.0.1.1 on that host alone, 0.0.0.0 on the master. The ranks of other hosts
come to an address of the network. So there, where a world spans hosts, the store listens; where it
does not, nothing leaves the loopback.
"""

import contextlib
import fcntl
import socket
import struct

from torch_resilient import _resolver
from torch_resilient._names import number

WILDCARDS = ("0.0.0.0", "::")
_LOOPBACKS = ("127.0.0.1", "::1")
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "::1")
_SIOCGIFADDR = 0x8915
# Of blocks that are for books: a route is picked, and nothing is sent.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def is_loopback(host):
    """Of a name or number as it is written."""
    return host in _LOOPBACK_NAMES or (host.startswith("127.") and _resolver.is_number(host))


def spans_hosts(environment, world_size, host):
    """Whether ranks of other hosts may come to the store at `host`, by what launchers say. Where
    none says how many ranks are here, who names the loopback means it, but for pods, each of which
    has one rank."""
    if world_size == 1:
        return False
    local = number(environment.get("LOCAL_WORLD_SIZE"))
    if local is not None:
        return world_size > local
    nodes = number(environment.get("PET_NNODES", "").rpartition(":")[2])
    if nodes is not None:
        return nodes > 1
    is_pod = bool(environment.get("KUBERNETES_SERVICE_HOST") and environment.get("RANK"))
    return (is_pod and not environment.get("LOCAL_RANK")) or not is_loopback(host)


def host_of_store(host, numbers, spans, settings):
    """`host`, which has these addresses, or what it stands for on this host."""
    if host not in WILDCARDS and not (numbers and all(map(is_loopback, numbers))):
        return host
    if spans:
        own = own_address(settings)
        if own:
            return own
    return _LOOPBACKS[":" in host] if host in WILDCARDS else host


def own_address(settings):
    """The address of this host that others come to; "": it has none but the loopback."""
    if settings["bind"] and settings["bind"] not in WILDCARDS:
        return settings["bind"]
    for name in filter(None, settings["socket_ifname"].split(",")):
        if own := _of_interface(name.strip()):
            return own
    for other in _ELSEWHERE:
        with contextlib.suppress(OSError):
            own = _resolver.own_towards(other)
            if not is_loopback(own):
                return own
    found = (_of_interface(name) for _, name in socket.if_nameindex())
    return next((own for own in found if own and not is_loopback(own)), "")


def _of_interface(name):
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        answer = fcntl.ioctl(asks, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
