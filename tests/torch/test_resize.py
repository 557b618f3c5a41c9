"""The process group of a world that has been resized.

Goal: with each version of torch the world's default group has the present rank and size, whether it
is the object of before, where torch lets these change, or another one, where they are constants;
then the one of before raises and its end disturbs nobody. Method: real ranks, one of which is
killed; `anew` has the other object made where torch would do without.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import torch_resilient
from torch_resilient import _native

FORMER = "made before the world was resized"


def shrunk(anew, backend="resilient"):
    """A world of three that has lost rank 1. Returns the group of before, if it is another."""
    dist.init_process_group(backend)
    if anew:
        _native.load().can_follow = False
    before = dist.group.WORLD
    outlive(1)
    torch_resilient.rebuild(mode="shrink")
    assert (dist.group.WORLD is before) == _native.load().can_follow
    return None if dist.group.WORLD is before else before


def total(group=None):
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()


def two_are_left(world, function, *args, **kwargs):
    ranks = world.start(function, 3, *args, **kwargs)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    return [ranks[0].value(30), ranks[2].value(30)]


def operations(group):
    """Each operation, with arguments that are right for a group of three or of two."""
    one, list_of_three = torch.ones(1), [torch.ones(1) for _ in range(3)]
    long = torch.ones(6)
    yield lambda: dist.all_reduce(one, group=group)
    yield lambda: dist.all_reduce(one, group=group, async_op=True)
    yield lambda: dist.broadcast(one, src=0, group=group)
    yield lambda: dist.broadcast(one, group_src=0, group=group)
    yield lambda: dist.reduce(one, dst=0, group=group)
    yield lambda: dist.all_gather(list_of_three, one, group=group)
    yield lambda: dist.all_gather(list_of_three[:2], one, group=group)
    yield lambda: dist.all_gather_into_tensor(long, torch.ones(2), group=group)
    yield lambda: dist.reduce_scatter(one, list_of_three, group=group)
    yield lambda: dist.reduce_scatter_tensor(torch.ones(2), long, group=group)
    yield lambda: dist.all_to_all(list_of_three, list_of_three, group=group)
    yield lambda: dist.all_to_all_single(torch.ones(6), long, group=group)
    yield lambda: dist.scatter(one, None, src=0, group=group)
    yield lambda: dist.gather(one, None, group_dst=0, group=group)
    yield lambda: dist.send(one, dst=0, group=group)
    yield lambda: dist.recv(one, group_src=0, group=group)
    yield lambda: dist.recv(one, group=group)
    yield lambda: dist.barrier(group=group)
    yield lambda: dist.all_gather_object([None] * 3, 1, group=group)
    yield lambda: dist.broadcast_object_list([None], src=0, group=group)
    yield lambda: group.monitored_barrier()
    yield lambda: group.allreduce([one])
    yield lambda: group._get_backend(torch.device("cpu")).abort()
    yield lambda: dist.get_rank(group)
    yield lambda: dist.get_backend(group)
    yield lambda: dist.get_process_group_ranks(group)
    yield lambda: dist.get_global_rank(group, 0)
    yield lambda: dist.destroy_process_group(group)


def use_the_former_group():
    before = shrunk(anew=True)
    for operation in operations(before):
        with pytest.raises(torch_resilient.ResilientError, match=FORMER) as caught:
            operation()
        assert "torch.distributed.group.WORLD" in str(caught.value)
    assert total() == 3.0
    backend = before._get_backend(torch.device("cpu"))
    backend.shutdown()
    del before, backend
    gc.collect()
    assert total() == 3.0  # Nobody has said goodbye.
    dist.destroy_process_group()
    return True


def test_the_group_of_before_raises_and_its_end_disturbs_nobody(world):
    assert two_are_left(world, use_the_former_group) == [True, True]


def use_the_present_group(anew, backend):
    shrunk(anew, backend)
    group = dist.group.WORLD
    name = group.group_name
    asked = [entry["asked"] for entry in torch_resilient.status()["groups"]]
    assert (asked, dist.get_backend(), group.group_desc) == ([backend], "resilient", "default_pg")
    sums = [
        total(),
        total(group),
        funcol.all_reduce(torch.tensor([dist.get_rank() + 1.0]), "sum", group).item(),
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(
                torch.tensor([dist.get_rank() + 1.0]), "sum", name
            )
        ).item(),
        total(dist.new_group([0, 1])),
    ]
    mesh = init_device_mesh("cpu", (2,))
    assert mesh.get_local_rank() == dist.get_rank() == group.rank()
    sums.append(total(mesh.get_group()))
    assert len(torch_resilient.op_log()) > 3
    assert torch_resilient.agree(True)
    numbers = dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(None)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    # And once more from the start, as many as are left.
    dist.init_process_group("resilient", rank=numbers[0], world_size=numbers[1])
    sums.append(total())
    dist.destroy_process_group()
    return numbers, sums


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("backend", ["resilient", "gloo"])
def test_the_default_group_serves_and_can_be_destroyed_and_made_again(world, anew, backend):
    env = {"RESILIENT_TAKE_OVER": "gloo"}
    ended = two_are_left(world, use_the_present_group, anew, backend, env=env)
    assert ended == [((rank, 2, [0, 1]), [3.0] * 7) for rank in range(2)]


def lose_again_and_again():
    """Of six ranks the last is lost each time, all groups are kept."""
    dist.init_process_group("resilient")
    _native.load().can_follow = False
    first = dist.get_rank()
    groups = [dist.group.WORLD]
    for victim in (5, 4, 3, 2):
        outlive(victim)
        torch_resilient.rebuild(mode="shrink")
        groups.append(dist.group.WORLD)
        assert (dist.get_rank(), dist.get_world_size()) == (first, victim)
    assert len(set(groups)) == len(groups)
    for group in groups[:-1]:
        with pytest.raises(torch_resilient.ResilientError, match=FORMER):
            dist.barrier(group)
    assert total() == 3.0
    dist.destroy_process_group()
    return len(groups)


def test_several_resizes_in_a_row(world):
    ranks = world.start(lose_again_and_again, 6)
    for victim in (5, 4, 3, 2):
        for rank in ranks[: victim + 1]:
            assert rank.told() == "ready"
        ranks[victim].signal()
    assert [rank.value(30) for rank in ranks[:2]] == [5, 5]
