"""Programs on meshes of ranks, functional collectives, DTensor and objects; see frameworks.py."""

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from frameworks import batch, die, join, layers, lost, ready
from tensors import same, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

FLOATS = (torch.float32, torch.bfloat16, torch.int64)


def meshes(backend, meeting):
    """A mesh of 2 x 2: its groups, and a collective in each of them, at the same time."""
    rank, _ = join(backend, meeting)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    assert tuple(mesh.get_coordinate()) == (rank // 2, rank % 2)
    rows, columns = mesh.get_group("row"), mesh.get_group("column")
    assert dist.get_process_group_ranks(rows) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(columns) == [rank // 2 * 2, rank // 2 * 2 + 1]
    tensors = [torch.full((1000,), float(rank)) for _ in range(2)]
    works = [
        dist.all_reduce(tensors[0], group=rows, async_op=True),
        dist.all_reduce(tensors[1], group=columns, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    same(tensors[0], torch.full((1000,), float(2 * (rank % 2) + 2)))
    same(tensors[1], torch.full((1000,), float(4 * (rank // 2) + 1)))
    flat = mesh._flatten("all")
    total = torch.full((3,), float(rank))
    dist.all_reduce(total, group=flat.get_group())
    same(total, torch.full((3,), 6.0))
    sub = mesh["column"]
    assert sub.get_local_rank() == rank % 2 and sub.size() == 2
    dist.destroy_process_group()
    return {"rows": tensors[0], "columns": tensors[1]}


def _functional(rank, size, group, mesh):
    """{name: result} of each functional collective; the same in eager mode and compiled."""
    results = {}
    for dtype in FLOATS:
        mine = values(rank, 4 * size, dtype).reshape(2 * size, 2)
        results |= {
            f"all_reduce {dtype}": funcol.all_reduce(mine, "sum", group),
            f"max {dtype}": funcol.all_reduce(mine, "max", group),
            f"all_gather {dtype}": funcol.all_gather_tensor(mine, 0, group),
            f"all_gather by column {dtype}": funcol.all_gather_tensor(mine, 1, group),
            f"reduce_scatter {dtype}": funcol.reduce_scatter_tensor(mine, "sum", 0, group),
            f"all_to_all {dtype}": funcol.all_to_all_single(mine, None, None, group),
            f"broadcast {dtype}": funcol.broadcast(mine, 1, group),
        }
    mine = values(rank, 2 * size).reshape(size, 2)
    results["average"] = funcol.all_reduce(mine, "avg", group)
    results["in a mesh"] = funcol.all_reduce(mine, "sum", mesh)
    lengths = [1 + (rank + other) % 2 for other in range(size)]
    parts = values(rank, sum(lengths))
    results["all_to_all of parts"] = funcol.all_to_all_single(parts, lengths, lengths, group)
    results |= {
        f"coalesced {number}": value
        for number, value in enumerate(
            funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
            + funcol.all_gather_into_tensor_coalesced([mine, mine * 2], group)
            + funcol.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", [0, 0], group)
        )
    }
    return {name: value + 0 for name, value in results.items()}


def functional(backend, meeting, compiler):
    """Functional collectives: lazily waited for, differentiated, and in one compiled graph."""
    rank, size = join(backend, meeting)
    mesh = init_device_mesh("cpu", (size,))
    group = dist.group.WORLD
    lazy = funcol.all_reduce(values(rank, 10), "sum", group)
    assert isinstance(lazy, funcol.AsyncCollectiveTensor)
    expected = sum(values(other, 10) for other in range(size))
    same(funcol.wait_tensor(lazy), expected)
    same(funcol.all_reduce(values(rank, 10), "sum", group) * 2, expected * 2)  # Waits by itself.

    weight = torch.ones(size, 3, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(weight * (rank + 1), 0, group)
    gathered.sum().backward()
    same(weight.grad, torch.full((size, 3), float(size * (rank + 1))))

    eager = _functional(rank, size, group, mesh)
    if compiler:
        torch._dynamo.config.cache_size_limit = 16
        fast = torch.compile(_functional, backend=compiler, fullgraph=True)
        for name, value in fast(rank, size, group, mesh).items():
            same(value, eager[name], f"{name}, compiled")
    dist.destroy_process_group()
    return {name: value.clone() for name, value in eager.items()}


def redistributions(backend, meeting):
    """Every placement into every other one, also of sizes that cannot be divided."""
    rank, size = join(backend, meeting)
    mesh = init_device_mesh("cpu", (size,))
    results = {}
    for rows in (2 * size, 2 * size + 1, 1):
        whole = torch.arange(rows * 3 * size, dtype=torch.float32).reshape(rows, 3 * size)
        placements = [Replicate(), Shard(0), Shard(1)]
        for source in placements:
            tensor = distribute_tensor(whole.clone(), mesh, [source])
            for target in placements:
                moved = tensor.redistribute(mesh, [target])
                same(moved.full_tensor(), whole, f"{source} to {target}")
                results[f"{rows} {source} to {target}"] = moved.to_local()
        for operation in ("sum", "max"):
            part = DTensor.from_local(whole + rank, mesh, [Partial(operation)])
            total = whole * size + sum(range(size)) if operation == "sum" else whole + size - 1
            for target in placements:
                moved = part.redistribute(mesh, [target])
                same(moved.full_tensor(), total, f"{operation} to {target}")
                results[f"{rows} {operation} to {target}"] = moved.to_local()
    # Of two dimensions; the product needs several collectives.
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        left = distribute_tensor(values(0, 64).reshape(8, 8), mesh, [Shard(0), Shard(1)])
        right = distribute_tensor(values(1, 64).reshape(8, 8), mesh, [Replicate(), Shard(0)])
        expected = values(0, 64).reshape(8, 8) @ values(1, 64).reshape(8, 8)
        same((left @ right).full_tensor(), expected)
    dist.destroy_process_group()
    return results


def tensor_parallel(backend, meeting):
    """Layers split by column and by row, with sequence parallel between them, against one rank."""
    _, size = join(backend, meeting)
    mesh = init_device_mesh("cpu", (size,))
    start = Blocks()
    alone, model = copy.deepcopy(start), copy.deepcopy(start)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "layers": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "layers.first": ColwiseParallel(),
        "layers.middle": RowwiseParallel(),
        "layers.last": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    results = {}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(3):
        data, targets = (
            tensor.expand(size * 2, -1, -1).transpose(0, 1) for tensor in batch(0, step)
        )
        losses = []
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(nn.functional.mse_loss(each(data), targets))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
        results[f"loss {step}"] = losses[0].detach()
    for (name, ours), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        results[name] = ours.full_tensor().detach()
        torch.testing.assert_close(results[name], expected.detach())
    replicated = distribute_module(copy.deepcopy(start), mesh)
    assert all(isinstance(value, DTensor) for value in replicated.parameters())
    dist.destroy_process_group()
    return results


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()
        self.embed = nn.Linear(20, 20)
        self.norm = nn.LayerNorm(20)

    def forward(self, inputs):
        return self.layers(self.norm(self.embed(inputs)))


def objects(backend, meeting):
    """Collectives of Python objects of all sizes, in the world and in a group."""
    rank, size = join(backend, meeting)
    results = {}
    subgroup = dist.new_group([0, size - 1])
    for name, group in {"world": None, "group": subgroup}.items():
        if dist.get_rank(group) < 0:
            continue
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        mine = {"rank": rank, "bytes": b"x" * (10_000 * rank), "set": {rank}}
        all_of_them = [
            {"rank": other, "bytes": b"x" * (10_000 * other), "set": {other}} for other in members
        ]
        gathered = [None] * len(members)
        dist.all_gather_object(gathered, mine, group=group)
        assert gathered == all_of_them
        gathered = [None] * len(members) if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=group)
        assert rank != 0 or gathered == all_of_them
        heard = [mine, rank] if rank == members[-1] else [None, None]
        dist.broadcast_object_list(heard, src=members[-1], group=group)
        assert heard == [all_of_them[-1], members[-1]]
        scattered = [None]
        dist.scatter_object_list(scattered, all_of_them if rank == 0 else None, 0, group=group)
        assert scattered == [mine]
        results[name] = [each["rank"] for each in all_of_them]
    if rank == 0:
        dist.send_object_list([{"to": size - 1}], size - 1)
    elif rank == size - 1:
        heard = [None]
        dist.recv_object_list(heard, 0)
        assert heard == [{"to": rank}]
    dist.destroy_process_group()
    return results


def loses_a_rank(victim, how):
    """The victim ends between two collectives that the others wait for."""
    rank, size = join("resilient", None)
    mesh = init_device_mesh("cpu", (2, size // 2))
    group = dist.group.WORLD

    def step(tensor):
        return funcol.all_reduce(funcol.all_gather_tensor(tensor, 0, group), "sum", group) + 1

    if how == "compiled":
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    elif how == "DTensor":

        def step(tensor):
            ours = distribute_tensor(tensor, mesh, [Shard(0), Replicate()], src_data_rank=None)
            return ours.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor()

    step(torch.ones(4))
    ready(rank, victim)
    if rank == victim:
        die()
    return lost(victim, step, torch.ones(4))
