"""RESILIENT_HEAL=auto: what was raised is acknowledged by the next operation of the program."""

import itertools
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_server import tell

import torch_resilient

AUTO = {"RESILIENT_HEAL": "auto", "RESILIENT_SEAT_WAIT": "30s"}
SIZE = 3
ROUNDS_AFTER = 5


def serve(victim):
    """A loop without state: any round may fail, and the next one is tried. Rank 0 ends it."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    errors, rounds, over = [], 0, torch.zeros(1)
    while not over.item():
        rounds += 1
        wish = torch.tensor([float(rank == 0 and rounds >= ROUNDS_AFTER and victim is None)])
        if rounds == ROUNDS_AFTER and rank == victim:
            tell("ready")
            signal.pause()
        try:
            dist.all_reduce(wish, op=dist.ReduceOp.MAX)
            over = wish
        except torch_resilient.RankLostError as error:
            errors.append(error.rank)
            victim, rounds = None, 0  # Nobody dies again, and a few more rounds are to work.
    generation = torch_resilient.membership()["generation"]
    dist.destroy_process_group()
    return errors, generation


@pytest.mark.parametrize("victim", [0, 2])
def test_a_loop_goes_on_with_the_replacement(world, victim):
    ranks = world.start(serve, SIZE, victim, env=AUTO)
    assert ranks[victim].told() == "ready"
    ranks[victim].signal()
    ranks[victim].wait(10)
    ranks[victim] = world.start_rank(serve, victim, SIZE, None, env=AUTO)
    outcomes = [rank.value(60) for rank in ranks]
    assert {generation for _, generation in outcomes} == {outcomes[0][1]}
    for rank, (errors, _) in enumerate(outcomes):
        assert errors == ([] if rank == victim else [victim])


def abort_and_go_on(form):
    dist.init_process_group("resilient")
    group = dist.new_group(list(range(SIZE)))
    dist.barrier()
    first = torch_resilient.membership()["generation"]
    tensor = torch.ones(4)
    with pytest.raises(torch_resilient.CommError) as caught:
        for number in itertools.count():  # The fence comes in some operation.
            if number == 1 and dist.get_rank() == 0:
                # All have entered the first one: they are past the barrier.
                group._get_backend(torch.device("cpu")).abort()
            if form == "async":
                dist.all_reduce(tensor, async_op=True).wait()
            else:
                dist.all_reduce(tensor)
            tensor.fill_(1)
    ones = torch.ones(4)
    dist.all_reduce(ones, group=group)  # Another group: one acknowledgement is for all.
    dist.all_reduce(ones)
    assert torch_resilient.failure() is None
    return caught.value.code, ones.tolist(), torch_resilient.membership()["generation"] - first


@pytest.mark.parametrize("form", ["sync", "async"])
def test_the_same_members_go_on(world, form):
    for outcome in world.run(abort_and_go_on, SIZE, form, env=AUTO):
        assert outcome == ("COMM_FAILED", [float(SIZE**2)] * 4, 1)


def differ():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    codes = []
    for _ in range(3):
        with pytest.raises(torch_resilient.MismatchError) as caught:
            dist.all_reduce(torch.ones(4 + rank))
        codes.append(caught.value.code)
    torch_resilient.rebuild()
    dist.barrier()
    return codes


def test_a_bug_is_not_healed(world):
    assert world.run(differ, 2, env=AUTO) == [["MISMATCH"] * 3] * 2


def time_out():
    """A strict timeout of one call is no failure of the session: nothing is to be healed."""
    dist.init_process_group("resilient")
    tensor = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.irecv(tensor, 1)
        with pytest.raises(torch_resilient.StoreTimeoutError):
            work.wait(timedelta(milliseconds=200))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.ones(1) * 7, 0)
    else:
        work.wait()
    generation = torch_resilient.membership()["generation"]
    dist.barrier()
    return tensor.item(), generation


def test_a_timeout_of_one_call_rebuilds_nothing(world):
    (value, generation), (_, others) = world.run(time_out, 2, env=AUTO)
    assert value == 7
    assert generation == others
