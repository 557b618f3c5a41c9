"""Finds the store of a job, and starts one where nobody has.

Every way ends in an Endpoint that all ranks of the job agree on. Which way is taken is decided by
the environment and the arguments alone, so that all ranks take the same.
"""

import contextlib
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from torch_resilient import _errors, _names, _reach, _resolver, _server

PROBE_SECONDS = 2.0  # For one answer of a server that should be there.
_FIRST_PAUSE_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 0.5
_LOG_AFTER_SECONDS = 10.0
_LEAST_TIMEOUT_SECONDS = 0.1
_KEY = "resilient/store/"


@dataclass
class Endpoint:
    """Where the store is. `spawned`: by this process. `given`: by the user, not found. `other`: the
    c10d store that led to it, where the program has handed one in."""

    addresses: list
    server_id: str = ""
    spawned: bool = False
    given: bool = False
    other: Any = None


class Search:
    """What the search for the store goes by. `rank` -1: no rank; who owns the address may start the
    store. `deadline`: of time.monotonic()."""

    def __init__(self, native, settings, rank, job, deadline, log, warn):
        self.rank, self.job, self.deadline = rank, job, deadline
        self.bind, self.linger = settings["bind"], settings["linger"]
        self.log, self.warn = log, warn
        self._native = native
        self._access = access_of(settings)

    def left(self):
        return max(self.deadline - time.monotonic(), 0)

    def timeout(self):
        """The same for a store of torch's, which takes none of nothing."""
        return timedelta(seconds=max(self.left(), _LEAST_TIMEOUT_SECONDS))

    def probe(self, address):
        """Id of the server there; raises the connect errors of the package."""
        return self._native.probe_store(address, self.job, PROBE_SECONDS, **self._access)

    def find(self, address):
        """(server id, whether it was started) of the store that is at the address from now on."""
        return self._native.find_store(
            address, self.job, self.left(), self.rank, self.bind, self.linger, **self._access
        )

    def start(self, host):
        """Starts a server on a port of the kernel's choice: its ("host:port", id)."""
        listen = _server.join_host_port(host, 0)
        address, server_id, log_path = self._native.start_server(listen, self.linger)
        self.log(f"started the store at {address}; its log is {log_path}")
        return address, server_id


def access_of(settings):
    """What opens a store to this process, as arguments of the extension's functions."""
    return {"token_file": settings["token_file"], "tls": settings["tls"]}


def of_launcher(url, environment, required=False):
    """The "host:port" that torch would make its store at: of tcp://, or MASTER_ADDR:MASTER_PORT."""
    if url.startswith("tcp:"):
        return _server.join_host_port(*from_url(url))
    host, text = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    wrong = _what_is_wrong(host, text)
    if wrong is None:
        return _server.join_host_port(host.lower(), _names.number(text))
    if not required:
        return ""
    raise _errors.ConfigError(
        f"{wrong}: start the script with a launcher (resilient-run, torchrun), or set MASTER_ADDR"
        " and MASTER_PORT, or RESILIENT_STORE=host:port"
    )


def _what_is_wrong(host, port):
    """With MASTER_ADDR and MASTER_PORT; None: nothing."""
    if not host:
        return "MASTER_ADDR is not set"
    if host.split() != [host]:
        return f"MASTER_ADDR={host!r} has a blank or an end of line in it, as no host's name has"
    if not port:
        return "MASTER_PORT is not set"
    number = _names.number(port)
    if number is None or not 0 <= number < 65536:
        return f"MASTER_PORT={port!r} is not a port"
    return None


def job_name(settings, environment, launcher_address, shared):
    """Name of the job on its store, the same on all ranks and at every attempt. `shared`: the store
    was given, and may serve others; it is this job's own otherwise.

    Its own is told by its place, which each host may know by another name, so the job is named by
    the port alone. On a shared one the address tells jobs of one port apart. Slurm's job is no more
    than a hint, its step none: a script may start a step on each node, or reach some by ssh.
    Where the ranks are Slurm's own, `_launchers` has set RESILIENT_JOB.
    """
    if settings["job"]:
        return settings["job"]
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":  # torchrun's default id, shared by all of its jobs.
        return run_id
    if not shared:
        return f"port-{launcher_address.rpartition(':')[2]}" if launcher_address else "default"
    place = launcher_address or settings["store"] or "default"
    slurm = environment.get("SLURM_JOB_ID", "")
    return f"{slurm}/{place}" if slurm else place


def before_init(native, environment):
    """(addresses, job, port, access) of the store at which a process is present from its import on;
    None: it is not known before init. With torchrun's own store at MASTER_PORT it is published
    there. `port`: as in _presence.Init."""
    ours = {name: value for name, value in environment.items() if name.startswith("RESILIENT_")}
    settings = native.parse_settings(ours)
    address = of_launcher("", environment)
    job = job_name(settings, environment, address, shared=bool(settings["store"]))
    access = access_of(settings)
    if settings["store"]:
        return given(settings["store"]).addresses, job, "", access
    if address and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = _server.split_host_port(address)
        size = _names.number(environment.get("WORLD_SIZE")) or 0
        spans = _reach.spans_hosts(environment, size, host)
        numbers = (host,) if _reach.is_loopback(host) else ()  # Names are init's to look up.
        host = _reach.host_of_store(host, numbers, spans, settings)
        return [_server.join_host_port(host, port)], job, str(port), access
    return None


def given(text):
    """Addresses from RESILIENT_STORE or resilient://: nothing is spawned."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    try:
        for address in addresses:
            if _server.split_host_port(address)[1] == 0:
                raise ValueError(f"nobody is at port 0 of {address!r}")
    except ValueError as error:
        raise _errors.ConfigError(
            f"the address of the store is malformed: {error}; write host:port[,host:port]"
        ) from None
    return Endpoint(addresses, given=True)


def from_url(url):
    """(host, port) of tcp://host:port?... and resilient://host:port?..."""
    parts = urlparse(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None:
        raise _errors.ConfigError(
            f"init_method {url!r} names no host and port; write {parts.scheme}://host:port"
        )
    return host, port


def addresses_of(host, deadline):
    """The numeric addresses of a name; none where it has none. ConnectError when that is not known
    by `deadline`, of time.monotonic()."""
    try:
        return _resolver.addresses(host, deadline)
    except _resolver.NoAnswerError as error:
        raise _errors.ConnectError(str(error), code="RESOLVE") from None
    except OSError:
        return ()


def is_local(numbers):
    """True when an interface of this host has one of these addresses."""
    for number in numbers:
        with contextlib.suppress(OSError):
            family, kind, *_, address = socket.getaddrinfo(
                number, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def own_address_towards(numbers):
    """The address of this host, of either family, on the way to one of these; also to those that no
    host owns (services)."""
    for number in numbers:
        with contextlib.suppress(OSError):
            return _resolver.own_towards(number)
    return "127.0.0.1"


def is_one_host(one, other, deadline):
    """Whether both names lead to one host, as far as this one knows."""
    if one == other:
        return True
    ours, theirs = addresses_of(one, deadline), addresses_of(other, deadline)
    return bool(set(ours) & set(theirs)) or (is_local(ours) and is_local(theirs))


def at(search, host, port, alone=False):
    """Plain variables and tcp://: the store is at that address itself, as torch's would be.

    Any rank on the host that owns the address may start it, rank 0 always may. Port 0 is one of the
    kernel's choice, for a world of one rank (`alone`): no other would find it.
    """
    if port == 0:
        if not alone:
            raise _errors.ConfigError(
                f"port 0 of {host!r} is another one for each rank: set MASTER_PORT, or the port of"
                " tcp://, to one that is free on that host, the same for all ranks"
            )
        return Endpoint([search.start(host)[0]], spawned=True)
    address = _server.join_host_port(host, port)
    server_id, spawned = search.find(address)
    return Endpoint([address], server_id, spawned)


def through(search, store, host):
    """Publishes the address of a store of ours through another c10d store, and agrees on it.

    Rank 0 starts the server on `host` (or uses a living one of an earlier attempt); the others wait
    until a living one is published, for the key may still hold the address of an earlier attempt.
    """
    key = _KEY + search.job
    return _publish(search, store, key, host) if search.rank == 0 else _await(search, store, key)


def _publish(search, store, key, host):
    text = store.get(key).decode() if store.check([key]) else ""
    endpoint = _living(search, text)
    if endpoint is not None:
        return endpoint
    numbers = addresses_of(host, search.deadline)
    own = host if is_local(numbers) else own_address_towards(numbers)
    bind = search.bind or own
    address, server_id = search.start(bind)
    if bind in _reach.WILDCARDS:  # Where it listens is not where others reach it.
        address = _server.join_host_port(own, _server.split_host_port(address)[1])
    published = f"{address} {server_id}"
    answer = store.compare_set(key, text, published).decode()
    if answer != published:
        # Somebody else's rank 0: two processes hold that rank. The join tells them apart.
        return _living(search, answer) or Endpoint([address], server_id, spawned=True)
    return Endpoint([address], server_id, spawned=True)


def _await(search, store, key):
    stale = None
    for _ in _rounds(search, "rank 0 has not published the store's address yet"):
        if not store.check([key]):
            continue
        text = store.get(key).decode()
        endpoint = _living(search, text)
        if endpoint is not None:
            return endpoint
        if text != stale:
            stale = text
            search.log(
                f"the published store {text} does not answer (it may be of an earlier attempt):"
                " waiting for rank 0"
            )
    raise _errors.JoinTimeoutError(
        "rank 0 has not published the address of the store within the init timeout"
        + (f"; the one published, {stale}, does not answer" if stale else "")
        + "; look at what rank 0 does"
    )


def _living(search, text):
    """The endpoint of a published "host:port id" when that very server still answers."""
    address, _, server_id = text.partition(" ")
    if not address:
        return None
    try:
        if _answer(search, address) != server_id:
            return None
    except _errors.ConnectError:
        return None  # Some other program has the port by now.
    return Endpoint([address], server_id)


def _answer(search, address):
    """Id of the server at `address`; None while nobody answers there. What waiting cannot mend
    (another protocol, a wrong token) is raised."""
    host, port = _server.split_host_port(address)
    if not _is_open(addresses_of(host, search.deadline), port):
        return None
    try:
        return search.probe(address)
    except _errors.ConnectError as error:
        if error.code in ("PROTOCOL", "AUTH"):
            raise
        return None


def _is_open(numbers, port):
    """Whether something listens at that port of one of these addresses."""
    for number in numbers:
        with contextlib.suppress(OSError):
            # tidy: allow(blocking-resolve): of numbers.
            socket.create_connection((number, port), timeout=PROBE_SECONDS).close()
            return True
    return False


def _rounds(search, slow):
    """One round at once, then one after each of growing pauses, until the deadline. `slow` is
    logged once, when it takes long."""
    pause = _FIRST_PAUSE_SECONDS
    log_at = time.monotonic() + _LOG_AFTER_SECONDS
    yield
    while (now := time.monotonic()) < search.deadline:
        time.sleep(min(pause, search.deadline - now))
        pause = min(pause * 1.5, _LAST_PAUSE_SECONDS)
        if now > log_at:
            search.warn(slow)
            log_at = search.deadline
        yield
