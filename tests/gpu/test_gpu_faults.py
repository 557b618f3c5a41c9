"""Ranks on a GPU that are killed, stopped, leave an operation out, or bring another size."""

import signal
import time

import gpu_device
import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, joined
from rank_server import hear, tell

import torch_resilient

REPLACED = {"RESILIENT_SEAT_WAIT": "60s"}
KNOWN_SECONDS = 1.0
MISMATCH_SECONDS = 10


def total(size=4):
    tensor = torch.ones(size, device=DEVICE)
    dist.all_reduce(tensor)
    return tensor.tolist()


def until_it_fails():
    while True:
        dist.all_reduce(torch.ones(1 << 16, device=DEVICE))
        dist.barrier()


def survives(victim):
    """Goes on with a replacement; returns when the loss was known and how long the rebuild took."""
    _, size = joined()
    assert total() == [float(size)] * 4
    tell("ready")
    with pytest.raises(torch_resilient.RankLostError) as caught:
        until_it_fails()
    assert caught.value.rank == victim
    known = torch_resilient.last_incident()["known"]
    began = time.monotonic()
    torch_resilient.rebuild()
    assert total() == [float(size)] * 4
    rebuilt = time.monotonic() - began
    dist.destroy_process_group()
    return known, rebuilt


def replaces():
    _, size = joined()
    assert total() == [float(size)] * 4
    dist.destroy_process_group()


def lose(world, size, number):
    """Signals the last rank in the midst of its operations; (when, its Rank, the others')."""
    victim = size - 1
    ranks = world.start(survives, size, victim, env=REPLACED)
    for rank in ranks:
        assert rank.told(60) == "ready"
    return ranks[victim].signal(number)[1], ranks[victim], ranks[:victim]


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_and_replaced(world, figures, size):
    killed, victim, others = lose(world, size, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    newcomer = world.start_rank(replaces, size - 1, size, env=REPLACED)
    outcomes = [rank.value(60) for rank in others]
    newcomer.value(60)
    known = max(known - killed for known, _ in outcomes)
    figures(f"kill, {size} ranks: known after s", round(known, 4))
    figures(f"kill, {size} ranks: rebuilt in s", round(max(took for _, took in outcomes), 3))
    assert known < KNOWN_SECONDS


def test_a_stopped_rank_is_lost_by_its_lease_and_fenced_when_it_wakes(quick_world, figures):
    stopped, victim, others = lose(quick_world, 2, signal.SIGSTOP)
    newcomer = quick_world.start_rank(replaces, 1, 2, env=REPLACED)
    known, rebuilt = others[0].value(60)
    newcomer.value(60)
    figures("stop, leases of 2 s: known after s", round(known - stopped, 3))
    figures("stop, leases of 2 s: rebuilt in s", round(rebuilt, 3))
    victim.signal(signal.SIGCONT)
    error = victim.error(30)
    assert isinstance(error, torch_resilient.FencedError), repr(error)
    victim.wait()


def late():
    _, size = joined()
    total()
    if dist.get_rank() == 1:
        tell("late")
        hear()
    assert total() == [float(size)] * 4
    dist.destroy_process_group()


def test_a_late_rank_is_waited_for(world):
    ranks = world.start(late, 2)
    assert ranks[1].told(60) == "late"
    assert ranks[0].outcome(2) is None
    ranks[1].say("go on")
    for rank in ranks:
        rank.value()


def barriers():
    """What blocks nobody is found behind the fact."""
    until = time.monotonic() + MISMATCH_SECONDS
    while time.monotonic() < until:
        dist.barrier()


def check_text(error, *words):
    """Of a mismatch that blocks; NCCL itself decides which do, the fake's all do."""
    if gpu_device.FAKE:
        assert all(word in str(error) for word in words), error


def leaves_one_out():
    rank, size = joined()
    total()
    with pytest.raises(torch_resilient.MismatchError) as caught:
        if rank == 0:
            dist.all_reduce(torch.ones(4, device=DEVICE))
        dist.broadcast(torch.ones(8, device=DEVICE), 0)
        barriers()
    check_text(caught.value, "all_reduce(float32[4], sum)", "broadcast(float32[8]")
    torch_resilient.rebuild()
    assert total() == [float(size)] * 4
    dist.destroy_process_group()


def other_size():
    rank, size = joined()
    with pytest.raises(torch_resilient.MismatchError) as caught:
        dist.all_reduce(torch.ones(4 + rank, device=DEVICE))
        barriers()
    # And the function that called.
    check_text(
        caught.value, "all_reduce(float32[4], sum)", "all_reduce(float32[5], sum)", "other_size"
    )
    torch_resilient.rebuild()
    assert total() == [float(size)] * 4
    dist.destroy_process_group()


@pytest.mark.parametrize("function", [leaves_one_out, other_size])
def test_ranks_in_different_operations_are_told_so(world, function):
    world.run(function, 2)


def leaves():
    rank, _ = joined()
    total()
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        return "LEFT"
    with pytest.raises(torch_resilient.RankLostError) as caught:
        until_it_fails()
    return caught.value.code


def test_who_needs_a_rank_that_has_left_is_told_so(world):
    assert world.run(leaves, 2) == ["LEFT", "LEFT"]
