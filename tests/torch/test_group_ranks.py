"""Groups that ranks have made of different ranks: by other lists, or in another order of calls.

Goal: such a group is MISMATCH on every rank, with both lists and both lines of the program, whether
or not these ranks ever have a link to each other there; it is never a number, and never a wait
without end. Programs in which ranks make different groups rightly are left alone. Method: real
ranks, each with a plan of its own.
"""

import re
import time

import pytest
import torch
import torch.distributed as dist
from rank_server import hear

import torch_resilient

PAIR, OTHER, THREE = [0, 1], [1, 2], [0, 1, 2]
LINE = r"at test_group_ranks\.py:\d+ \S+"
SAID = re.compile(
    rf"\[resilient:MISMATCH\] rank \d.* has made group '[12]' of ranks \[[\d,-]+\] {LINE} "
    rf"where rank \d \(.*\) has made it of ranks \[[\d,-]+\] {LINE}, in generation 1; "
)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# What each of three ranks makes, in this order; torch calls a group by the number of the call.
PLANS = {
    "order": [[PAIR, THREE], [THREE, PAIR], [THREE, PAIR]],
    # The group that is waited for has not been used by the rank that is waited for.
    "other pairs": [[PAIR, [0, 2]], [[0, 2], PAIR], [PAIR, [0, 2]]],
    "chain": [[PAIR, OTHER], [OTHER, PAIR], [OTHER, PAIR]],
    "sizes": [[PAIR], [THREE], [THREE]],
    # Ranks 1 and 2 end what they do in it, and no rank connects to rank 0.
    "never met": [[PAIR], [OTHER], [OTHER]],
}


def total(group):
    """A digit for each rank that took part, by its number in the world."""
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def expected(ranks):
    return float(sum(10**rank for rank in ranks))


def follow(plans, in_order, closes=False):
    """Uses its groups, then the world; the text of the mismatch, and what a group that is made
    after it gives."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    made = [(ranks, dist.new_group(ranks)) for ranks in plans[rank]]
    if not in_order:
        made.sort(key=lambda one: one[0])
    try:
        # A rank that still makes groups would learn of the mismatch there, and number the later
        # ones in another way. The ranks that leave the barrier first may end it for the others.
        dist.barrier()
        for ranks, group in made:
            if rank not in ranks:
                continue
            assert total(group) == expected(ranks)
            if closes:
                dist.destroy_process_group(group)
        dist.barrier()
    except torch_resilient.MismatchError as error:
        torch_resilient.rebuild()
        return str(error), total(dist.new_group(PAIR)) if rank in PAIR else None
    raise AssertionError("no mismatch")


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("name", list(PLANS))
def test_other_ranks_are_a_mismatch_on_all_with_both_lists_and_lines(world, name, in_order):
    began = time.monotonic()
    outcomes = world.run(follow, 3, PLANS[name], in_order, seconds=50)
    assert time.monotonic() - began < 45
    assert [sums for _, sums in outcomes] == [11.0, 11.0, None]
    for text, _ in outcomes:
        assert SAID.match(text), text


def test_a_group_that_was_closed_is_compared_too(world):
    outcomes = world.run(follow, 3, PLANS["never met"], True, True, seconds=50)
    for text, _ in outcomes:
        assert "[0,1]" in text and "[1,2]" in text, text


def other_order_of_ranks():
    dist.init_process_group("resilient")
    ranks = [1, 0, 2] if dist.get_rank() == 2 else [0, 1, 2]
    with pytest.raises(torch_resilient.MismatchError) as caught:
        # The others may meet while this rank still makes it.
        group = dist.group.WORLD.split_group(ranks, group_name="three")
        group.allreduce([torch.ones(4)]).wait()
        dist.barrier()
    return str(caught.value)


@pytest.mark.skipif(VERSION < (2, 15), reason="older versions sort the ranks of a split")
def test_the_same_ranks_in_another_order_are_a_mismatch(world):
    for text in world.run(other_order_of_ranks, 3):
        assert "group 'three' of ranks [1,0,2]" in text or "it of ranks [1,0,2]" in text, text


def wrong_lengths(count):
    """Rank 0 sums ones over [0, 1], the others hundreds over [0, 1, 2] in a group of that name."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    first, second = (PAIR, THREE) if rank == 0 else (THREE, PAIR)
    tensor = torch.full((count,), 100.0 if rank else 1.0)
    with pytest.raises(torch_resilient.MismatchError):
        group = dist.new_group(first)
        dist.new_group(second)
        dist.all_reduce(tensor, group=group)
        dist.barrier()


@pytest.mark.parametrize("count", [1, 4_000_000])
def test_no_sum_over_other_ranks_is_ever_returned(world, count):
    world.run(wrong_lengths, 3, count)


# ---- What is right ----


def local_groups():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    mine = [0, 3] if rank in (0, 3) else [1, 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    sums = total(group)
    dist.barrier()
    return sums == expected(mine), total(dist.new_group(THREE)) if rank in THREE else None


def test_local_groups_are_no_mismatch(world):
    outcomes = world.run(local_groups, 4)
    assert outcomes == [(True, 111.0)] * 3 + [(True, None)]


def side_by_side():
    """Both groups have the name '1', and no rank in common."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    mine = [0, 3] if rank in (0, 3) else [1, 2]
    group = dist.new_group(mine)
    if rank == 0:
        assert hear() == "go"
    sums = total(group)
    dist.barrier()
    return sums == expected(mine)


def test_groups_of_one_name_without_a_common_rank_go_on(world):
    ranks = world.start(side_by_side, 4, env={"RESILIENT_WAIT_LOG": "1s"})
    # By the third second the rank that is waited for has been asked about its group.
    deadline = time.monotonic() + 30
    while ranks[3].stderr().count(" has waited ") < 3:
        assert time.monotonic() < deadline, ranks[3].stderr()
        time.sleep(0.05)
    ranks[0].say("go")
    assert [rank.value() for rank in ranks] == [True] * 4


def made_by_members_alone():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    pair = total(dist.new_group(PAIR)) if rank in PAIR else None
    return pair, total(dist.group.WORLD)


def test_a_group_that_its_members_alone_make_works(world):
    assert world.run(made_by_members_alone, 3) == [(11.0, 111.0), (11.0, 111.0), (None, 111.0)]


def other_lines():
    dist.init_process_group("resilient")
    if dist.get_rank() == 0:
        group = dist.new_group(PAIR)
    else:
        group = dist.new_group(PAIR)
    split = dist.group.WORLD.split_group([0, 1])
    seen = torch.ones(1)
    split.allreduce([seen]).wait()
    return total(group), seen.item()


def test_other_lines_of_the_program_are_no_mismatch(world):
    assert world.run(other_lines, 2) == [(11.0, 2.0)] * 2
