"""init_process_group("resilient"): settings, the store's address, the session, then torch's own
init on the session's store."""

import contextlib
import inspect
import io
import os
import sys
import time
import uuid
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_resilient import (
    _address,
    _devices,
    _errors,
    _launchers,
    _names,
    _native,
    _options,
    _presence,
    _reach,
    _server,
    _worlds,
)
from torch_resilient._say import say

DEFAULT_TIMEOUT = timedelta(minutes=30)
_STORE_IS_ENDING = ("STORE_LOST", "JOB")  # JOB: another server has the address by now.
_STORES_MAX = 8  # That one init starts, in vain.
_LEVELS = ("debug", "info", "warn", "error")
SPARES = "RESILIENT_SPARES"
SPARE = -2  # The rank of a process that waits for one.

_warned = set()
_tells_launcher = False


def init_process_group(original, asked, *args, **kwargs):
    """What the wrapper of torch.distributed.init_process_group does for our backend. `asked`: the
    backend that the program names, which may be one that we take over."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    if c10d._world.default_pg is not None:
        return original(*args, **kwargs)  # Its own error: initialised twice.
    _begin(original, asked, call)


class _Again(NamedTuple):
    """The ranks of an init ran together before: how long they wait for each other, and with how
    many of them they go on then; 0: with all only."""

    seconds: float
    min_world: int


def begin_again(world, seconds, min_world):
    """The world that comes after `world`, whose process group has been destroyed: of so many ranks,
    this one with the same number, at the store that is found now. `seconds`: for the ranks to come;
    then those that have come are numbered in their order, if they are `min_world` at least (0:
    all). Otherwise, and for all else, what init_process_group raises."""
    original, asked, call = world.begun_by
    arguments = {**call.arguments, "rank": world.rank, "world_size": world.world_size}
    call = inspect.BoundArguments(call.signature, arguments)
    _begin(original, asked, call, _Again(seconds, min_world))


def _begin(original, asked, call, again=None):
    begun_by = original, asked, inspect.BoundArguments(call.signature, dict(call.arguments))
    arguments = call.arguments
    _tell_launcher_of_config_errors()
    native = _native.load()
    arguments["pg_options"] = _options.taken(arguments["pg_options"], arguments["backend"])
    launched = _launchers.adopt(arguments, os.environ)
    settings = read_settings(native, os.environ)
    helper = _worlds.is_helper(os.environ)
    init = _init_of(arguments, settings, os.environ, helper)
    rank, _ = seat(init.rank, init.processes, settings["spares"])
    _check_reconfigurable(arguments, settings)
    timeout = _timeout_of(arguments)
    deadline = time.monotonic() + (again.seconds if again else timeout.total_seconds())
    native.set_log(settings["log"], _tag(rank))
    if asked != arguments["backend"]:
        text = f"{_names.TAKE_OVER}: resilient serves this world, the program asks for {asked!r}"
        log_line(settings, rank, "info" if rank else "warn", text)
    if launched is not None:
        text = f"{launched.launcher} started rank {init.rank} of {init.processes}"
        log_line(settings, rank, "info", text)
    launchers = _init_of_launcher(settings, os.environ)
    with contextlib.nullcontext() if helper else _presence.in_init(init, launchers):
        world = _joined_world(native, arguments, settings, init, helper, timeout, deadline, again)
    _presence.end()  # The session has a lease of its own.
    world.begun_by = begun_by
    try:
        world.store = world.session.store(timeout)
        arguments.update(
            store=world.store,
            init_method=None,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
        )
        _leave_stacks_out(os.environ)
        original(*call.args, **call.kwargs)
    except BaseException:
        world.close()
        raise
    world.process_group = c10d._world.default_pg
    if _wants_reconfigure(arguments):
        world.reconfigurable = world.process_group._get_backend(torch.device("cpu"))
    if asked != arguments["backend"]:
        world.asked[world.process_group.group_name] = str(asked or _names.TORCH_DEFAULT)
    _worlds.registry.add(world)
    _worlds.claim_ownership()


def _timeout_of(arguments):
    timeout = arguments["timeout"]
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r:.200}: init_process_group takes a datetime.timedelta, as in"
            " timeout=timedelta(seconds=60)"
        )
    return timeout or DEFAULT_TIMEOUT


def _leave_stacks_out(environment):
    """From 2.15 on torch's flight recorder writes a trace at a failure. To put call stacks into it
    torch imports its compiler, 900 modules, with the GIL held for most of some seconds in which the
    program is to be in its next generation."""
    if hasattr(dist.ProcessGroup, "supports_completion_hooks"):
        environment.setdefault(_worlds.STACKS_VARIABLE, "0")


def _wants_reconfigure(arguments):
    """The program names the members itself; an argument of torch from 2.14 on."""
    return bool(arguments.get("enable_reconfigure"))


def _check_reconfigurable(arguments, settings):
    if not _wants_reconfigure(arguments):
        return
    backend = str(arguments["backend"]).lower()
    if {part.rpartition(":")[2].strip() for part in backend.split(",")} != {_names.BACKEND}:
        raise _errors.ConfigError(
            f"backend={backend!r} and enable_reconfigure=True: torch reconfigures groups of a"
            " single backend only; name 'resilient' alone"
        )
    if settings["spares"]:
        raise _errors.ConfigError(
            f"{SPARES}={settings['spares']} and enable_reconfigure=True: a spare takes a lost seat"
            " by itself, and here the program says who is a member"
        )


def _tell_launcher_of_config_errors():
    """Under resilient-run a rank that a ConfigError ends is not started again: its exit code is
    EX_CONFIG. The program's own hook prints the error, and what it has for its end runs."""
    global _tells_launcher
    if _tells_launcher or os.environ.get("RESILIENT_SUPERVISED") != "1":
        return
    _tells_launcher = True
    print_error = sys.excepthook

    def hook(kind, error, trace):
        print_error(kind, error, trace)
        if issubclass(kind, _errors.ConfigError):
            # Inside torch's hook, which collects the text and would drop it with this exit.
            if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
                sys.__stderr__.write(sys.stderr.getvalue())
                sys.__stderr__.flush()
            raise SystemExit(os.EX_CONFIG)

    sys.excepthook = hook


def _tag(rank):
    return "spare" if rank == SPARE else f"rank {rank}"


def _joined_world(native, arguments, settings, init, helper, timeout, deadline, again):
    """A world whose session has joined. A store that was found may be ending, because its host has
    just left the world before: then the one of the next world is looked for. SystemExit for a spare
    whose world has ended without need of it."""
    spawned = 0
    while True:
        world = _open_world(native, arguments, settings, init, helper, timeout, deadline, again)
        try:
            if world.rank == SPARE:
                log_line(settings, SPARE, "info", f"waits for a seat among {world.world_size}")
            world.session.init()
            if not _wants_reconfigure(arguments):  # That session is of this process alone.
                _take_number(native, world, settings, os.environ)
            _worlds.tell_of_seat(world.world_size)
            _devices.warn_of_crowd(world)
            return world
        except BaseException as error:
            world.close()
            code = getattr(error, "code", "")
            if code == "LEFT" and error.rank is None:  # A rank that has left is named.
                log_line(settings, SPARE, "warn", "the world has ended without need of this spare")
                raise SystemExit(0) from None
            spawned += world.store_spawned
            over = time.monotonic() > deadline or spawned == _STORES_MAX
            if world.store_given or over or code not in _STORE_IS_ENDING:
                raise


def _take_number(native, world, settings, environment):
    """From here on this process is a rank like any other, to whoever reads the environment too."""
    now = world.session.membership()
    known = now["rank"], len(now["members"])
    if known == (world.rank, world.world_size) and not settings["spares"]:
        return
    if world.rank != now["rank"]:
        log_line(settings, now["rank"], "info", f"was {_tag(world.rank)}, has a seat now")
    world.rank, world.world_size = known
    native.set_log(settings["log"], _tag(world.rank))
    environment.update(RANK=str(world.rank), WORLD_SIZE=str(world.world_size))
    environment.pop(SPARES, None)


def create_backend(options, backend_options):
    """Called by torch for each group of ours."""
    native = _native.load()
    return native.create_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        str(options.group_id),
        list(options.global_ranks_in_group),
        nccl=_options.ours(native, backend_options),
    )


def rendezvous(url, timeout=DEFAULT_TIMEOUT, **kwargs):
    """Handler of resilient://host:port for other backends: a plain store, new keys at each init."""
    del kwargs
    native = _native.load()
    settings = read_settings(native, os.environ)
    host, port = _address.from_url(url)
    query = parse_qs(urlparse(url).query)
    try:
        rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
    except (KeyError, ValueError):
        raise _errors.ConfigError(f"{url}: rank and world_size are missing") from None
    address = _server.join_host_port(host, port)
    job = settings["job"] or address
    store = native.Store([address], job, timeout, settings["token_file"], settings["tls"])
    count = store.add(f"resilient/inits/{rank}", 1)
    yield dist.PrefixStore(f"resilient/init/{count}", store), rank, world_size


def read_settings(native, environment):
    """The settings; each warning is printed once a process. ConfigError for a bad value."""
    ours = {name: value for name, value in environment.items() if name.startswith("RESILIENT_")}
    settings = native.parse_settings(ours)
    for warning in settings.get("warnings", ()):
        if warning not in _warned:
            _warned.add(warning)
            say(f"[resilient] warning: {warning}")
    return settings


def rank_and_size(arguments, environment):
    """Rank and world size from the arguments, the URL, or the environment, in torch's order."""
    query = parse_qs(urlparse(arguments["init_method"] or "").query)
    rank = _number("rank", arguments["rank"], query, "RANK", environment)
    size = _number("world_size", arguments["world_size"], query, "WORLD_SIZE", environment)
    if size < 1:
        raise _errors.ConfigError(f"world size {size}: WORLD_SIZE must be at least 1")
    if not 0 <= rank < size:
        raise _errors.ConfigError(
            f"rank {rank} of a world of {size}: RANK must be 0 to {size - 1} (WORLD_SIZE - 1)"
        )
    return rank, size


def seat(process, processes, spares):
    """Rank and world size of one of `processes`, the last `spares` of which have no rank yet."""
    world_size = processes - spares
    if world_size < 1:
        raise _errors.ConfigError(
            f"{SPARES}={spares} and WORLD_SIZE={processes}: WORLD_SIZE counts the spares too, and"
            " one rank must be left"
        )
    return (process if process < world_size else SPARE), world_size


def _number(name, argument, query, variable, environment):
    if argument is not None and argument >= 0:
        return int(argument)
    text = query[name][0] if name in query else environment.get(variable, "")
    if not text:
        raise _errors.ConfigError(
            f"{variable} is not set: start the script with a launcher (resilient-run --nproc 4"
            f" script.py, torchrun, mpirun, srun), set {variable}, or pass {name}= to"
            " init_process_group"
        )
    number = _names.number(text)
    if number is None:
        raise _errors.ConfigError(f"{variable}={text!r} is not a number")
    return number


def launcher_attempt(settings, environment):
    """How often the launcher has started all workers anew.

    Agents that met by our own rendezvous say so, the same on all nodes. Otherwise
    torchrun's count is used on a single node only: an agent that restarts its workers because
    another node failed does not count that, so the nodes of one world differ in it.
    """
    if settings["attempt"]:
        return settings["attempt"]
    count = _names.number(environment.get("TORCHELASTIC_RESTART_COUNT")) or 0
    one_node = _names.number(environment.get("GROUP_WORLD_SIZE", "1")) == 1
    return count if count > 0 and one_node else 0


def log_line(settings, rank, level, text):
    threshold = settings["log"].rpartition(":")[2]
    if threshold in _LEVELS and _LEVELS.index(level) >= _LEVELS.index(threshold):
        say(f"[resilient] {_tag(rank)}: {text}")


def _meeting(settings, environment, url, given, by_address):
    """(job, port, address) of an init. `port`: as in _presence.Init; `address`: where torch would
    make its store."""
    address = _address.of_launcher(url, environment)
    job = _address.job_name(settings, environment, address if given or by_address else "", given)
    return job, address.rpartition(":")[2] if by_address and not given else "", address


def _init_of(arguments, settings, environment, helper):
    """What this init is told from others by."""
    process, processes = rank_and_size(arguments, environment)
    given, by_address = _is_given(arguments, settings), _is_by_address(arguments)
    url = arguments["init_method"] or ""
    job, port, address = _meeting(settings, environment, url, given, by_address)
    if helper:
        # Not a rank of the job: a world of its own, found by its members under its own address.
        alone = processes - settings["spares"] == 1
        job += f"/helper-{os.getpid() if alone else address or 'any'}"
    return _presence.Init(job, port, process, processes)


def _init_of_launcher(settings, environment):
    """The same of an init whose program names nothing but the backend."""
    job, port, _ = _meeting(settings, environment, "", bool(settings["store"]), by_address=True)
    rank, processes = (_names.number(environment.get(name)) for name in ("RANK", "WORLD_SIZE"))
    return _presence.Init(job, port, rank, processes)


def _open_world(native, arguments, settings, init, helper, timeout, deadline, again):
    environment = os.environ
    job = init.job
    rank, world_size = seat(init.rank, init.processes, settings["spares"])
    search = _address.Search(
        native,
        settings,
        init.rank,
        job,
        deadline,
        log=lambda text: log_line(settings, rank, "info", text),
        warn=lambda text: log_line(settings, rank, "warn", text),
    )
    endpoint = _find_store(arguments, settings, environment, search, init.processes)
    device = _devices.claim_of(native, settings, init.rank, arguments["device_id"], environment)
    scope = f"{job}/reconfigure" if _wants_reconfigure(arguments) else ""
    # Then the members' sessions follow, one after the other, and this one is the process's own.
    own = (f"{scope}/process-{uuid.uuid4().hex}", 0, 1)
    session_job, session_rank, session_size = own if scope else (job, rank, world_size)
    alone = helper or bool(scope)  # Nobody replaces this session's process, or waits for it.
    session = native.Session(
        addresses=endpoint.addresses,
        job=session_job,
        rank=session_rank,
        world_size=session_size,
        init_timeout=max(search.deadline - time.monotonic(), 0.001),
        budget=settings["budget"],
        seat_wait=0.0 if scope else settings["seat_wait"],
        min_world=again.min_world if again else 0,
        spare_if_taken=settings["spares"] > 0 or settings["replaces"],
        launcher_attempt=0 if alone else launcher_attempt(settings, environment),
        supervised=settings["supervised"] and not alone,
        host_watch=settings["host_watch"],
        expected_server=endpoint.server_id,
        hosts_store=endpoint.spawned and not scope,  # Others go on without this process.
        bind_address=_bind_address(endpoint.addresses[0], search.deadline),
        token_file=settings["token_file"],
        tls=settings["tls"],
        socket_ifname=settings["socket_ifname"],
        socket_streams=settings["socket_streams"],
        shm_limit=settings["shm_limit"],
        link_protection=(settings["checksums"], settings["encrypted_links"]),
        hierarchical_order=settings["hierarchical_order"],
        cuda_libraries=(settings["nccl_library"], settings["cuda_runtime"]),
        shared_gpu=settings["shared_gpu"],
        eager_device=-1 if scope else _devices.bound_ordinal(arguments["device_id"]),
        auto_heal=settings["auto_heal"] and not scope,
        replay=settings["replay"] and not scope,
        strict_timeouts=settings["strict_timeouts"],
        op_deadline=settings["op_deadline"],
        wait_log=settings["wait_log"],
        stalls=(settings["stall"], settings["device_stall"]),
        presence=("" if alone else _presence.prefix_for(init, environment), init.name()),
        timeout=timeout,
        device=device if device.uuid and not settings["allow_shared_gpu"] else None,
        nccl=_options.ours(native, arguments["pg_options"]),
        reconfigure_scope=scope,
    )
    return _worlds.World(
        *(session, rank, world_size, job, endpoint.addresses, settings, endpoint.given),
        device=device,
        store_spawned=endpoint.spawned,
        handed_in=endpoint.other,
    )


def _is_given(arguments, settings):
    """Whether the store of ours is one that somebody else has started."""
    url = arguments["init_method"] or ""
    given = settings["store"] or url.startswith("resilient://")
    return bool(given or getattr(arguments["store"], "addresses", None))


def _is_by_address(arguments):
    """Whether nothing but an address leads to the store."""
    url = arguments["init_method"] or ""
    return arguments["store"] is None and (not url or url.startswith(("env:", "tcp:")))


def _find_store(arguments, settings, environment, search, processes):
    url = arguments["init_method"] or ""
    store = arguments["store"]
    if store is not None and url:
        raise _errors.ConfigError("init_method and store exclude each other: pass one of them")
    if settings["store"]:
        return _address.given(settings["store"])
    if url.startswith("resilient://"):
        return _address.given(_server.join_host_port(*_address.from_url(url)))
    if getattr(store, "addresses", None):  # torch_resilient.Store
        return _address.given(",".join(store.addresses))
    if store is None:
        if _is_by_address(arguments):
            return _find_by_address(url, settings, environment, search, processes)
        if url.startswith("file:"):
            url = url.partition("?")[0]  # It may say rank and size, which are known.
            _check_folder(url)
        timeout = search.timeout()
        store, _, _ = next(c10d.rendezvous(url, search.rank, processes, timeout=timeout))
    endpoint = _address.through(search, store, _launcher_host(environment))
    endpoint.other = store
    return endpoint


def _check_folder(url):
    """torch's FileStore waits for the folder of its file until its timeout."""
    folder = os.path.dirname(urlparse(url).path)
    if not os.path.isdir(folder):
        raise _errors.ConfigError(
            f"init_method {url!r}: there is no folder {folder!r} on this host; name a file in one"
            " that all ranks share"
        )


def _find_by_address(url, settings, environment, search, processes):
    host, port = _server.split_host_port(_address.of_launcher(url, environment, required=True))
    if agent := _host_of_agent(environment, host, port, search.deadline):
        # The port belongs to the store of torchrun's agent, which outlives the workers.
        store = dist.TCPStore(agent, port, is_master=False, timeout=search.timeout())
        return _address.through(search, store, agent)
    spans = _reach.spans_hosts(environment, processes, host)
    numbers = _address.addresses_of(host, search.deadline) if spans else ()
    found = _reach.host_of_store(host, numbers, spans, settings)
    if found != host:
        search.log(f"{host} stands for this host: the store of its ranks is at {found}")
    return _address.at(search, found, port, alone=processes == 1)


def _host_of_agent(environment, host, port, deadline):
    """As torchrun spells it, where that is the address of its own store; else nothing."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    theirs = environment.get("MASTER_ADDR", "").strip().lower()
    is_port = port == _names.number(environment.get("MASTER_PORT"))
    return theirs if is_port and _address.is_one_host(theirs, host, deadline) else ""


def _launcher_host(environment):
    return environment.get("MASTER_ADDR", "").strip() or "127.0.0.1"


def _bind_address(store_address, deadline):
    """Where this rank listens for its peers: the address of this host on the way to the store."""
    numbers = _address.addresses_of(_server.split_host_port(store_address)[0], deadline)[:1]
    if not numbers or numbers[0].startswith("127.") or numbers[0] == "::1":
        return "127.0.0.1"
    return numbers[0] if _address.is_local(numbers) else _address.own_address_towards(numbers)
