"""RESILIENT_TAKE_OVER: programs that name another backend are served by us, unchanged."""

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

ALL = {"RESILIENT_TAKE_OVER": "nccl,gloo"}


def worlds_of(names):
    served = []
    for name in names:
        dist.init_process_group(name)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        served.append(dist.get_backend(torch.distributed.group.WORLD))
        dist.destroy_process_group()
    return served


def test_every_way_to_ask(world):
    names = ["gloo", "nccl", "NCCL", None, "cpu:gloo,cuda:nccl", "cpu:gloo", "resilient"]
    ranks = world.start(worlds_of, 2, names, env=ALL)
    for rank in ranks:
        assert set(rank.value(60)) == {"resilient"}
    line = "RESILIENT_TAKE_OVER: resilient serves this world, the program asks for 'gloo'"
    assert f"[resilient] rank 0: {line}" in ranks[0].stderr()
    assert line not in ranks[1].stderr()


def backends_by_device():
    dist.init_process_group()
    config = dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD]
    dist.barrier()
    dist.destroy_process_group()
    return str(config)


def test_what_is_not_taken_over_is_left(world):
    nccl_only = {"RESILIENT_TAKE_OVER": "nccl"}
    assert world.run(worlds_of, 2, ["gloo"], env=nccl_only) == [["gloo"]] * 2
    for config in world.run(backends_by_device, 2, env=nccl_only):
        assert config == "cpu:gloo,cuda:resilient"


def groups_in_a_world():
    dist.init_process_group("nccl")
    whole = dist.new_group(backend="gloo")
    part = dist.new_group([0, 1], None, "nccl")
    inherited = dist.new_group()
    for group in (whole, part, inherited):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)
    names = [dist.get_backend(group) for group in (whole, inherited)]
    own, _ = dist.new_subgroups(group_size=1)
    names.append(dist.get_backend(own))
    dist.destroy_process_group()
    return names


def test_groups_are_ours_as_well(world):
    assert world.run(groups_in_a_world, 3, env=ALL) == [["resilient"] * 3] * 3


def groups_of_a_gloo_world():
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    name = dist.get_backend(group)
    dist.destroy_process_group()
    return name


def test_a_world_of_another_backend_keeps_its_groups(world):
    env = {"RESILIENT_TAKE_OVER": "nccl"}
    assert world.run(groups_of_a_gloo_world, 2, env=env) == ["gloo", "gloo"]


def train_until_somebody_is_lost():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    tell("in")
    hear()
    try:
        while True:
            model(torch.ones(3, 4)).sum().backward()
    except torch_resilient.RankLostError as error:
        return error.rank


def test_a_script_for_gloo_names_the_rank_that_died(world):
    ranks = world.start(train_until_somebody_is_lost, 3, env=ALL)
    for rank in ranks:
        assert rank.told() == "in"
    for rank in ranks:
        rank.say("go")
    ranks[1].signal()
    assert [ranks[0].value(30), ranks[2].value(30)] == [1, 1]


@pytest.mark.parametrize("value", ["mpi", "nccl;gloo", "gloo, nccl"])
def test_a_typing_error_is_told_at_init(world, value):
    for rank in world.start(worlds_of, 2, ["gloo"], env={"RESILIENT_TAKE_OVER": value}):
        error = rank.error(30)
        assert isinstance(error, torch_resilient.ConfigError), repr(error)
        assert error.code == "SETTING"
        assert "RESILIENT_TAKE_OVER" in str(error) and "nccl,gloo" in str(error)
        rank.wait()
