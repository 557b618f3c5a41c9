"""Situations of what programs do once they run: with torch.distributed, and at their end."""

import signal
import time
from pathlib import Path

from situations.situation import Place, Situation

READY_SECONDS = 300  # To import everything, on a busy machine.


def await_ready(place: Place, number: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while len(place.marks("ready")) < number and time.monotonic() < deadline:
        time.sleep(0.02)


def sends(number: int, ready: int = 2):
    """Once the ranks are ready their process groups get a signal."""

    def act(place: Place, running) -> None:
        await_ready(place, ready)
        running.signal(number)

    return act


def then_go(number: int):
    """A signal that changes nothing, and the word to end."""

    def act(place: Place, running) -> None:
        await_ready(place, 2)
        running.signal(number)
        (place.folder / "go-0").touch()

    return act


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop_and_go(place: Place, running) -> None:
    await_ready(place, 2)
    running.signal(signal.SIGSTOP)
    while not all(stopped(process.pid) for process in running.processes):
        time.sleep(0.02)
    running.signal(signal.SIGCONT)
    (place.folder / "go-0").touch()


WORLDS = [
    Situation("tcp:// with numbers", "init_method, rank= and world_size=", program="tcp_numbers"),
    Situation("tcp:// with a query", "?rank=0&world_size=2", program="tcp_query"),
    Situation("file://", "", program="by_file"),
    Situation("TCPStore handed in", "", program="tcp_store", quick=True),
    Situation("PrefixStore handed in", "", program="prefix_store"),
    Situation("FileStore handed in", "", program="file_store"),
    Situation("HashStore, world of one", "", program="hash_store", ranks=1),
    Situation("world of one", "one rank by plain variables", ranks=1),
    Situation("positional arguments", "as old tutorials write it", program="positional"),
    Situation("backend in upper case", "", program="upper_case"),
    Situation("backend by device", "`cpu:gloo`", program="by_device"),
    Situation("default timeout", "no timeout is named", program="default_timeout"),
    Situation("longest timeout", "timedelta.max", program="longest_timeout"),
    Situation("timeout=60", "an int", program="timeout_of_an_int", ends="timeout"),
    Situation("late rank", "5 s late for an operation, timeout 2 s", program="late_rank"),
    Situation("late init", "5 s late for init, timeout 3 s", program="late_init"),
    Situation("after a failed init", "at another address first, both as rank 1 of 2",
              program="after_a_failed_init"),
    Situation("two worlds, one port", "init, destroy, init again", program="twice", worlds=4),
    Situation("two worlds, two ports", "", program="two_ports", worlds=4),
    Situation("ten worlds", "one after another at one port", program="ten_worlds"),
    Situation("rpc at the same port", "", program="rpc_beside"),
]  # fmt: skip

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"}
USES = [
    Situation("init in a thread", "", program="in_a_thread"),
    Situation("asyncio", "the world in asyncio.to_thread()", program="in_asyncio"),
    Situation("main thread has returned", "another thread trains", program="main_thread_returns"),
    Situation("threads with groups", "two at a time", program="threads_with_groups"),
    Situation("DataLoader workers", "forked and spawned", program="loader_workers"),
    Situation("a timer's signals", "every 5 ms", program="signals_while_training"),
    Situation("traced and profiled", "", program="traced"),
    Situation("other defaults", "float64, deterministic, anomaly mode, denormals flushed",
              program="strange_defaults"),
    Situation("warnings are errors", "", program="warnings_are_errors"),
    Situation("debug variables", "TORCH_DISTRIBUTED_DEBUG=DETAIL and all logs",
              environment={**DETAIL, "TORCH_LOGS": "+distributed",
                           "TORCH_SHOW_CPP_STACKTRACES": "1"}),
    Situation("subgroups", "new_subgroups, by enumeration, of one, by members alone",
              program="groups"),
    Situation("a gloo group beside", "new_group(backend='gloo')", program="gloo_beside"),
    Situation("30 groups", "made, used and destroyed", program="thirty_groups"),
    Situation("DeviceMesh", "two dimensions", program="meshes"),
    Situation("DDP", "with Adam and a hook that compresses", program="distributed_data_parallel"),
    Situation("FSDP", "fully_shard on the CPU", program="sharded"),
    Situation("ZeroRedundancyOptimizer", "", program="zero_optimizer"),
    Situation("objects", "all_gather_object and others", program="objects"),
    Situation("batch_isend_irecv", "", program="point_to_point"),
    Situation("async_op", "waited for in reverse, futures", program="asynchronous"),
    Situation("tensors of all kinds", "empty, strided, 0-dimensional; monitored_barrier",
              program="types"),
    Situation("checkpoint", "torch.distributed.checkpoint", program="checkpoints"),
    Situation("uneven inputs", "DDP's join()", program="uneven_inputs"),
]  # fmt: skip

TERM, INT = -signal.SIGTERM, -signal.SIGINT
IGNORES_HANGUP = ("nohup",)
ENDS = [
    Situation("no destroy", "the program returns", program="without_destroy"),
    Situation("os._exit(0)", "without destroy", program="os_exit"),
    Situation("os._exit(0) in a thread", "", program="os_exit_in_a_thread"),
    Situation("sys.exit in a finally", "", program="exit_in_finally"),
    Situation("sys.exit in a thread", "", program="exit_in_a_thread"),
    Situation("sys.exit(3)", "on all ranks, after destroy", program="exit_code_3", codes=(3,)),
    Situation("atexit before init", "it communicates and destroys", program="at_exit_before"),
    Situation("atexit after init", "it communicates and destroys", program="at_exit_after"),
    Situation("finalizer destroys", "at the interpreter's end", program="by_finalizer"),
    Situation("groups without destroy", "collected while the world runs",
              program="groups_without_destroy"),
    Situation("a thread goes on", "after the main thread has returned", program="thread_goes_on"),
    Situation("a daemon thread", "it goes on with all_reduce while the process ends",
              program="daemon_thread"),
    Situation("rank 0 goes first", "the other destroys 2 s later", program="rank_0_goes_first"),
    Situation("rank 0 is done", "os._exit(0); the others go on in a group of their own", ranks=3,
              program="rank_0_is_done"),
    Situation("one rank raises", "", program="one_raises", ends="a bad batch"),
    Situation("one rank exits", "sys.exit(0), and the other needs it", program="one_exits",
              codes=(0, 1), ends="Error"),
    Situation("one rank is killed", "SIGKILL", program="one_is_killed", codes=(1, -9),
              ends="rank 1"),
    Situation("one rank aborts", "SIGABRT", program="one_aborts", codes=(1, -6), ends="rank 1"),
    Situation("Ctrl-C", "to all ranks in the midst of training", program="endless",
              act=sends(signal.SIGINT), codes=(INT, 1), ends="KeyboardInterrupt"),
    Situation("Ctrl-C in a wait", "rank 0 waits for rank 1, which does something else",
              program="waiting", act=sends(signal.SIGINT), codes=(INT, 1),
              ends="KeyboardInterrupt"),
    Situation("Ctrl-C in init", "rank 1 never comes", program="waiting_for_init",
              environment={"WORLD_SIZE": "2"}, ranks=1, act=sends(signal.SIGINT, ready=1),
              codes=(INT, 1),
              ends="KeyboardInterrupt"),
    Situation("SIGTERM", "to all ranks in the midst of training", program="endless",
              act=sends(signal.SIGTERM), codes=(TERM,), quick=True),
    Situation("SIGTERM handled", "a flag on which the ranks agree, then destroy",
              program="ends_when_told", act=sends(signal.SIGTERM)),
    Situation("SIGTERM exits", "its handler calls sys.exit(0)", program="exits_when_told",
              act=sends(signal.SIGTERM), codes=(0, 1)),
    Situation("SIGUSR1", "handled in the midst of training", program="stays",
              act=then_go(signal.SIGUSR1)),
    Situation("nohup", "SIGHUP while it trains", program="stays", wrap=IGNORES_HANGUP,
              act=then_go(signal.SIGHUP)),
    Situation("Ctrl-Z", "stopped for a moment, then continued", program="stays",
              act=stop_and_go),
]  # fmt: skip
