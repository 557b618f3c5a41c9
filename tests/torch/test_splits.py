"""Groups that are split from others: group.split_group, dist.split_group, DeviceMesh.

Goal: a split is a group like one of new_group, whichever group and torch's own functions it comes
from, also where the world is bound to a device; what cannot be is refused with the way out. Method:
real ranks; some are killed.
"""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from torch.distributed.device_mesh import init_device_mesh

import torch_resilient

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
CLAIMED = VERSION >= (2, 15)
claimed = pytest.mark.skipif(not CLAIMED, reason="torch's own functions may split from 2.15 on")


def backend(group, device=CPU):
    return group._get_backend(device)


def total(group):
    """A digit for each rank of the world that took part, by its number. By the group's own method:
    what dist.all_reduce raises torch turns into a ValueError where it does not know the group."""
    tensor = torch.tensor([10.0 ** dist.get_rank()])
    group.allreduce([tensor]).wait()
    return tensor.item()


def splits():
    minutes = timedelta(minutes=7)
    dist.init_process_group("resilient", timeout=minutes)
    world = dist.group.WORLD
    name = world.group_name
    odd = world.split_group([1, 3])
    assert (odd is None) == (dist.get_rank() not in (1, 3))
    seen = None
    if odd is not None:
        assert backend(odd) is backend(odd, CUDA) and backend(odd) is not backend(world)
        assert (odd.rank(), odd.size()) == (dist.get_rank() // 2, 2)
        assert backend(odd).options._timeout == minutes
        assert backend(odd).options.global_ranks_in_group == [1, 3]
        assert odd.group_name == f"{name}:split:[1, 3]"
        assert odd.group_desc.endswith(":split:0")
        tensor = torch.tensor([float(dist.get_rank())])
        dist.broadcast(tensor, group=odd, group_src=1)
        assert tensor.item() == 3
        assert torch_resilient.op_log(odd)[-1]["state"] == "completed"
        seen = total(odd)
    options = backend(world).options
    assert (world.group_name, options._timeout) == (name, minutes)
    assert options.global_ranks_in_group == [0, 1, 2, 3]
    return seen, total(world)


def test_a_split_has_the_ranks_name_and_timeout_that_torch_gives_it(world):
    assert world.run(splits, 4) == [
        (None, 1111.0),
        (1010.0, 1111.0),
        (None, 1111.0),
        (1010.0, 1111.0),
    ]


def splits_by_name():
    dist.init_process_group("resilient")
    timeout = timedelta(minutes=2)
    named = dist.group.WORLD.split_group(
        [0, 1, 2], timeout=timeout, group_name="three", group_desc="first three"
    )
    assert (named.group_name, named.group_desc) == ("three", "first three")
    assert backend(named).options._timeout == timeout
    named.set_timeout(timedelta(minutes=3))
    assert backend(named).options._timeout == timedelta(minutes=3)
    backwards = named.split_group([2, 0], group_name="pair")  # Of a split.
    if backwards is None:
        assert dist.get_rank() == 1
        return None
    # Older versions sort them.
    order = backend(backwards).options.global_ranks_in_group
    assert order == [2, 0] or (order == [0, 2] and not CLAIMED)
    assert order[backwards.rank()] == dist.get_rank()
    assert backend(backwards).options._timeout == timedelta(minutes=3)
    return total(backwards)


def test_a_split_of_a_split(world):
    assert world.run(splits_by_name, 3) == [101.0, None, 101.0]


def splits_a_subgroup():
    dist.init_process_group("resilient")
    parent = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    pair = parent.split_group([0, 2])
    if pair is None:
        return None
    assert backend(pair).options.global_ranks_in_group == [1, 3]
    name = pair.group_name
    seen = total(pair)
    del pair
    gc.collect()  # It says goodbye; its name is used up.
    with pytest.raises(RuntimeError, match=r"closed in this generation.*a group_name of its own"):
        parent.split_group([0, 2])
    again = parent.split_group([0, 2], group_name=name + ":again")
    return seen, total(again)


def test_a_split_of_a_subgroup_counts_that_ones_ranks(world):
    assert world.run(splits_a_subgroup, 4) == [None, (1010.0, 1010.0), None, (1010.0, 1010.0)]


def refused():
    dist.init_process_group("resilient")
    world = dist.group.WORLD
    kept = world.split_group([0, 1])
    for ranks, why in (([0, 1], "exists already"), ([0, 2], "none of the 2 ranks"), ([-1], "-1")):
        with pytest.raises(RuntimeError, match=why):
            world.split_group(ranks)
    store = dist.PrefixStore("merge", world.get_group_store())
    with pytest.raises(torch_resilient.ConfigError, match=r"dist\._reconfigure\(uuid, handles\)"):
        world.merge_remote_group(store, 4, timedelta(seconds=5))
    assert world.group_name == "0"
    return total(kept), total(world)


def test_what_cannot_be_is_refused_and_changes_nothing(world):
    assert world.run(refused, 2) == [(11.0, 11.0)] * 2


def over_a_rebuild(revokes):
    dist.init_process_group("resilient")
    world = dist.group.WORLD
    pair = world.split_group([0, 2])
    before = None if pair is None else total(pair)
    tell("ready")  # Who revokes must not end what others are still in.
    hear()
    if dist.get_rank() == revokes:
        torch_resilient.ulfm.revoke("the test")
    with pytest.raises(torch_resilient.CommError):
        while True:
            dist.barrier()
    with pytest.raises(torch_resilient.CommError, match=r"split of group .*the test"):
        world.split_group([0, 1, 2])
    if pair is not None:
        with pytest.raises(torch_resilient.CommError, match="the test"):
            total(pair)
    torch_resilient.rebuild()
    nested = None if pair is None else total(pair.split_group([0, 1], group_name="nested"))
    return before, None if pair is None else total(pair), nested, total(world)


def test_a_split_of_before_a_rebuild_goes_on(world):
    member, other = (101.0, 101.0, 101.0, 111.0), (None, None, None, 111.0)
    ranks = world.start(over_a_rebuild, 3, 1)
    for rank in ranks:
        assert rank.told() == "ready"
    for rank in ranks:
        rank.say("go")
    assert [rank.value() for rank in ranks] == [member, other, member]


def over_a_shrink():
    dist.init_process_group("resilient")
    world = dist.group.WORLD
    pair = world.split_group([0, 2])
    outlive(1)
    torch_resilient.rebuild(mode="shrink")
    for call in (lambda: total(pair), lambda: pair.split_group([0], group_name="late")):
        with pytest.raises(RuntimeError, match="make the group anew"):
            call()
    return total(world.split_group([0, 1]))


@pytest.mark.skipif(VERSION < (2, 14), reason="a world has a constant size before 2.14")
def test_a_split_of_before_a_shrink_says_so(world):
    ranks = world.start(over_a_shrink, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert [ranks[0].value(), ranks[2].value()] == [11.0, 11.0]


def by_torch():
    dist.init_process_group("resilient")
    halves = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="half")
    assert halves.group_desc == "half"
    first = dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(halves) == [first, first + 1]
    assert dist.get_backend(halves) == "resilient"
    assert halves.group_name in {group["name"] for group in torch_resilient.status()["groups"]}
    seen = [total(halves)]
    dist.destroy_process_group(halves)
    again = dist.split_group(split_ranks=[[3, 0]])
    outside = again is dist.GroupMember.NON_GROUP_MEMBER
    assert outside == (dist.get_rank() in (1, 2))
    seen.append(None if outside else total(again))
    return seen


@claimed
def test_the_split_group_of_torch(world):
    assert world.run(by_torch, 4) == [
        [11.0, 1001.0],
        [11.0, None],
        [1100.0, None],
        [1100.0, 1001.0],
    ]


def with_a_bound_device(accelerator):
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("resilient", device_id=CUDA)
    world = dist.group.WORLD
    assert world.bound_device_id == CUDA
    if accelerator:  # As on a machine that has one; all tensors are on the CPU.
        torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    pair = dist.new_group([0, 1])  # Torch has the others make no split with these.
    seen = [] if pair is dist.GroupMember.NON_GROUP_MEMBER else [total(pair)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    seen += [total(mesh.get_group(name)) for name in ("replicas", "shards")]
    if CLAIMED:
        split = dist.split_group(split_ranks=[[0, 3]])
        assert backend(world).supports_splitting
        if dist.get_rank() in (0, 3):
            assert split.bound_device_id == CUDA
            seen.append(total(split))
    return seen


@pytest.mark.parametrize("accelerator", [False, pytest.param(True, marks=claimed)])
def test_a_world_that_is_bound_to_a_device(world, accelerator):
    devices = ";".join(f"a|GPU-{rank}|0|1" for rank in range(4))
    seen = world.run(with_a_bound_device, 4, accelerator, env={"RESILIENT_FAKE_DEVICES": devices})
    split = [1001.0] if CLAIMED else []
    assert seen == [
        [11.0, 101.0, 11.0, *split],
        [11.0, 1010.0, 11.0],
        [101.0, 1100.0],
        [1010.0, 1100.0, *split],
    ]
