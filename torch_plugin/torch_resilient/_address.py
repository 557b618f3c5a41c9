"""Finds the store of a job, and starts one where nobody has.

Every way ends in an Endpoint that all ranks of the job agree on. Which way is taken is decided by
the environment and the arguments alone, so that all ranks take the same.
"""

import contextlib
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlparse

from torch_resilient import _errors, _resolver, _server

PROBE_SECONDS = 2.0  # For one answer of a server that should be there.
_FIRST_PAUSE_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 0.5
_LOG_AFTER_SECONDS = 10.0
_KEY = "resilient/store/"
_WILDCARDS = ("0.0.0.0", "::")


@dataclass
class Endpoint:
    """Where the store is. `spawned`: by this process. `given`: by the user, not found."""

    addresses: list
    server_id: str = ""
    spawned: bool = False
    given: bool = False


class Search:
    """What the search for the store goes by. `rank` -1: no rank; who owns the address may start the
    store. `deadline`: of time.monotonic()."""

    def __init__(self, native, settings, rank, job, deadline, log, warn):
        self.rank, self.job, self.deadline = rank, job, deadline
        self.bind, self.linger = settings["bind"], settings["linger"]
        self.log, self.warn = log, warn
        self._native = native
        self._access = {"token_file": settings["token_file"], "tls": settings["tls"]}

    def left(self):
        return max(self.deadline - time.monotonic(), 0)

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


def of_launcher(url, environment, required=False):
    """The "host:port" that torch would make its store at: of tcp://, or MASTER_ADDR:MASTER_PORT."""
    if url.startswith("tcp:"):
        return _server.join_host_port(*from_url(url))
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if host and port.isdigit() and int(port) < 65536:
        return _server.join_host_port(host, int(port))
    if not required:
        return ""
    name = "MASTER_PORT" if host else "MASTER_ADDR"
    what = f"{name}={port!r} is not a port" if host and port else f"{name} is not set"
    raise _errors.ConfigError(
        f"{what}: start the script with a launcher (resilient-run, torchrun), or set MASTER_ADDR"
        " and MASTER_PORT, or RESILIENT_STORE=host:port"
    )


def job_name(settings, environment, launcher_address):
    """Name of the job on its store, the same on all ranks and at every attempt."""
    if settings["job"]:
        return settings["job"]
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":  # torchrun's default id, shared by all of its jobs.
        return run_id
    if environment.get("SLURM_JOB_ID"):
        return f"{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '0')}"
    return launcher_address or settings["store"] or "default"


def before_init(native, environment):
    """(addresses, job, access) of the store at which a process is present from its import on; None:
    it is not known before init. With torchrun's own store at MASTER_PORT it is published there."""
    ours = {name: value for name, value in environment.items() if name.startswith("RESILIENT_")}
    settings = native.parse_settings(ours)
    address = of_launcher("", environment)
    job = job_name(settings, environment, address)
    access = {"token_file": settings["token_file"], "tls": settings["tls"]}
    if settings["store"]:
        return given(settings["store"]).addresses, job, access
    if address and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return [address], job, access
    return None


def given(text):
    """Addresses from RESILIENT_STORE or resilient://: nothing is spawned."""
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    try:
        for address in addresses:
            _server.split_host_port(address)
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


def at(search, host, port):
    """Plain variables and tcp://: the store is at that address itself, as torch's would be.

    Any rank on the host that owns the address may start it, rank 0 always may.
    """
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
    if bind in _WILDCARDS:  # Where it listens is not where others reach it.
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
