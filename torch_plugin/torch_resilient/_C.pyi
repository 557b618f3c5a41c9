"""The extension on top of libresilient_torch: bindings only, no logic. Every blocking call releases the GIL,
handles Ctrl-C within 0.1 s, and raises what the installed error factory makes of a failure."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend, ProcessGroup, Work
from torch._C._distributed_c10d import Store as C10dStore
from torch.futures import Future

TORCH_VERSION: str  # The torch this extension was built for, e.g. "2.15.0".
VERSION: str

TlsFiles = tuple[str, str, str]  # Paths of certificate, key and CA; "": none.

def install_error_factory(factory: Callable[[str, str, dict[str, Any]], BaseException]) -> None:
    """factory(code, message, attributes) -> exception to raise. attributes: rank host pid generation group seq since."""

def ends_generation(code: str) -> bool:
    """True for causes with which a generation ends: all of its ranks meet it, however late."""

def retried_by_elastic(code: str) -> bool:
    """True for first causes after which `elastic` tries again; the others are bugs of the program or its start."""

def parse_settings(environment: dict[str, str]) -> dict[str, Any]:
    """Fields of Settings by name; durations in seconds. Raises SETTING. 'warnings' is a list of lines to print."""

def set_log(level: str, tag: str) -> None: ...
def exit_begins() -> None:
    """The process is ending: a call into a driver that keeps it from that for longer than the budget of the last session
    ends it with exit code 86."""

def probe_store(
    address: str,
    job: str,
    timeout: float,
    expected_server: str = "",
    token_file: str = "",
    tls: TlsFiles = ("", "", ""),
) -> str:
    """Connects once (retrying refused and reset until `timeout` seconds) and returns the server's id.
    Raises REFUSED, UNREACHABLE, RESOLVE, PROTOCOL, AUTH or JOB."""

def find_store(
    address: str,
    job: str,
    timeout: float,
    rank: int,
    bind: str,
    linger: float,
    token_file: str = "",
    tls: TlsFiles = ("", "", ""),
) -> tuple[str, bool]:
    """FindOrStart of <resilient/store/locate.h>: the server's id, "" where it is not looked at, and whether this process
    has started it. Raises UNREACHABLE, RESOLVE, SETTING, PROTOCOL or AUTH."""

def start_server(listen: str, linger: float) -> tuple[str, str, str]:
    """StartServer of <resilient/store/server_process.h>: ("host:port", server id, path of its log). Raises SETTING, REFUSED."""

class SharedGpu:
    """Whether ranks may use one GPU: see <resilient/device.h>."""

    REFUSED: SharedGpu
    THROUGH_HOST: SharedGpu
    THROUGH_NCCL: SharedGpu

class DeviceClaim:
    """The GPU that a rank uses: see <resilient/device.h>."""

    uuid: str
    host: str
    ordinal: int
    visible: int
    visible_devices: str
    local_rank: int

def find_device(ordinal: int, environment: dict[str, str]) -> DeviceClaim:
    """Of a process with this environment that uses cuda:`ordinal` (-1: not known), by NVML."""

class Session:
    """One world: see <resilient/session.h>."""

    def __init__(
        self,
        *,
        addresses: list[str],
        job: str,
        rank: int,
        world_size: int,
        init_timeout: float,
        budget: float,
        seat_wait: float,
        min_world: int = 0,
        spare_if_taken: bool = False,
        launcher_attempt: int = 0,
        supervised: bool = False,
        host_watch: bool = True,
        expected_server: str = "",
        hosts_store: bool = False,
        bind_address: str = "127.0.0.1",
        token_file: str = "",
        tls: TlsFiles = ("", "", ""),
        socket_ifname: str = "",
        socket_streams: int = 1,
        shm_limit: int = ...,  # Bytes a group; 0: none.
        link_protection: tuple[bool, bool] = (False, False),  # Checksums, encryption.
        hierarchical_order: bool = False,
        cuda_libraries: tuple[str, str] = ("", ""),  # Paths of NCCL and the CUDA runtime; "": none.
        shared_gpu: SharedGpu = ...,  # Where it is allowed ranks claim no GPU for themselves.
        eager_device: int = -1,  # Groups are connected for it as they are made; -1: none.
        auto_heal: bool = False,
        replay: bool = False,
        strict_timeouts: bool = False,
        op_deadline: float = 120.0,
        wait_log: float = 30.0,
        stalls: tuple[float, float] = (3600.0, 600.0),
        presence: tuple[str, str] = ("", ""),
        timeout: timedelta = ...,  # What init_process_group was given.
        device: DeviceClaim | None = None,
        nccl: NcclOptions | None = None,  # Of the world's group.
        reconfigure_scope: str = "",  # Of a process whose group has the members that it chooses; see context.h.
    ) -> None: ...
    def init(self) -> None: ...
    def store(self, timeout: timedelta) -> Store: ...  # Round-scoped keys; its waits end on a fence.
    def membership(self) -> dict[str, Any]: ...  # state life round generation fence_token rank members=[{rank,host,pid,incarnation}]
    def acknowledged(self) -> dict[str, Any]: ...  # As membership(), of the generation that ran here last.
    def world_secret(self) -> bytes: ...  # Known to the members of this world and to its store.
    def epoch(self) -> int: ...  # The generation in which the program has begun, by init or its last rebuild.
    def failure(self) -> BaseException | None: ...
    def await_joined(self) -> None: ...  # Until all has ended whose wait() let the program go on before that.
    def await_failure(self, timeout: float) -> BaseException | None: ...  # Waits for one; None: none came.
    def last_incident(self) -> dict[str, Any] | None: ...  # generation cause(str) code known aborted joined rebuilt running (unix s or 0)
    def await_event(self, after: int, timeout: float) -> dict[str, Any] | None:
        """The first event behind number `after`: event ("fenced", "rebuilt", "running", "refused", "failed", "closed")
        number missed generation time code text rank host pid. None: none came in time. Raises when none will."""

    def rebuild(
        self, budget: float | None = None, min_world: int = 0, seat_wait: float | None = None
    ) -> None: ...  # `budget`: of the machine; the wait for seats comes on top.
    def offer_room(self, max_world: int, commit: int) -> None: ...  # This rank has made `commit`.
    def close(self) -> None: ...
    def in_forked_child(self) -> bool: ...

class Store(C10dStore):
    """A c10d Store over the exactly-once client: all of c10d's operations. Standalone: job-scoped keys."""

    def __init__(
        self, addresses: list[str], job: str, timeout: timedelta, token_file: str = "", tls: TlsFiles = ("", "", "")
    ) -> None: ...
    @property
    def session(self) -> Session | None: ...
    @property
    def server_id(self) -> str: ...
    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None: ...
    def exchange(
        self, key: str, rank: int, size: int, value: bytes, timeout: timedelta | None = None
    ) -> list[bytes]: ...  # The values of all ranks, in rank order, when all have come.
    def agree(
        self, key: str, rank: int, size: int, value: bytes, generation: int, timeout: timedelta
    ) -> list[bytes]: ...  # exchange of all members of a generation: all get the values or nobody does. TIMEOUT: not taken part.
    def agree_among_survivors(
        self, key: str, rank: int, size: int, value: bytes, generation: int, timeout: timedelta
    ) -> list[bytes]: ...  # Of those of them that are left: goes on over a fence; b"" for the others.
    def close(self) -> None: ...

class CallbackQueue:
    """The callbacks of one communicator's futures, one after another: see csrc/callback_queue.h."""

    @property
    def name(self) -> str: ...  # Of the communicator.
    @staticmethod
    def share(target: Future, source: Future) -> None: ...  # `target` is the same future as `source` from now on.
    def turn_after(self, future: Future) -> Future: ...  # To put callbacks on, for `add` to complete.
    def add(self, future: Future, turn: Future) -> None: ...  # Completes `turn` after `future` and the turns before.
    def run(self, callback: Callable[[Future], Any], future: Future) -> Any: ...  # callback(future), marked as its own.

class ResilientWork(Work):
    """The Work of an operation: see csrc/work.h."""

    @property
    def callbacks(self) -> CallbackQueue | None: ...  # None: a send's or receive's.
    def get_future(self) -> Future: ...  # Of _futures.OrderedFuture, where it has callbacks.

class Presence:
    """A key of the job that is there as long as this process lives and is heard (a lease of its own)."""

    def __init__(
        self,
        addresses: list[str],
        job: str,
        key: str,
        value: bytes,
        timeout: float,
        token_file: str = "",
        tls: TlsFiles = ("", "", ""),
    ) -> None: ...
    @property
    def lost(self) -> str: ...  # Why the store has forgotten it for good (it was restarted); "": it has not.
    def close(self) -> None: ...  # Says goodbye: the key goes at once.

class Announcement:
    """Says to the store, in the background and as soon as there is one, that this process lives and is that rank."""

    def __init__(
        self,
        addresses: list[str],
        job: str,
        rank: int,
        world_size: int,
        token_file: str = "",
        tls: TlsFiles = ("", "", ""),
    ) -> None: ...
    def close(self) -> None: ...  # Says goodbye.

class NcclOptions(Backend.Options):
    """What a group asks of NCCL: see csrc/python/bind_options.cc. Immutable; ConfigError for a value that cannot be."""

    def __init__(
        self,
        *,
        is_high_priority_stream: bool = False,
        cga_cluster_size: int | None = None,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
        net_name: str | None = None,
        traffic_class: int | None = None,
        comm_name: str | None = None,
        collnet_enable: int | None = None,
        cta_policy: int | None = None,
        nvls_ctas: int | None = None,
        nchannels_per_net_peer: int | None = None,
        nvlink_centric_sched: int | None = None,
        max_p2p_peers: int | None = None,
    ) -> None: ...
    @property
    def is_high_priority_stream(self) -> bool: ...
    @property
    def cga_cluster_size(self) -> int | None: ...
    @property
    def min_ctas(self) -> int | None: ...
    @property
    def max_ctas(self) -> int | None: ...
    @property
    def net_name(self) -> str | None: ...
    @property
    def traffic_class(self) -> int | None: ...
    @property
    def comm_name(self) -> str | None: ...
    @property
    def collnet_enable(self) -> int | None: ...
    @property
    def cta_policy(self) -> int | None: ...
    @property
    def nvls_ctas(self) -> int | None: ...
    @property
    def nchannels_per_net_peer(self) -> int | None: ...
    @property
    def nvlink_centric_sched(self) -> int | None: ...
    @property
    def max_p2p_peers(self) -> int | None: ...

def create_backend(
    store: C10dStore,
    rank: int,
    size: int,
    timeout: timedelta,
    group_name: str,
    global_ranks: list[int],
    nccl: NcclOptions | None = None,
) -> Backend:
    """`store` is the (prefixed) store that the group was given; its innermost store must be a `Store` of a Session.
    global_ranks empty: the world. A ReconfigurableBackend where that session has a reconfigure_scope."""

class ResilientBackend(Backend):
    """Every other group: see csrc/backend.h."""

    def perform_nocolor_split(self, device: object, /) -> None: ...  # Nothing: a split of ours needs its members alone.
    def _add_ephemeral_timeout(self, timeout: timedelta) -> None: ...

class ReconfigurableBackend(Backend):  # From torch 2.14 on.
    """A group whose members are set by reconfigure(uuid, handles): see csrc/reconfigurable.h."""

    @property
    def session(self) -> Session: ...  # That of the present members; without any, this process's own.

can_follow: bool  # Rank and size of a group can change in place with this version of torch.

def follow_world(world: ProcessGroup, in_place: bool) -> ProcessGroup: ...  # What has the numbers of a world that has been resized: itself, or another one that takes its place.
def abort_group(backend: Backend, why: str) -> None: ...  # abort(), and `why` is in the text that all ranks raise.
def op_log(backend: Backend) -> list[dict[str, Any]]:
    """The latest 2,000 operations of a group of ours, oldest first: id seq name dtype count state ("running",
    "completed", "failed") call_site started ended (unix s; 0: not yet) failure. seq 0: it was refused."""

def whereabouts(timeout: float = 3.0) -> dict[str, Any] | None:
    """What this process says of itself to those that wait for it: thread (empty: the main thread) at stack no_progress
    expected_slow expected_slow_for (seconds); see <resilient/whereabouts.h>. For tests and diagnosis. None: no answer
    within `timeout` seconds."""

def threads() -> list[dict[str, Any]]:
    """All threads that run Python code: id name at told (others that wait for this process are told of that one)."""

def expect_slow(what: str, seconds: float) -> int:
    """Announces that the program may be silent; the token is for end_expect_slow. 0: 64 are announced already."""

def end_expect_slow(token: int) -> None: ...
