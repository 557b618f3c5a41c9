"""What bounds an operation: the policy, the deadline of a standstill, the timeout of one call."""

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell

import torch_resilient

SECONDS = 1.0
GRACE_SECONDS = 1.0  # A second process, its fence, and a busy machine.

transports = pytest.mark.parametrize("shm_limit", ["256MiB", "0"], ids=["shm", "tcp"])


def late_rank(world_seconds, group_seconds):
    """Rank 1 enters when the test says so."""
    default = dist.distributed_c10d.default_pg_timeout
    timeout = timedelta(seconds=world_seconds) if world_seconds else default
    dist.init_process_group("resilient", timeout=timeout)
    group = dist.new_group(timeout=timedelta(seconds=group_seconds)) if group_seconds else None
    dist.barrier(group)
    if dist.get_rank() == 1:
        tell("late")
        hear()
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
    ranks[1].say("go")
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
