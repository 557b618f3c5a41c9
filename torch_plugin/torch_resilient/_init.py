"""init_process_group("resilient"): settings, the store's address, the session, then torch's own
init on the session's store."""

import inspect
import io
import os
import sys
import time
import uuid
from datetime import timedelta
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
    _server,
    _worlds,
)
from torch_resilient._say import say

DEFAULT_TIMEOUT = timedelta(minutes=30)
_STORE_IS_ENDING = ("STORE_LOST", "JOB")  # JOB: another server has the address by now.
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
    arguments = call.arguments
    if c10d._world.default_pg is not None:
        return original(*args, **kwargs)  # Its own error: initialised twice.
    _tell_launcher_of_config_errors()
    native = _native.load()
    arguments["pg_options"] = _options.taken(arguments["pg_options"], arguments["backend"])
    launched = _launchers.adopt(arguments, os.environ)
    settings = read_settings(native, os.environ)
    process, processes = rank_and_size(arguments, os.environ)
    rank, _ = seat(process, processes, settings["spares"])
    _check_reconfigurable(arguments, settings)
    timeout = arguments["timeout"] or DEFAULT_TIMEOUT
    started = time.monotonic()
    native.set_log(settings["log"], _tag(rank))
    if asked != arguments["backend"]:
        text = f"{_names.TAKE_OVER}: resilient serves this world, the program asks for {asked!r}"
        log_line(settings, rank, "info" if rank else "warn", text)
    if launched is not None:
        text = f"{launched.launcher} started rank {process} of {processes}"
        log_line(settings, rank, "info", text)
    world = _joined_world(native, arguments, settings, process, processes, timeout, started)
    _presence.end()  # The session has a lease of its own.
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


def _joined_world(native, arguments, settings, process, processes, timeout, started):
    """A world whose session has joined. A store that was found may be ending, because its host has
    just left the world before: then the one of the next world is looked for. SystemExit for a spare
    whose world has ended without need of it."""
    while True:
        world = _open_world(native, arguments, settings, process, processes, timeout, started)
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
            over = time.monotonic() > started + timeout.total_seconds()
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
    try:
        return int(text)
    except ValueError:
        raise _errors.ConfigError(f"{variable}={text!r} is not a number") from None


def launcher_attempt(settings, environment):
    """How often the launcher has started all workers anew.

    Agents that met by our own rendezvous say so, the same on all nodes. Otherwise
    torchrun's count is used on a single node only: an agent that restarts its workers because
    another node failed does not count that, so the nodes of one world differ in it.
    """
    if settings["attempt"]:
        return settings["attempt"]
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    one_node = environment.get("GROUP_WORLD_SIZE", "1") == "1"
    return int(count) if count.isdigit() and one_node else 0


def log_line(settings, rank, level, text):
    threshold = settings["log"].rpartition(":")[2]
    if threshold in _LEVELS and _LEVELS.index(level) >= _LEVELS.index(threshold):
        say(f"[resilient] {_tag(rank)}: {text}")


def _open_world(native, arguments, settings, process, processes, timeout, started):
    environment = os.environ
    rank, world_size = seat(process, processes, settings["spares"])
    helper = _worlds.is_helper(environment)
    if not helper:
        _presence.announce(environment)  # Torch may have been imported before RANK was set.
    launcher_address = _address.of_launcher(arguments["init_method"] or "", environment)
    job = _address.job_name(settings, environment, launcher_address)
    if helper:
        # Not a rank of the job: a world of its own, found by its members under its own address.
        whose = str(os.getpid()) if world_size == 1 else launcher_address or "any"
        job = f"{job}/helper-{whose}"
    search = _address.Search(
        native,
        settings,
        process,
        job,
        started + timeout.total_seconds(),
        log=lambda text: log_line(settings, rank, "info", text),
        warn=lambda text: log_line(settings, rank, "warn", text),
    )
    endpoint = _find_store(arguments, settings, environment, search, timeout)
    device = _devices.claim_of(native, settings, process, arguments["device_id"], environment)
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
        checksums=settings["checksums"],
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
        presence="" if alone else _presence.prefix(environment),
        timeout=timeout,
        device=device if device.uuid and not settings["allow_shared_gpu"] else None,
        nccl=_options.ours(native, arguments["pg_options"]),
        reconfigure_scope=scope,
    )
    return _worlds.World(
        session, rank, world_size, job, endpoint.addresses, settings, endpoint.given, device=device
    )


def _find_store(arguments, settings, environment, search, timeout):
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
    if store is not None:
        return _address.through(search, store, _launcher_host(environment))
    if not url or url.startswith(("env:", "tcp:")):
        return _find_by_address(arguments, environment, search, timeout)
    rank, world_size = search.rank, max(arguments["world_size"], 1)
    if "WORLD_SIZE" in environment and arguments["world_size"] < 0:
        world_size = int(environment["WORLD_SIZE"])
    store, _, _ = next(c10d.rendezvous(url, rank, world_size, timeout=timeout))
    return _address.through(search, store, _launcher_host(environment))


def _find_by_address(arguments, environment, search, timeout):
    url = arguments["init_method"] or ""
    host, port = _server.split_host_port(_address.of_launcher(url, environment, required=True))
    agent = (
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and environment.get("MASTER_ADDR") == host
        and environment.get("MASTER_PORT") == str(port)
    )
    if not agent:
        return _address.at(search, host, port)
    # The port belongs to the store of torchrun's agent, which outlives the workers.
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return _address.through(search, store, host)


def _launcher_host(environment):
    return environment.get("MASTER_ADDR") or "127.0.0.1"


def _bind_address(store_address, deadline):
    """Where this rank listens for its peers: the address of this host on the way to the store."""
    numbers = _address.addresses_of(_server.split_host_port(store_address)[0], deadline)[:1]
    if not numbers or numbers[0].startswith("127.") or numbers[0] == "::1":
        return "127.0.0.1"
    return numbers[0] if _address.is_local(numbers) else _address.own_address_towards(numbers)
