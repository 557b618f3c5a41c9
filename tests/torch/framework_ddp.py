"""Programs on DistributedDataParallel and what goes with it; see frameworks.py."""

import copy

import torch
import torch.distributed as dist
from frameworks import batch, join, layers, parameters
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BUCKET_MB = 0.002  # Several buckets even for a small model.


class Branches(nn.Module):
    """Of two branches a step uses one, or both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers(1), layers(2)

    def forward(self, inputs, branch):
        if branch == 0:
            return self.first(inputs)
        if branch == 1:
            return self.second(inputs)
        return self.first(inputs) + self.second(inputs)


def train(model, rank, steps, optimizer=None, **inputs):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        data, targets = batch(rank, step)
        nn.functional.mse_loss(model(data, **inputs), targets).backward()
        optimizer.step()


def _changed(model, start):
    """Its parameters; each of them has learned something."""
    for ours, before in zip(model.parameters(), start.parameters(), strict=True):
        assert not torch.equal(ours, before)
    return parameters(model)


def options(backend, meeting):
    """DDP's switches, one model after another."""
    rank, _ = join(backend, meeting)
    results = {}

    def keep(name, model, start):
        results.update({f"{name} {key}": value for key, value in _changed(model, start).items()})

    for name, switches in {
        "plain": {},
        "static graph": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    }.items():
        start = layers()
        model = DistributedDataParallel(copy.deepcopy(start), bucket_cap_mb=BUCKET_MB, **switches)
        train(model, rank, 4)
        keep(name, model.module, start)

    start = layers()
    model = DistributedDataParallel(copy.deepcopy(start), bucket_cap_mb=BUCKET_MB)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(model, rank, 4)
    keep("bf16 hook", model.module, start)
    dist.destroy_process_group()
    return results


def unused(backend, meeting):
    """Ranks use different branches, then all the same one."""
    rank, _ = join(backend, meeting)
    start = Branches()
    model = DistributedDataParallel(
        copy.deepcopy(start), find_unused_parameters=True, bucket_cap_mb=BUCKET_MB
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        data, targets = batch(rank, step)
        branch = (rank + step) % 3 if step < 4 else 0
        nn.functional.mse_loss(model(data, branch), targets).backward()
        if step == 4:  # Used by no rank.
            assert not any(
                p.grad.any() for p in model.module.second.parameters() if p.grad is not None
            )
        optimizer.step()
    results = _changed(model.module, start)
    dist.destroy_process_group()
    return results


def accumulation(backend, meeting):
    """no_sync: gradients of three backwards are summed here, and over the ranks with the last."""
    rank, size = join(backend, meeting)
    model = DistributedDataParallel(layers(), bucket_cap_mb=BUCKET_MB)
    alone = layers()
    for step in range(3):
        data, targets = batch(rank, step)
        loss = nn.functional.mse_loss
        if step < 2:
            with model.no_sync():
                loss(model(data), targets).backward()
        else:
            loss(model(data), targets).backward()
    for other in range(size):
        for step in range(3):
            data, targets = batch(other, step)
            (nn.functional.mse_loss(alone(data), targets) / size).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    results = {name: value.grad.clone() for name, value in model.module.named_parameters()}
    dist.destroy_process_group()
    return results


def uneven(backend, meeting):
    """The join context, with DDP and a ZeroRedundancyOptimizer, and batches that run out early."""
    rank, _ = join(backend, meeting)
    start = layers()
    model = DistributedDataParallel(copy.deepcopy(start), bucket_cap_mb=BUCKET_MB)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        train(model, rank, 2 + 2 * rank, optimizer)
    results = _changed(model.module, start)
    dist.destroy_process_group()
    return results


def zero(backend, meeting):
    """Sharded optimizer states: the same as Adam's; put together on rank 0; a periodic average."""
    rank, _ = join(backend, meeting)
    ours = DistributedDataParallel(layers(), bucket_cap_mb=BUCKET_MB)
    plain = DistributedDataParallel(layers(), bucket_cap_mb=BUCKET_MB)
    sharded = ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=0.01
    )
    train(ours, rank, 4, sharded)
    train(plain, rank, 4, torch.optim.Adam(plain.parameters(), lr=0.01))
    for mine, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)
    sharded.consolidate_state_dict(to=0)
    results = parameters(ours.module)
    if rank == 0:
        states = sharded.state_dict()["state"]
        assert len(states) == len(results)
        results |= {f"moment {number}": state["exp_avg"] for number, state in states.items()}

    alone = layers(seed=rank)
    train(alone, rank, 1)
    PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(alone.parameters())
    results |= parameters(alone, "average ")
    dist.destroy_process_group()
    return results


def compiled(backend, meeting, compiler, mode):
    """torch.compile of a DDP model: Dynamo cuts the graph at the buckets, or ("python_reducer")
    traces the all-reduces too."""
    rank, _ = join(backend, meeting)
    torch._dynamo.config.optimize_ddp = mode
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return lookup_backend(compiler)(graph, inputs)

    # Dynamo wants buckets of a MiB at least: three of them.
    model = DistributedDataParallel(layers(width=512), bucket_cap_mb=1)
    eager = DistributedDataParallel(layers(width=512), bucket_cap_mb=1)
    fast = torch.compile(model, backend=counted)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, eager)]
    for step in range(3):
        data, targets = batch(rank, step)
        for forward, optimizer in zip((fast, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(forward(data), targets)
            if mode == "python_reducer" and forward is fast:
                with torch._dynamo.utils.maybe_enable_compiled_autograd(True):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
    assert len(graphs) == (1 if mode == "python_reducer" else 2), len(graphs)
    for ours, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    results = {name: value[:8].clone() for name, value in parameters(model.module).items()}
    dist.destroy_process_group()
    return results
