"""What bounds an operation: the policy, the deadline of a standstill, the timeout of one call."""

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell

import torch_resilient
from torch_resilient import _worlds

SECONDS = 1.0
GRACE_SECONDS = 1.0  # A second process, its fence, and a busy machine.

transports = pytest.mark.parametrize("shm_limit", ["256MiB", "0"], ids=["shm", "tcp"])


def add_time(group, *parts):
    for seconds in parts:
        group._get_backend(torch.device("cpu"))._add_ephemeral_timeout(timedelta(seconds=seconds))


def meet(group):
    """The ranks come to the first operation as they may: its timeout is not what is looked at."""
    add_time(group, 60)
    dist.barrier(group)


def await_fence():
    """Before it is here, what another rank had sent before it gave up may be enough for an
    operation."""
    assert _worlds.registry.current().session.await_failure(20) is not None


def late_rank(world_seconds, group_seconds):
    """Rank 1 enters when the test says so, perhaps behind the fence only."""
    default = dist.distributed_c10d.default_pg_timeout
    timeout = timedelta(seconds=world_seconds) if world_seconds else default
    dist.init_process_group("resilient", timeout=timeout)
    group = dist.new_group(timeout=timedelta(seconds=group_seconds)) if group_seconds else None
    meet(group or dist.group.WORLD)
    if dist.get_rank() == 1:
        tell("late")
        if hear() == "fenced":
            await_fence()
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except dist.DistBackendError as error:
        return error.code, str(error), error.rank, time.monotonic() - started
    return "OK", "", None, time.monotonic() - started


@transports
@pytest.mark.parametrize("of", ["group", "world"])
def test_strict_fails_what_takes_longer_than_the_timeout(world, of, shm_limit):
    env = {"RESILIENT_TIMEOUT_POLICY": "strict", "RESILIENT_SHM_LIMIT": shm_limit}
    seconds = SECONDS if of == "group" else 4  # That of the world bounds its init as well.
    ranks = world.start(late_rank, 2, *((0, seconds) if of == "group" else (seconds, 0)), env=env)
    assert ranks[1].told() == "late"
    code, text, who, took = ranks[0].value()
    assert code == "COMM_FAILED", text
    assert who == 1
    assert "rank 1 (" in text and "has not entered it" in text
    assert f"timeout of {seconds:g} s" in text
    assert seconds <= took < seconds + GRACE_SECONDS
    ranks[1].say("fenced")
    assert ranks[1].value()[0] == "COMM_FAILED"


@transports
def test_liveness_waits_for_a_late_rank_whatever_the_timeout(world, shm_limit):
    env = {"RESILIENT_OP_DEADLINE": "1", "RESILIENT_SHM_LIMIT": shm_limit}
    ranks = world.start(late_rank, 2, 0, SECONDS / 2, env=env)
    assert ranks[1].told() == "late"
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(2 * SECONDS)
    ranks[1].say("go")
    code, text, _, took = ranks[0].value()
    assert code == "OK", text
    assert took > SECONDS
    assert ranks[1].value()[0] == "OK"


def stands_still():
    dist.init_process_group("resilient")
    tensor = torch.zeros(8 << 20)
    dist.all_reduce(tensor)
    try:
        # They follow each other in the library's own thread, which is mostly inside of one.
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2000)]
        tell("running")
        for work in works:
            work.wait()
    except torch_resilient.CommError as error:
        tell((error.code, str(error)))
        hear()
        torch_resilient.rebuild()
        ones = torch.ones(4)
        dist.all_reduce(ones)
        return ones.tolist()
    raise AssertionError("nothing was raised")


def stop_inside(ranks, attempts=10):
    """What rank 0 says when rank 1 is stopped in the midst of an operation.

    Between two of them rank 1 would only be late: then it goes on for a while, well before its
    lease ends.
    """
    for _ in range(attempts):
        for command, seconds in ((signal.SIGSTOP, 2.5 * SECONDS), (signal.SIGCONT, SECONDS / 2)):
            ranks[1].signal(command)
            try:
                said = ranks[0].told(seconds)
            except AssertionError as error:
                if "said nothing" not in str(error):
                    raise
            else:
                ranks[1].signal(signal.SIGCONT)
                return said
    raise AssertionError(f"rank 0 said nothing in {attempts} attempts")


@transports
def test_what_stands_still_ends_at_the_deadline(world, shm_limit):
    env = {"RESILIENT_OP_DEADLINE": "1", "RESILIENT_SHM_LIMIT": shm_limit}
    ranks = world.start(stands_still, 2, env=env)
    for rank in ranks:
        assert rank.told() == "running"
    code, text = stop_inside(ranks)
    assert code == "COMM_STALLED", text
    assert "rank 1 (" in text and "nothing has moved" in text and "for 1 s" in text
    assert ranks[1].told()[0] == "COMM_STALLED"
    for rank in ranks:
        rank.say("rebuild")
    for rank in ranks:
        assert rank.value() == [2.0] * 4


def late_with_more_time(seconds, added, started_before):
    """Rank 0 adds to the timeout; rank 1 enters each operation when the test says so."""
    dist.init_process_group("resilient")
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    meet(group)
    ones = torch.ones(4)
    work, outcomes = None, []
    if dist.get_rank() == 0:
        if started_before:
            work = dist.all_reduce(ones, group=group, async_op=True)
        add_time(group, *added)
    try:
        while True:
            if dist.get_rank() == 1:
                tell("late")
                said = hear()
                if said == "leave":
                    return outcomes
                if said == "fenced":
                    await_fence()
            started = time.monotonic()
            work = work or dist.all_reduce(ones, group=group, async_op=True)
            work.wait()
            work = None
            outcomes.append("OK")
            if dist.get_rank() == 0:
                tell("done")
    except dist.DistBackendError as error:
        return [*outcomes, (error.code, str(error), time.monotonic() - started)]


def passes(ranks, seconds):
    """Rank 1 enters so much later than rank 0, which waits for it."""
    assert ranks[1].told() == "late"
    if seconds:
        with pytest.raises(AssertionError, match="said nothing"):
            ranks[0].told(seconds)
    ranks[1].say("go")
    assert ranks[0].told() == "done"
    assert ranks[1].told() == "late"


def fails_in_time(outcome):
    code, text, took = outcome
    assert code == "COMM_FAILED", text
    assert f"timeout of {SECONDS:g} s" in text
    assert took < SECONDS + GRACE_SECONDS


@transports
@pytest.mark.parametrize("added", [(60,), (1, -5, 30)], ids=["once", "twice"])
def test_what_is_added_to_a_timeout_is_for_one_operation(world, added, shm_limit):
    env = {"RESILIENT_TIMEOUT_POLICY": "strict", "RESILIENT_SHM_LIMIT": shm_limit}
    ranks = world.start(late_with_more_time, 2, SECONDS, added, False, env=env)
    passes(ranks, 2.5 * SECONDS)
    done, outcome = ranks[0].value()
    assert done == "OK"
    fails_in_time(outcome)
    ranks[1].say("fenced")
    assert ranks[1].value()[-1][0] == "COMM_FAILED"


def test_what_runs_already_gets_nothing_of_it(world):
    env = {"RESILIENT_TIMEOUT_POLICY": "strict"}
    ranks = world.start(late_with_more_time, 2, SECONDS, (60,), True, env=env)
    assert ranks[1].told() == "late"
    (outcome,) = ranks[0].value()
    fails_in_time(outcome)
    ranks[1].say("fenced")
    assert ranks[1].value()[-1][0] == "COMM_FAILED"


def test_the_end_of_what_ran_already_uses_none_of_it_up(world):
    env = {"RESILIENT_TIMEOUT_POLICY": "strict"}
    ranks = world.start(late_with_more_time, 2, 3 * SECONDS, (60,), True, env=env)
    passes(ranks, 0)
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(4 * SECONDS)
    ranks[1].say("go")
    assert ranks[0].told() == "done"
    assert ranks[1].told() == "late"
    ranks[1].say("leave")
    assert ranks[1].value() == ["OK"] * 2
    assert ranks[0].value()[-1][0] == "LEFT"


def stands_still_with_more_time():
    dist.init_process_group("resilient")
    group = dist.new_group(timeout=timedelta(seconds=SECONDS / 2))
    tensor = torch.zeros(8 << 20)
    meet(group)
    tell("running")
    try:
        while True:
            add_time(group, SECONDS / 2, SECONDS / 2)
            dist.all_reduce(tensor, group=group)
    except torch_resilient.CommError as error:
        tell((error.code, str(error)))


@transports
def test_what_is_added_counts_for_a_standstill(world, shm_limit):
    ranks = world.start(stands_still_with_more_time, 2, env={"RESILIENT_SHM_LIMIT": shm_limit})
    for rank in ranks:
        assert rank.told() == "running"
    code, text = stop_inside(ranks)
    assert code == "COMM_STALLED", text
    assert "for 1.5 s" in text
    assert ranks[1].told()[0] == "COMM_STALLED"
    for rank in ranks:
        rank.value()


def adds_to_all_groups(strict_seconds):
    """By torch's own function, to one operation of each group."""
    dist.init_process_group("resilient")
    groups = [dist.new_group(timeout=timedelta(seconds=strict_seconds)) for _ in range(2)]
    for group in groups:
        meet(group)
    if dist.get_rank() == 1:
        tell("late")
        hear()
    elif hasattr(dist.ProcessGroup, "_add_ephemeral_timeout"):  # From torch 2.14 on.
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=60))
    else:
        for group in groups:
            add_time(group, 60)
    tensors = [torch.ones(1), torch.ones(1), torch.ones(1)]
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in range(2)]
    works.append(dist.all_reduce(tensors[2], group=groups[0], async_op=True))  # None has ended.
    for work in works:
        work.wait()
    return torch.cat(tensors).tolist()


def test_all_that_starts_until_the_first_has_ended_has_it_on_every_group(world):
    env = {"RESILIENT_TIMEOUT_POLICY": "strict"}
    ranks = world.start(adds_to_all_groups, 2, SECONDS, env=env)
    assert ranks[1].told() == "late"
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(2.5 * SECONDS)
    ranks[1].say("go")
    assert [rank.value() for rank in ranks] == [[2.0] * 3] * 2


def waits_with_a_timeout():
    dist.init_process_group("resilient")
    tensor = torch.ones(4)
    if dist.get_rank() == 1:
        tell("late")
        hear()
    work = dist.all_reduce(tensor, async_op=True)
    if dist.get_rank() == 0:
        with pytest.raises(torch_resilient.StoreTimeoutError, match="300 ms"):
            work.wait(timedelta(milliseconds=300))
        tell("timed out")
    work.wait()
    return tensor.tolist()


@transports
@pytest.mark.parametrize("policy", ["liveness", "strict"])
def test_a_timeout_of_one_call_is_strict_on_that_rank_only(world, policy, shm_limit):
    env = {"RESILIENT_TIMEOUT_POLICY": policy, "RESILIENT_SHM_LIMIT": shm_limit}
    ranks = world.start(waits_with_a_timeout, 2, env=env)
    assert ranks[1].told() == "late"
    assert ranks[0].told() == "timed out"
    ranks[1].say("go")
    assert [rank.value() for rank in ranks] == [[2.0] * 4] * 2


BEYOND_NANOSECONDS = timedelta(days=200_000)  # 547 years.


def waits_for_centuries():
    dist.init_process_group("resilient", timeout=BEYOND_NANOSECONDS)
    group = dist.new_group(timeout=BEYOND_NANOSECONDS)
    late = dist.get_rank() == 1
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(2)
    calls = {
        "wait": lambda: dist.all_reduce(tensor, async_op=True).wait(BEYOND_NANOSECONDS),
        "group": lambda: dist.all_reduce(tensor, group=group),
        "monitored": lambda: dist.monitored_barrier(timeout=BEYOND_NANOSECONDS),
        "monitored of the group": lambda: dist.monitored_barrier(group),
        "store": lambda: store.set("k", "v") if late else store.wait(["k"], BEYOND_NANOSECONDS),
    }
    for name, call in calls.items():
        tell(name)
        if late:
            hear()
        call()
    dist.barrier()
    return tensor.tolist()


@pytest.mark.parametrize("policy", ["liveness", "strict"])
def test_a_timeout_beyond_what_nanoseconds_hold_is_a_long_one(world, policy):
    ranks = world.start(waits_for_centuries, 2, env={"RESILIENT_TIMEOUT_POLICY": policy})
    for name in ["wait", "group", "monitored", "monitored of the group", "store"]:
        assert [rank.told() for rank in ranks] == [name] * 2
        ranks[1].say("go")
    assert [rank.value() for rank in ranks] == [[4.0] * 2] * 2


def joins():
    dist.init_process_group("resilient")
    ones = torch.ones(4)
    dist.all_reduce(ones)
    return ones.tolist()


def test_the_interface_of_the_links_can_be_chosen(world):
    env = {"RESILIENT_SOCKET_IFNAME": "none0,lo", "RESILIENT_SHM_LIMIT": "0"}
    assert world.run(joins, 2, env=env) == [[2.0] * 4] * 2


def test_an_interface_that_does_not_exist_is_told(world):
    rank = world.start_rank(joins, 0, 1, env={"RESILIENT_SOCKET_IFNAME": "none0"})
    error = rank.error()
    rank.wait()
    assert isinstance(error, torch_resilient.ConfigError)
    assert error.code == "SETTING"
    assert "none0" in str(error) and "lo (127.0.0.1)" in str(error)
