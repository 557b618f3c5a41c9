"""Every operation of this part, through torch.distributed, on every element type."""

import pytest
import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
OPS = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
}
SIZES = [1, 7, 1000, 70001]


def values(rank, count, dtype):
    """Small whole numbers: exact in every type, other ones on every rank."""
    numbers = (torch.arange(count) * (rank + 1) + rank) % 11
    return numbers.remainder(2).bool() if dtype == torch.bool else numbers.to(dtype)


def everyone(size, count, dtype):
    return torch.stack([values(rank, count, dtype) for rank in range(size)])


def same(ours, expected, what):
    assert ours.dtype == expected.dtype, what
    assert torch.equal(ours, expected), f"{what}: {ours[:8]} is not {expected[:8]}"


def reductions():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in SUMMED + [torch.uint8]:
        for count in SIZES:
            for op, reference in OPS.items():
                tensor = values(rank, count, dtype)
                dist.all_reduce(tensor, op=op)
                same(tensor, reference(everyone(size, count, dtype)).to(dtype), (op, dtype, count))
    for dtype in (torch.float32, torch.float64):
        tensor = values(rank, 100, dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        expected = everyone(size, 100, dtype).sum(0) / size
        assert torch.allclose(tensor, expected)
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    same(flags, torch.tensor([True, True, False]), "bool MAX")
    dist.destroy_process_group()


def movements():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in SIZES:
            what = (dtype, count)
            for root in range(size):
                tensor = values(rank, count, dtype)
                dist.broadcast(tensor, src=root)
                same(tensor, values(root, count, dtype), ("broadcast", *what))
            parts = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, values(rank, count, dtype))
            same(torch.stack(parts), everyone(size, count, dtype), ("all_gather", *what))
            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, values(rank, count, dtype))
            same(whole, everyone(size, count, dtype).reshape(-1), ("all_gather_into", *what))
            if size > 1:
                ring(rank, size, count, dtype)
    dist.barrier()
    dist.destroy_process_group()


def ring(rank, size, count, dtype):
    """Each rank sends to the next and receives from the one before."""
    before, after = (rank - 1) % size, (rank + 1) % size
    received = torch.empty(count, dtype=dtype)
    sending = dist.isend(values(rank, count, dtype), after)
    dist.recv(received, before)
    sending.wait()
    same(received, values(before, count, dtype), ("send and recv", dtype, count))


def not_contiguous():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = torch.full((4, 6), float(rank + 1))
    dist.all_reduce(matrix.t())
    assert torch.equal(matrix, torch.full((4, 6), float(sum(range(1, size + 1)))))
    empty = torch.empty(0)
    dist.all_reduce(empty)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))
    dist.destroy_process_group()


def objects():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * rank * 1000})
    assert [item["rank"] for item in gathered] == list(range(size))
    box = [{"from": rank}, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(box, src=1)
    assert box == [{"from": 1}, 1]
    dist.destroy_process_group()


def groups():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(list(range(0, size, 2)))
    odd = dist.new_group(list(range(1, size, 2)))
    mine = even if rank % 2 == 0 else odd
    members = dist.get_process_group_ranks(mine)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == sum(members)
    dist.broadcast(tensor.fill_(rank), src=members[-1], group=mine)
    assert tensor.item() == members[-1]
    world = torch.ones(1)
    dist.all_reduce(world)
    assert world.item() == size
    dist.destroy_process_group(mine)
    dist.barrier()
    assert dist.get_backend() == "resilient"
    assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "resilient"
    dist.destroy_process_group()


def asynchronous():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + number)) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    doubled = futures[3].then(lambda future: future.value()[0] * 2)
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert work.is_completed()
        assert tensor[0].item() == sum(other + number for other in range(size))
    assert torch.equal(doubled.wait(), tensors[3] * 2)
    assert torch.equal(futures[0].wait()[0], tensors[0])

    # PowerSGD's hook does this: a callback that waits for what ends in a callback as well.
    def another(_):
        return dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()[0]

    nested = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(another)
    assert nested.wait().tolist() == [size] * 3
    dist.destroy_process_group()


def same_bits():
    """Sums of floating point numbers are the same on every rank, at every offset and size."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    whole = torch.randn(50_000)
    parts = [part.clone() for part in whole.split([1, 4095, 30_000, 15_904])]
    dist.all_reduce(whole)
    for part in parts:
        dist.all_reduce(part)
    assert torch.equal(torch.cat(parts), whole)
    dist.destroy_process_group()
    return whole.numpy().tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("function", [reductions, movements], ids=lambda f: f.__name__)
def test_values(world, function, size):
    world.run(function, size)


@pytest.mark.parametrize("function", [not_contiguous, groups, asynchronous])
def test_forms(world, function):
    world.run(function, 4)


def test_objects(world):
    world.run(objects, 3)


def test_the_order_of_reduction_is_that_of_the_ranks(world):
    assert len(set(world.run(same_bits, 4))) == 1


def groups_twice():
    """Names and keys of groups that come again do not disturb each other."""
    dist.init_process_group("resilient")
    for _ in range(5):
        group = dist.new_group()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == dist.get_world_size()
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def test_groups_come_and_go(world):
    world.run(groups_twice, 3)


def store_api():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key{rank}", f"value{rank}")
    store.wait([f"key{other}" for other in range(size)])
    assert store.get(f"key{(rank + 1) % size}") == f"value{(rank + 1) % size}".encode()
    store.add("count", 2)
    dist.barrier()
    assert store.add("count", 0) == 2 * size
    assert store.check(["key0", "count"]) and not store.check(["key0", "missing"])
    assert store.compare_set("slot", "", "first") in (b"first",)
    assert store.compare_set("slot", "wrong", "second") == b"first"
    dist.barrier()
    if rank == 0:
        assert store.delete_key("count")
        assert not store.delete_key("count")
        assert store.num_keys() >= size
    dist.destroy_process_group()


def test_the_store_of_a_world(world):
    world.run(store_api, 3)
