"""Fully sharded models under elastic.

Goal: a rank that is lost takes its shard with it, and who replaces it has it again from the rank
that kept it: the run ends like the undisturbed one, bit for bit. Method: FSDP2 on one dimension and
with replicas, Adam, real ranks that are killed.
"""

import contextlib
import os
import signal

import harness
import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_resilient
from torch_resilient import State, elastic

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
MESHES = {"shards": ((3,), ("shard",)), "replicas": ((2, 2), ("replicate", "shard"))}
STEPS = 6


def make_state(keep):
    own = {"model": None, "optimizer": None, "losses": []}
    return State(step=0, per_rank=own, keep_per_rank=keep)


def make_model(mesh):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 7))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(state, shape, names, dies_at):
    model, optimizer = make_model(init_device_mesh("cpu", shape, mesh_dim_names=names))
    state.bind(model=model, optimizer=optimizer)
    while state.step < STEPS:
        if state.step in (2, 4):
            dist.barrier()  # The commit of that step is complete.
        if state.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        # The generator is that of the commit, though the model was made after it.
        loss = model(torch.randn(5, 10) + dist.get_rank()).square().mean()
        loss.backward()
        optimizer.step()
        state.losses = [*state.losses, loss.item()]
        state.step += 1
        state.commit()
    return [parameter.to_local().tolist() for parameter in model.parameters()]


def run_rank(mesh, keep, dies_at):
    dist.init_process_group("resilient")
    state = make_state(keep)
    parameters = elastic(train)(state, *MESHES[mesh], dies_at)
    result = parameters, state.losses, state.step
    dist.destroy_process_group()
    return result


def run_all(world, mesh, keep="buddy", victims=()):
    """`victims`: (rank, step), each killed there and replaced."""
    size = torch.tensor(MESHES[mesh][0]).prod().item()
    dies_at = {rank: step for rank, step in victims}
    ranks = [
        world.start_rank(run_rank, rank, size, mesh, keep, dies_at.get(rank), env=WAIT)
        for rank in range(size)
    ]
    for victim in dies_at:
        assert ranks[victim].wait(60) == -signal.SIGKILL, ranks[victim].stderr()
        ranks[victim] = world.start_rank(run_rank, victim, size, mesh, keep, None, env=WAIT)
    return [rank.value(60) for rank in ranks]


@pytest.fixture(scope="module")
def undisturbed(rank_server, store):
    with contextlib.closing(harness.World(rank_server, store)) as world:
        results = {}
        for mesh in MESHES:
            world.job += mesh
            results[mesh] = run_all(world, mesh)
        return results


@pytest.mark.parametrize(
    ("mesh", "keep", "victims"),
    [
        ("shards", "buddy", [(1, 2)]),
        ("shards", "store", [(0, 2)]),
        ("shards", "buddy", [(2, 2), (0, 4)]),
        ("replicas", "buddy", [(3, 4)]),
    ],
)
def test_a_lost_shard_is_there_again(world, undisturbed, mesh, keep, victims):
    assert run_all(world, mesh, keep, victims) == undisturbed[mesh]


def shards_in_the_replicated_part():
    dist.init_process_group("resilient")
    state = State(model=None)
    model, _ = make_model(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
    state.bind(model=model)
    with pytest.raises(ValueError, match=r"'model' has tensors that are spread over ranks"):
        state.commit()
    weight = model[0].weight.detach()
    with pytest.raises(ValueError, match=r"'ema' is a dict with tensors that are spread over"):
        State(per_rank={"ema": {"weight": weight}}).commit()
    alone = State(per_rank={"weight": weight})
    alone.commit()
    before = weight.to_local().clone()
    weight.to_local().zero_()
    alone.sync()
    assert torch.equal(alone.weight.to_local(), before)
    dist.destroy_process_group()


def test_shards_are_not_the_same_on_all_ranks(world):
    world.run(shards_in_the_replicated_part, 2)


def shrinks():
    dist.init_process_group("resilient")
    state = make_state("buddy")

    def run(state):
        model, optimizer = make_model(init_device_mesh("cpu", (dist.get_world_size(),)))
        state.bind(model=model, optimizer=optimizer)
        state.commit()
        dist.barrier()
        tell("bound")
        if dist.get_rank() == 1:
            signal.pause()
        dist.barrier()

    with pytest.raises(ValueError, match=r"shard of model.0.weight is .*, and that of the commit"):
        elastic(run, min_world=2)(state)
    dist.destroy_process_group()


def test_shards_do_not_fit_a_smaller_world(world):
    """Semantics, section "What is not promised": they are not conjured up."""
    ranks = world.start(shrinks, 3)
    for rank in ranks:
        assert rank.told() == "bound"
    ranks[1].signal()
    for number in (0, 2):
        ranks[number].value(60)


def shares_memory():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(2)
    state = State(model=norm, per_rank={"mean": norm.running_mean})
    norm.running_mean.fill_(rank)
    norm.weight.data.fill_(rank)
    state.sync()
    values = norm.weight.tolist(), norm.running_mean.tolist()
    dist.destroy_process_group()
    return values


def test_a_per_rank_value_within_a_replicated_one_stays_of_its_rank(world):
    assert world.run(shares_memory, 2) == [([0.0, 0.0], [rank] * 2) for rank in (0.0, 1.0)]


def binds_late():
    dist.init_process_group("resilient")
    state = State(step=0, model=None)
    calls = []

    def run(state):
        calls.append(1)
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 5.0)
        state.bind(model=model)
        if len(calls) == 1:
            model.weight.data.fill_(7.0)
            state.commit()
            model.weight.data.fill_(9.0)
            dist.barrier()
            torch_resilient.ulfm.revoke()
            dist.barrier()
        return model.weight.item()

    value = elastic(run)(state)
    dist.destroy_process_group()
    return value, len(calls)


def test_an_object_is_bound_to_the_commit_that_the_run_goes_on_from(world):
    assert world.run(binds_late, 2) == [(7.0, 2)] * 2
