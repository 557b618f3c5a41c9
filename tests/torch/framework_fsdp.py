"""Programs on fully sharded models and their checkpoints; see frameworks.py."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from frameworks import batch, compare, die, join, layers, lost, ready
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

FULL = StateDictOptions(full_state_dict=True)


def sharded(start, mesh=None, **options):
    """A copy of the model whose layers are sharded one by one."""
    model = copy.deepcopy(start)
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)
    return model


def train(model, data_rank, steps):
    """The losses; Adam, whose state is sharded as the parameters are."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        data, targets = batch(data_rank, step)
        loss = nn.functional.mse_loss(model(data).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return optimizer, torch.stack(losses)


def train_alone(start, size, steps):
    """What `size` ranks together come to, on one."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            data, targets = batch(rank, step)
            (nn.functional.mse_loss(model(data), targets) / size).backward()
        optimizer.step()
    return model.state_dict()


def check(full, expected):
    assert full.keys() == expected.keys()
    for name, value in full.items():
        compare(value, expected[name], name, exact=False)


def fsdp2(backend, meeting):
    """Sharded on both ways of keeping the parameters, and with bf16 in forward and backward."""
    rank, size = join(backend, meeting)
    mesh = init_device_mesh("cpu", (size,))
    start = layers(width=33)  # Not divisible by the ranks.
    expected = train_alone(start, size, 3)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for name, options in {
        "reshard": {"reshard_after_forward": True},
        "keep": {"reshard_after_forward": False},
        "bf16": {"mp_policy": half},
    }.items():
        model = sharded(start, mesh, **options)
        assert isinstance(model.first.weight, DTensor)
        _, results[f"{name} losses"] = train(model, rank, 3)
        full = get_model_state_dict(model, options=FULL)
        if name != "bf16":
            check(full, expected)
        results |= {f"{name} {key}": value for key, value in full.items()}
    dist.destroy_process_group()
    return results


def hybrid(backend, meeting):
    """Shards within one dimension of a 2-D mesh, replicas along the other."""
    rank, _ = join(backend, meeting)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    start = layers()
    model = sharded(start, mesh)
    _, losses = train(model, rank, 3)
    full = get_model_state_dict(model, options=FULL)
    check(full, train_alone(start, 4, 3))
    dist.destroy_process_group()
    return {"losses": losses, **full}


def fsdp1(backend, meeting):
    """The older wrapper, in each of its ways to shard."""
    rank, size = join(backend, meeting)
    start = layers()
    expected = train_alone(start, size, 3)
    results = {}
    for strategy in (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ):
        model = FullyShardedDataParallel(
            copy.deepcopy(start),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        train(model, rank, 3)
        with FullyShardedDataParallel.summon_full_params(model):
            full = {name: value.detach().clone() for name, value in model.named_parameters()}
        full = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in full.items()}
        check(full, expected)
        results |= {f"{strategy.name} {name}": value for name, value in full.items()}
    dist.destroy_process_group()
    return results


def two_dimensions(backend, meeting):
    """Tensor parallel along one dimension of the mesh, sharded along the other."""
    join(backend, meeting)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    start = layers()
    model = copy.deepcopy(start)
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    plan["last"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], plan)
    model = sharded(model, mesh["data"])
    assert model.first.weight.device_mesh.ndim == 2
    _, losses = train(model, mesh.get_local_rank("data"), 3)
    full = get_model_state_dict(model, options=FULL)
    check(full, train_alone(start, 2, 3))
    dist.destroy_process_group()
    return {"losses": losses, **full}


def checkpoint(backend, meeting, folder):
    """Saved by shards, now and in the background, and loaded into other shards: by all ranks in
    one dimension, then in two."""
    rank, size = join(backend, meeting)
    folder = f"{folder}/{backend}"
    start = layers()
    model = sharded(start, init_device_mesh("cpu", (size,)))
    optimizer, _ = train(model, rank, 2)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/now")
    dcp.async_save(states, checkpoint_id=f"{folder}/later").result()
    full = get_model_state_dict(model, options=FULL)
    _, losses = train(model, rank, 1)

    for name in ("now", "later"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        other = sharded(layers(seed=5), mesh)
        again = torch.optim.Adam(other.parameters(), lr=0.01)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
        dcp.load(states, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            other, again, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        for key, value in get_model_state_dict(other, options=FULL).items():
            assert torch.equal(value, full[key]), key
        assert len(again.state) == len(list(other.parameters()))

    third = sharded(layers(seed=6), init_device_mesh("cpu", (size,)))
    set_model_state_dict(
        third,
        dict(full) if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for key, value in get_model_state_dict(third, options=FULL).items():
        assert torch.equal(value, full[key]), key
    dist.destroy_process_group()
    return {"losses": losses, **full}


def loses_a_rank(victim):
    """The victim ends in the midst of a backward, between the gathering of two layers."""
    rank, size = join("resilient", None)
    model = sharded(layers(), init_device_mesh("cpu", (size,)))
    train(model, rank, 1)
    ready(rank, victim)
    if rank == victim:
        model.middle.register_full_backward_pre_hook(lambda *_: die())
    return lost(victim, train, model, rank, 100)


def loses_a_rank_saving(victim, folder):
    """The victim ends while the others plan a checkpoint with it."""
    rank, size = join("resilient", None)
    model = sharded(layers(), init_device_mesh("cpu", (size,)))
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/first")
    ready(rank, victim)
    if rank == victim:
        die()
    state = get_model_state_dict(model)
    return lost(victim, lambda: dcp.save(state, checkpoint_id=f"{folder}/second"))
