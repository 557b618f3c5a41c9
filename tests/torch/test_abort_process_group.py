"""_abort_process_group of torch, as programs that restart in place use it.

Goal: one rank that aborts ends what the others wait in, with its reason; whoever has aborted is
without a group, and can begin anew, any number of times; a part of the world is aborted likewise.
Method: real ranks, of which others wait in an operation.
"""

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from torch.distributed import distributed_c10d as c10d

import torch_resilient

SIZE = 3
ROUNDS = 3


def sum_of_ranks(group=None):
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


def meets_the_end(group=None):
    with pytest.raises(torch_resilient.CommError, match="abort") as caught:
        while True:
            dist.barrier(group=group)
    return caught.value.code


def begins_anew():
    sums = []
    for number in range(ROUNDS):
        dist.init_process_group("resilient")
        rank = dist.get_rank()
        dist.new_group([0, 1])
        sums.append(sum_of_ranks())
        tell("ready")  # Whoever aborts must not end what others are still in.
        hear()
        if rank != number:
            assert meets_the_end() == "COMM_FAILED"
        c10d._abort_process_group()
        assert not dist.is_initialized() and torch_resilient.failure() is None
    return sums


def in_turns(ranks, rounds):
    for _ in range(rounds):
        for rank in ranks:
            assert rank.told() == "ready"
        for rank in ranks:
            rank.say("go")


def test_one_aborts_and_all_begin_anew(world):
    ranks = world.start(begins_anew, SIZE)
    in_turns(ranks, ROUNDS)
    assert [rank.value() for rank in ranks] == [[3.0] * ROUNDS] * SIZE


def aborts_a_part():
    dist.init_process_group("resilient")
    part = dist.new_group([0, 2])
    tell("ready")
    hear()
    if dist.get_rank() == 0:
        c10d._abort_process_group(part)
        with pytest.raises(ValueError):
            dist.barrier(group=part)
    elif dist.get_rank() == 2:
        meets_the_end(part)
        dist.destroy_process_group(part)
    meets_the_end()
    torch_resilient.rebuild()
    part = dist.new_group([0, 2])
    total = sum_of_ranks()
    dist.destroy_process_group()
    return total


def test_a_part_of_the_world_is_aborted_and_made_anew(world):
    ranks = world.start(aborts_a_part, SIZE)
    in_turns(ranks, 1)
    assert [rank.value() for rank in ranks] == [3.0] * SIZE
