"""Processes that wait until a seat becomes free.

Goal: a lost rank's seat is taken by a process that is there already, which is that rank from then
on; what replaces the lost process waits in its turn, and whoever is not needed ends. Method: real
ranks and spares, some of which are killed.
"""

import os
import signal

import pytest
import test_elastic
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from test_grow import await_spares

import torch_resilient

SIZE = 3
ONE = {"RESILIENT_SPARES": "1", "RESILIENT_SEAT_WAIT": "30s"}
TWO = {"RESILIENT_SPARES": "2"}


def numbers():
    """What this process is, as everybody sees it."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    seen = dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]
    assert total.item() == sum(range(SIZE))
    assert torch_resilient.membership()["rank"] == dist.get_rank()
    assert "RESILIENT_SPARES" not in os.environ
    return seen


def as_rank(rank):
    return rank, SIZE, str(rank), str(SIZE)


def lose(victim):
    process = int(os.environ["RANK"])
    dist.init_process_group("resilient")
    if process < SIZE:
        assert outlive(victim).rank == victim
        torch_resilient.rebuild()
    seen = numbers()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_spare_takes_the_seat(world, victim):
    ranks = world.start(lose, SIZE + 1, victim, env=ONE)
    for rank in ranks[:SIZE]:
        assert rank.told() == "ready"
    ranks[victim].signal()
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.value() == as_rank(victim if number == SIZE else number)


def lose_two():
    """Whoever is told to end does; the others go on with who takes its seat."""
    process = int(os.environ["RANK"])
    dist.init_process_group("resilient")
    tell(numbers())
    while (word := hear()) != "end":
        if word == "die":
            signal.pause()
        with pytest.raises(torch_resilient.RankLostError):
            dist.barrier()
        torch_resilient.rebuild()
        tell(numbers())
    dist.destroy_process_group()
    return process


def test_the_replacement_of_a_seat_that_is_taken_waits_for_the_next(world):
    ranks = world.start(lose_two, SIZE + 1, env=ONE)
    for number in range(SIZE):
        assert ranks[number].told() == as_rank(number)
    first, second = 1, 0
    spare = ranks.pop()
    for victim, heir in ((first, spare), (second, None)):
        if heir is None:
            heir = world.start_rank(lose_two, first, SIZE + 1, env=ONE)
        for number in range(SIZE):
            ranks[number].say("die" if number == victim else "lose")
        ranks[victim].signal()
        ranks[victim].wait(10)
        ranks[victim] = heir
        assert heir.told() == as_rank(victim)
        for number in range(SIZE):
            if number != victim:
                assert ranks[number].told() == as_rank(number)
    for rank in ranks:
        rank.say("end")
    assert [rank.value() for rank in ranks] == [first, SIZE, 2]


def use_or_not(victim):
    process = int(os.environ["RANK"])
    dist.init_process_group("resilient")
    if process < SIZE:
        dist.barrier()
        hear()
    dist.destroy_process_group()
    return process


def test_a_spare_that_is_not_needed_ends_well(quick_world):
    """Six leases after the last rank, of two seconds each."""
    ranks = quick_world.start(use_or_not, SIZE + 1, None, env=ONE)
    await_spares(quick_world, 1)  # One that came when all have left would wait for others.
    for rank in ranks[:SIZE]:
        rank.say("end")
    assert [rank.value() for rank in ranks[:SIZE]] == [0, 1, 2]
    error = ranks[SIZE].error()
    assert isinstance(error, SystemExit) and error.code == 0 == ranks[SIZE].wait(10)
    assert "the world has ended without need of this spare" in ranks[SIZE].stderr()


def train():
    """As the ranks of test_elastic do; a spare begins with the seat of the rank that died."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    state = test_elastic.make_state(rank)
    replaced = torch_resilient.membership()["generation"] > 1
    death = test_elastic.Death("backward" if rank == 1 else "never", 5, replaced)
    torch_resilient.elastic(test_elastic.train)(state, death)
    values = [value.numpy().tobytes() for value in state.model.state_dict().values()]
    result = values, state.step, state.mean.tolist(), state.history, state.seen
    dist.destroy_process_group()
    return result


def test_training_ends_as_if_nothing_had_happened(world):
    undisturbed = test_elastic.run_all(world)
    world.job += "-spare"
    ranks = world.start(train, SIZE + 1, env=ONE)
    assert ranks[1].wait(30) == -signal.SIGKILL, ranks[1].stderr()
    assert [ranks[number].value(60) for number in (0, SIZE, 2)] == undisturbed


def start_wrongly():
    with pytest.raises(torch_resilient.ConfigError, match="WORLD_SIZE counts the spares too"):
        dist.init_process_group("resilient")


def test_only_spares_are_no_world(world):
    world.run(start_wrongly, 2, env=TWO)
