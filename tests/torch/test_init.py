"""init_process_group: good and bad starts, again and again, beside other backends."""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell

import torch_resilient

WORKER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total.item()))
dist.destroy_process_group()
"""


def add_up(timeout=None):
    dist.init_process_group("resilient", timeout=timeout)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


def repeatedly(between_gloo, port):
    for number in range(10):
        assert add_up() == dist_size()
        if between_gloo:
            os.environ["MASTER_PORT"] = str(port)
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            assert int(total.item()) == dist_size()
            dist.destroy_process_group()
        assert not dist.is_initialized(), number
    assert "RESILIENT_OWNER" not in os.environ
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def dist_size():
    return int(os.environ["WORLD_SIZE"])


def stacks_of_traces():
    add_up()
    return os.environ["TORCH_INCLUDE_STACK_TRACE"]


@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1")])
def test_traces_have_no_stacks_unless_they_are_asked_for(world, given, kept):
    env = {"TORCH_INCLUDE_STACK_TRACE": given}
    assert world.run(stacks_of_traces, 1, env=env) == [kept]


@pytest.mark.parametrize("between_gloo", [False, True])
def test_ten_worlds_one_after_the_other(world, between_gloo):
    world.run(repeatedly, 3, between_gloo, harness.free_port())


def plain_variables():
    """The store listens at MASTER_ADDR:MASTER_PORT, and ends with the job."""
    return {
        "RESILIENT_STORE": None,
        "RESILIENT_JOB": None,
        "MASTER_PORT": str(harness.free_port()),
        "RESILIENT_LINGER": "1s",
    }


def test_without_an_address_a_rank_starts_the_store(world):
    assert world.run(add_up, 4, env=plain_variables()) == [4] * 4


def uses_the_world_at_exit():
    def last_words():
        print("last words of", add_together(), file=sys.stderr, flush=True)

    atexit.register(last_words)
    dist.init_process_group("resilient")


def add_together():
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total.item())


def test_an_exit_handler_from_before_init_may_use_the_world(world):
    for rank in world.start(uses_the_world_at_exit, 2):
        assert rank.wait(20) == 0, rank.stderr()
        assert "last words of 2" in rank.stderr()


def ends_beside_a_daemon_thread(joined):
    started, stopped = threading.Event(), threading.Event()

    def submit():
        while not stopped.is_set():
            with contextlib.suppress(RuntimeError):
                add_together()
                started.set()

    thread = threading.Thread(target=submit, daemon=True)

    def stop():
        stopped.set()
        thread.join()
        print("the thread has ended", file=sys.stderr, flush=True)

    if joined:
        atexit.register(stop)  # From before init.
    dist.init_process_group("resilient")
    thread.start()
    assert started.wait(20)


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined at exit"])
def test_a_daemon_thread_that_submits_does_not_abort_the_end(world, joined):
    for rank in world.start(ends_beside_a_daemon_thread, 2, joined):
        assert rank.wait(20) == 0, rank.stderr()
        assert ("the thread has ended" in rank.stderr()) == joined


def is_late_at_exit():
    dist.init_process_group("resilient")
    dist.barrier()
    torch_resilient._worlds.registry.close_all()  # As when an older exit handler is reached.
    with pytest.raises(RuntimeError, match="the process is ending"):
        add_together()


def test_what_comes_after_the_end_of_the_worlds_is_told_why(world):
    world.run(is_late_at_exit, 2)


def twice_on_the_same_port():
    first = add_up()
    return first, add_up()


def test_the_port_can_be_used_again_by_the_next_world(world):
    assert world.run(twice_on_the_same_port, 3, env=plain_variables()) == [(3, 3)] * 3


def leave_at_once(worlds):
    for _ in range(worlds):
        dist.init_process_group("resilient")
        dist.destroy_process_group()


def test_who_leaves_at_once_takes_the_store_from_nobody_who_has_its_seat(world):
    """Whoever were a step behind would init once more for the same world, and wait alone."""
    world.run(leave_at_once, 4, 20, env=plain_variables())


def with_method(method, rank, size):
    dist.init_process_group("resilient", init_method=method, rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


def test_tcp_and_file_and_resilient_urls(world, tmp_path):
    bare = dict.fromkeys(("RESILIENT_STORE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    bare["RESILIENT_LINGER"] = "1s"
    methods = [
        f"tcp://127.0.0.1:{harness.free_port()}",
        f"file://{tmp_path}/rendezvous",
        f"resilient://{world.store_address}",
    ]
    for method in methods:
        ranks = [world.start_rank(with_method, r, 2, method, r, 2, env=bare) for r in range(2)]
        assert [rank.value() for rank in ranks] == [2, 2], method


def with_store(port):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    for _ in range(2):
        dist.init_process_group("resilient", store=store, rank=rank, world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        assert int(total.item()) == size
    # The master of a TCPStore must outlive its clients.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.01)


def test_a_store_that_is_handed_in(world):
    env = {"RESILIENT_STORE": None, "RESILIENT_LINGER": "1s"}
    world.run(with_store, 3, harness.free_port(), env=env)


def our_store(address):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch_resilient.Store(address, timeout=timedelta(seconds=10), job="a store")
    store.set(f"from{rank}", str(rank))
    store.wait([f"from{other}" for other in range(size)])
    with pytest.raises(torch_resilient.StoreTimeoutError):
        store.wait(["nothing"], timedelta(milliseconds=50))
    dist.init_process_group("resilient", store=store, rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()
    return store.get(f"from{size - 1 - rank}")


def test_our_store_alone_and_handed_in(world):
    env = {"RESILIENT_STORE": None}
    assert world.run(our_store, 2, world.store_address, env=env) == [b"1", b"0"]


def gloo_over_our_store(address):
    for _ in range(2):
        dist.init_process_group(
            "gloo",
            init_method=f"resilient://{address}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
    return int(total.item())


def test_another_backend_over_our_store(world):
    assert world.run(gloo_over_our_store, 2, world.store_address) == [2, 2]


def two_names(backend):
    dist.init_process_group(backend)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


@pytest.mark.parametrize("backend", ["cpu:resilient", "cpu:resilient,cuda:resilient", "RESILIENT"])
def test_other_spellings_of_the_name(world, backend):
    assert world.run(two_names, 2, backend) == [2, 2]


def reinit():
    dist.init_process_group("resilient")
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("resilient")
    dist.barrier()
    dist.destroy_process_group()


def test_initialised_twice(world):
    world.run(reinit, 1)


# ---- bad starts: one clear line, exit code 1, nothing hangs


def start_script(world, rank, size, env=None, code=WORKER):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=world.environment(rank, size, env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_line(text):
    """Torch prefixes lines with the rank once a group exists; here none does."""
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("env", "code", "text"),
    [
        ({"RANK": "x"}, "SETTING", "RANK='x'"),
        ({"RANK": "7"}, "SETTING", "rank 7"),
        ({"RANK": None}, "SETTING", "RANK is not set"),
        ({"WORLD_SIZE": "0"}, "SETTING", "WORLD_SIZE"),
        ({"RESILIENT_BUDGET": "soon"}, "SETTING", "RESILIENT_BUDGET"),
        ({"RESILIENT_BUDGET": "5s"}, "SETTING", "(RESILIENT_LEASE_TTL or --lease-ttl"),
        ({"RESILIENT_STORE": "nonsense"}, "SETTING", "nonsense"),
        ({"RESILIENT_STORE": None, "MASTER_ADDR": None}, "SETTING", "MASTER_ADDR"),
        ({"RESILIENT_STORE": None, "MASTER_PORT": "http"}, "SETTING", "MASTER_PORT"),
    ],
)
def test_a_bad_setting_is_one_clear_line(world, env, code, text):
    process = start_script(world, 0, 1, env)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    line = last_line(stderr)
    assert line.startswith(f"torch_resilient.ConfigError: [resilient:{code}]"), stderr
    assert text in line


def test_the_deadlines_are_told_once_at_start(world):
    env = {"RESILIENT_LOG": "info", "RESILIENT_BUDGET": "30s", "RESILIENT_SEAT_WAIT": "1min"}
    process = start_script(world, 0, 1, env)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0 and stdout == "total 1\n"
    assert stderr.count("event=deadlines") == 1, stderr
    assert (
        "event=deadlines budget=30s abort=30s seat_wait=60s last_call=30s build=12s ready=30s"
        " rebuild=120s answer=30s lease=5s beat=1s known=6s op_deadline=120s stall=3600s"
        " device_stall=600s"
        " wait_log=30s: "
    ) in stderr


def test_an_unknown_setting_is_a_warning_that_names_the_nearest(world):
    process = start_script(world, 0, 1, {"RESILIENT_BUDGE": "20s"})
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0 and stdout == "total 1\n"
    assert stderr.count("RESILIENT_BUDGE ") + stderr.count("RESILIENT_BUDGE'") >= 1, stderr
    assert "RESILIENT_BUDGET" in stderr


def failing_init(timeout, together=False):
    if together:
        tell("here")
        hear()
    started = time.monotonic()
    try:
        dist.init_process_group("resilient", timeout=timedelta(seconds=timeout))
    except Exception as error:
        return type(error).__name__, error.code, str(error), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    "name, values",
    [
        ("RESILIENT_REDUCTION_ORDER", ("rank", "hierarchical")),
        ("RESILIENT_SOCKET_STREAMS", ("1", "4")),
        ("RESILIENT_LINK_TLS", ("0", "1")),
    ],
)
def test_ranks_of_different_settings_are_told_so(world, name, values):
    ranks = [
        world.start_rank(failing_init, rank, 2, 60, env={name: value})
        for rank, value in enumerate(values)
    ]
    for rank in ranks:
        _, code, text, seconds = rank.value(50)
        assert code == "MISMATCH" and f"{name}={values[1]} where" in text, text
        assert seconds < 20


def test_nobody_listens_at_the_address(world):
    env = {"RESILIENT_STORE": f"127.0.0.1:{harness.free_port()}"}
    [(_, code, text, seconds)] = world.run(failing_init, 1, 2, env=env)
    assert code in ("REFUSED", "STORE_LOST"), text
    assert env["RESILIENT_STORE"] in text
    assert 1.5 < seconds < 4


def test_another_protocol_at_the_address(world):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        [rank] = world.start(failing_init, 1, 20, env={"RESILIENT_STORE": address})
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        name, code, text, seconds = rank.value(30)
        connection.close()
    assert (name, code) == ("ConnectError", "PROTOCOL"), text
    assert seconds < 10


def test_a_missing_rank_is_named(world):
    ranks = [world.start_rank(failing_init, rank, 4, 2, True) for rank in (0, 1, 3)]
    for rank in ranks:
        assert rank.told() == "here"  # The time for all of them counts from the first one's init.
    for rank in ranks:
        rank.say("go")
    for rank in ranks:
        name, code, text, seconds = rank.value(20)
        assert (name, code) == ("JoinTimeoutError", "JOIN_TIMEOUT"), text
        assert "3 of 4" in text and "2" in text
        assert seconds < 4


def interrupted(what):
    if what == "init":
        tell("waiting")
        dist.init_process_group("resilient")
        return
    dist.init_process_group("resilient")
    if dist.get_rank() == 1:
        hear()
        os._exit(0)
    tell("waiting")
    if what == "barrier":
        dist.barrier()
    elif what == "all_reduce":
        dist.all_reduce(torch.ones(1))
    elif what == "wait":
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    else:
        dist.distributed_c10d._get_default_store().get("never")


@pytest.mark.parametrize("what", ["init", "barrier", "all_reduce", "wait", "store"])
def test_ctrl_c_ends_every_wait(world, what):
    first = world.start_rank(interrupted, 0, 2, what)
    other = None if what == "init" else world.start_rank(interrupted, 1, 2, what)
    assert first.told() == "waiting"
    assert first.outcome(0.5) is None
    started, _ = first.signal(signal.SIGINT)
    assert isinstance(first.error(5), KeyboardInterrupt)
    assert time.monotonic() - started < 1.5
    first.wait(5)
    assert first.ended_at - started < 3  # The interpreter's own end included.
    if other:
        other.say("go")
        other.wait(10)


def forked():
    dist.init_process_group("resilient")
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except torch_resilient.ConfigError as error:
            os._exit(40 if error.code == "FORKED" else 41)
        finally:
            os._exit(42)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return code, int(total.item())


def test_a_forked_child_is_told_so_and_does_no_harm(world):
    assert world.run(forked, 2) == [(40, 2), (40, 2)]


def forked_exits():
    """A child that ends like a Python program must not say goodbye in its parent's name."""
    dist.init_process_group("resilient")
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    for _ in range(20):
        dist.barrier()
    dist.destroy_process_group()


def test_the_end_of_a_forked_child_is_not_the_end_of_its_parent(world):
    ranks = world.start(forked_exits, 2)
    assert [rank.wait(20) for rank in ranks] == [0, 0]


def helper_opens_its_own():
    dist.init_process_group("resilient")
    pid = os.fork()
    if pid == 0:
        dist.distributed_c10d._world.default_pg = None
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d._world.pg_names.clear()
        dist.init_process_group("resilient", rank=0, world_size=1)
        total = torch.ones(1)
        dist.all_reduce(total)
        os._exit(50 + int(total.item()))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    dist.barrier()
    dist.destroy_process_group()
    return code


def test_a_helper_opens_a_world_of_its_own(world):
    assert world.run(helper_opens_its_own, 2) == [51, 51]
