"""Who waits for whom: late ranks are named, circles and standstills end with their cause."""

import ctypes
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell

import torch_resilient

SLACK_SECONDS = 3.0  # A busy machine, on top of what is promised.
LINES = {"RESILIENT_WAIT_LOG": "1s"}

transports = pytest.mark.parametrize("shm_limit", ["256MiB", "0"], ids=["shm", "tcp"])


def prepare(seconds, holding):
    """What a rank does that others wait for: in Python, or holding the GIL in native code."""
    if holding:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def one_is_late(seconds, holding):
    dist.init_process_group("resilient")
    dist.barrier()
    if dist.get_rank() == 0:
        prepare(seconds, holding)
    tensor = torch.ones(4)
    started = time.monotonic()
    dist.all_reduce(tensor)
    return tensor.tolist(), time.monotonic() - started


def waiting_lines(rank):
    return [line for line in rank.stderr().splitlines() if " has waited " in line]


@transports
def test_a_late_rank_is_named_with_where_it_is(world, shm_limit):
    env = {**LINES, "RESILIENT_SHM_LIMIT": shm_limit}
    ranks = world.start(one_is_late, 3, 5, False, env=env)
    outcomes = [rank.value() for rank in ranks]
    assert [values for values, _ in outcomes] == [[3.0] * 4] * 3
    for rank, (_, waited) in zip(ranks[1:], outcomes[1:], strict=True):
        lines = waiting_lines(rank)
        # The last one may come when rank 0 is on its way out of there.
        assert any(
            re.search(
                r"has waited \d+ s in all_reduce\(float32\[4\], sum\) #\d+ of group 'world' at"
                r" test_waiting\.py:\d+ one_is_late for rank 0 \(host .*, pid \d+\): alive, last"
                r" beat \d+\.\d s ago, main thread in test_waiting\.py:\d+ prepare",
                line,
            )
            for line in lines
        ), rank.stderr()
        assert len(lines) <= waited, lines
    assert not waiting_lines(ranks[0])


def test_a_rank_that_holds_the_gil_is_named_as_well(world):
    ranks = world.start(one_is_late, 2, 7, True, env=LINES)
    assert [rank.value()[0] for rank in ranks] == [[2.0] * 4] * 2
    lines = waiting_lines(ranks[1])
    assert any("native code holds the GIL" in line for line in lines), ranks[1].stderr()


def joins_late():
    if dist.is_initialized():
        raise AssertionError("nobody has joined yet")
    tell("started")
    hear()
    dist.init_process_group("resilient")
    dist.barrier()


def test_a_long_join_has_a_line(world):
    ranks = world.start(joins_late, 3, env=LINES)
    for rank in ranks:
        assert rank.told() == "started"
    for rank in ranks[1:]:
        rank.say("go")
    deadline = time.monotonic() + 30
    while not waiting_lines(ranks[1]):
        assert time.monotonic() < deadline and ranks[1].alive()
        with pytest.raises(AssertionError, match="said nothing"):
            ranks[1].told(0.1)
    ranks[0].say("go")
    for rank in ranks:
        rank.value()
    assert re.search(
        r"has waited \d+ s to join: [12] of 3 ranks are ready; waiting for rank 0",
        waiting_lines(ranks[1])[0],
    )


def fails_within(call):
    """(class, code, text, seconds) of what `call` raises."""
    started = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return type(error).__name__, error.code, str(error), time.monotonic() - started
    raise AssertionError("nothing was raised")


def opposite_order():
    dist.init_process_group("resilient")
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.barrier(group)
    if dist.get_rank() == 1:
        groups.reverse()

    def reduce_both():
        for group in groups:
            dist.all_reduce(torch.ones(4), group=group)

    return fails_within(reduce_both)


def both_receive():
    dist.init_process_group("resilient")
    dist.barrier()
    return fails_within(lambda: dist.recv(torch.empty(4), 1 - dist.get_rank()))


def both_send():
    """More than a rank keeps of another: each send waits for its recv."""
    dist.init_process_group("resilient")
    dist.barrier()
    return fails_within(lambda: dist.send(torch.empty(65 << 18), 1 - dist.get_rank()))


@transports
@pytest.mark.parametrize(
    "program", [opposite_order, both_receive, both_send], ids=["groups", "recv", "send"]
)
def test_a_circle_is_a_deadlock_on_all(world, program, shm_limit):
    for name, code, text, took in world.run(program, 2, env={"RESILIENT_SHM_LIMIT": shm_limit}):
        assert (name, code) == ("DeadlockError", "DEADLOCK"), text
        assert "[resilient:DEADLOCK]" in text
        assert "wait for each other in a circle" in text
        assert "waits for rank 0" in text and "waits for rank 1" in text
        assert "test_waiting.py:" in text
        assert took < 3 + SLACK_SECONDS


def slow_circle():
    """What looks like a circle for a while: another thread of rank 0 sends in the end."""
    import threading

    dist.init_process_group("resilient")
    dist.barrier()
    tensor = torch.empty(4)
    if dist.get_rank() == 1:
        dist.recv(tensor, 0)
        dist.send(tensor + 1, 0)
        return None

    def sends_late(group):
        dist.barrier(group)
        prepare(4, False)
        dist.send(torch.ones(4), 1)

    alone = dist.new_group([0], use_local_synchronization=True)
    sender = threading.Thread(target=sends_late, args=(alone,))
    sender.start()
    dist.recv(tensor, 1)
    sender.join()
    return tensor.tolist()


def test_a_thread_that_is_free_may_still_do_it(world):
    assert world.run(slow_circle, 2)[0] == [2.0] * 4


LATE_SECONDS = 3.5  # A circle that is real is found by then.


def question_sent_by(how, seconds, pair, late):
    """Rank pair[0] waits for an answer to a question that something else of it is yet to send."""
    import concurrent.futures
    import signal
    import threading

    rank = dist.get_rank()
    asking, answering = pair
    tensor = torch.zeros(4)
    if rank == answering:
        dist.recv(tensor, asking)
        dist.send(tensor + 1, asking)
        return None

    def ask(*_):
        dist.send(torch.ones(4), answering)

    def prepare_and_ask():
        prepare(seconds, False)
        ask()

    if how == "thread":
        threading.Thread(target=prepare_and_ask).start()
    elif how == "pool":
        pool = concurrent.futures.ThreadPoolExecutor(1)
        pool.submit(prepare_and_ask)
    elif how == "timer":
        threading.Timer(seconds, ask).start()
    elif how == "reader":
        source, sink = os.pipe()
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo"], stdout=sink)
        threading.Thread(target=lambda: (os.read(source, 1), ask())).start()
    elif how == "signal":
        signal.signal(signal.SIGALRM, ask)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    else:
        work = dist.all_reduce(torch.ones(4), group=late, async_op=True)
        work.get_future().then(ask)
    dist.recv(tensor, answering)
    return tensor.tolist()


def first_call_comes_late(hows, seconds):
    """Pairs of ranks, one for each of `hows`; the last rank is late in a pair with rank 0."""
    dist.init_process_group("resilient")
    last = dist.get_world_size() - 1
    late = dist.new_group([0, last])
    dist.barrier()
    rank = dist.get_rank()
    if rank == last:
        time.sleep(seconds)
        return dist.all_reduce(torch.ones(4), group=late) if "callback" in hows else None
    asking = rank - rank % 2
    return question_sent_by(hows[asking // 2], seconds, (asking, asking + 1), late)


def check_first_calls_that_come_late(world, hows, seconds):
    ranks = world.start(first_call_comes_late, 2 * len(hows) + 1, hows, seconds, env=LINES)
    values = [rank.value(seconds + 40) for rank in ranks]
    assert values[0 : 2 * len(hows) : 2] == [[2.0] * 4] * len(hows)
    for number, how in enumerate(hows):
        if how == "callback":
            continue
        said = {"signal": "a handler of SIGALRM runs"}.get(how, r"thread '.*' \(tid \d+")
        lines = waiting_lines(ranks[2 * number])
        assert any(re.search("here may still act: " + said, line) for line in lines), (how, lines)


def test_whoever_has_submitted_nothing_yet_may_still_act(world):
    hows = ["callback", "thread", "timer", "reader", "signal"]
    check_first_calls_that_come_late(world, hows, LATE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "pool", "timer", "reader", "signal", "callback"])
def test_whoever_has_submitted_nothing_yet_may_still_act_much_later(world, how):
    check_first_calls_that_come_late(world, [how], 15)


def idle_pool():
    import concurrent.futures

    pool = concurrent.futures.ThreadPoolExecutor(2)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    pool.submit(dist.barrier, alone).result()  # It has submitted something.
    return pool


def idle_loader():
    loader = torch.utils.data.DataLoader(range(64), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    return batches


def idle_libraries():
    """Threads of torch: of autograd, of a server, of the loop that pins memory."""
    import queue
    import threading

    from torch.utils.data._utils import pin_memory

    torch.accelerator.set_device_index = lambda index: None  # There is none.
    values = torch.ones(1 << 20, requires_grad=True)
    values.sum().backward()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queues = [torch.multiprocessing.Queue() for _ in range(2)]
    queues[0].put(1)  # Starts a thread that feeds the pipe.
    pinning = threading.Thread(
        target=pin_memory._pin_memory_loop,
        args=(queues[1], queue.Queue(), 0, threading.Event(), "cpu"),
        daemon=True,
    )
    pinning.start()
    assert pinning.is_alive()
    return server, queues


IDLE = {"pool": idle_pool, "loader": idle_loader, "libraries": idle_libraries}


def both_receive_beside(idle):
    dist.init_process_group("resilient")
    kept = [IDLE[name]() for name in idle]
    dist.barrier()
    name, code, text, took = fails_within(lambda: dist.recv(torch.empty(4), 1 - dist.get_rank()))
    assert kept
    dist.destroy_process_group()
    sys.stdout.flush()
    tell((name, code, text, took))
    os._exit(0)  # Some of the idle ones cannot be ended.


def check_circle_beside(world, idle):
    ranks = world.start(both_receive_beside, 2, idle)
    for rank in ranks:
        name, code, text, took = rank.told(60)
        assert (name, code) == ("DeadlockError", "DEADLOCK"), text
        assert took < 3 + SLACK_SECONDS, text
    for rank in ranks:
        rank.wait()


def test_a_circle_beside_threads_that_are_idle_is_found(world):
    check_circle_beside(world, list(IDLE))


@pytest.mark.slow
@pytest.mark.parametrize("idle", IDLE)
def test_a_circle_beside_one_idle_thing_is_found(world, idle):
    check_circle_beside(world, [idle])


def stands_still(expected):
    dist.init_process_group("resilient")
    dist.barrier()
    if dist.get_rank() == 0:
        if expected:
            with torch_resilient.expect_slow("a checkpoint", minutes=1):
                hear()
            dist.barrier()
            return None
        failed = fails_within(lambda: (hear(), dist.barrier()))
        return failed
    if expected:
        return dist.barrier()
    return fails_within(dist.barrier)


def test_a_rank_without_progress_is_stalled(world):
    ranks = world.start(stands_still, 2, False, env={"RESILIENT_STALL": "4s"})
    name, code, text, took = ranks[1].value()
    assert (name, code) == ("StalledError", "STALLED"), text
    assert "rank 0 (" in text
    # It may have stood still before rank 1 came to wait for it.
    assert int(re.search(r"has made no progress for (\d+)\.\d s", text)[1]) >= 4, text
    assert "stands_still" in text, text  # Of its stack.
    assert took < 4 + 5 + SLACK_SECONDS
    ranks[0].say("go")
    assert ranks[0].value()[:2] == ("StalledError", "STALLED")


def test_a_rank_that_said_so_is_waited_for(world):
    env = {"RESILIENT_STALL": "2s", **LINES}
    ranks = world.start(stands_still, 2, True, env=env)
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[1].told(9)
    ranks[0].say("go")
    for rank in ranks:
        rank.value()
    assert any("announced to be slow: a checkpoint" in line for line in waiting_lines(ranks[1]))
