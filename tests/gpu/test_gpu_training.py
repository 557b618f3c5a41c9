"""DDP and FSDP2 on a GPU that lose a rank to SIGKILL end like the undisturbed run."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, FAKE, joined
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

WAIT = {"RESILIENT_SEAT_WAIT": "60s"}
STEPS = 6
DIES_AT = 3


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, 20, generator=generator).to(DEVICE)


def by_hand():
    """Gradients are averaged one by one: what the fake can do."""
    model = make_model().to(DEVICE)

    def average(parameter):
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model, model


def with_ddp():
    model = make_model().to(DEVICE)
    return model, DistributedDataParallel(model, bucket_cap_mb=0.002)


def with_fsdp():
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = make_model().to(DEVICE)
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    return model, model


def train(state, wrap, dies_at):
    model, wrapped = wrap()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state.bind(model=model, optimizer=optimizer)
    while state.step < STEPS:
        dist.barrier()  # The commit of that step is complete.
        if state.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = wrapped(batch(state.step)).square().mean()
        loss.backward()
        optimizer.step()
        state.losses = [*state.losses, loss.item()]
        state.step += 1
        state.commit()
    return state.losses


def run_rank(wrap, dies_at):
    joined()
    own = {"model": None, "optimizer": None, "losses": []}
    state = torch_resilient.State(step=0, per_rank=own, keep_per_rank="buddy")
    losses = torch_resilient.elastic(train)(state, globals()[wrap], dies_at)
    dist.destroy_process_group()
    return losses


def run(world, wrap, dies_at):
    world.job += "x"
    ranks = [world.start_rank(run_rank, 0, 2, wrap, None, env=WAIT)]
    ranks.append(world.start_rank(run_rank, 1, 2, wrap, dies_at, env=WAIT))
    if dies_at is not None:
        assert ranks[1].wait(60) == -signal.SIGKILL, ranks[1].stderr()
        ranks[1] = world.start_rank(run_rank, 1, 2, wrap, None, env=WAIT)
    return [rank.value(60) for rank in ranks]


def needs_gpu(wrap, why):
    return pytest.param(wrap, marks=pytest.mark.skipif(FAKE, reason=f"needs a GPU: {why}"))


@pytest.mark.parametrize(
    "wrap",
    [
        "by_hand",
        needs_gpu("with_ddp", "DDP times itself by events of CUDA's own"),
        needs_gpu("with_fsdp", "the memory of the fake cannot be resized"),
    ],
)
def test_a_training_that_loses_a_rank_ends_like_one_that_does_not(world, wrap):
    undisturbed = run(world, wrap, None)
    healed = run(world, wrap, DIES_AT)
    assert all(len(losses) == STEPS for losses in (*undisturbed, *healed))
    for ours, expected in zip(healed, undisturbed, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    assert undisturbed[0][-1] < undisturbed[0][0]
