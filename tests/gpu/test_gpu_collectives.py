"""Collectives and messages of 1, 2 and 4 ranks on one GPU give what the CPU calculates."""

import gpu_device
import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, joined
from tensors import same, values

COUNTS = (2, 1000, 1 << 18)
TYPES = (torch.float32, torch.bfloat16, torch.int64)


def on_gpu(rank, count, dtype=torch.float32):
    return values(rank, count, dtype).to(DEVICE)


def reduced(size, count, dtype):
    return torch.stack([values(rank, count, dtype) for rank in range(size)]).sum(0).to(dtype)


def reductions(rank, size, count, dtype):
    summed = reduced(size, count, dtype)
    tensor = on_gpu(rank, count, dtype)
    dist.all_reduce(tensor)
    same(tensor.cpu(), summed, f"all_reduce {count} {dtype}")
    tensor = on_gpu(rank, count, dtype)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    most = torch.stack([values(other, count, dtype) for other in range(size)]).amax(0)
    same(tensor.cpu(), most, f"max {count} {dtype}")
    tensor = on_gpu(rank, count, dtype)
    dist.reduce(tensor, dst=size - 1)
    if rank == size - 1:
        same(tensor.cpu(), summed, f"reduce {count} {dtype}")
    part = torch.empty(count, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_tensor(part, on_gpu(rank, count * size, dtype))
    whole = reduced(size, count * size, dtype)
    same(part.cpu(), whole[rank * count : (rank + 1) * count], f"reduce_scatter {count} {dtype}")


def moves(rank, size, count, dtype):
    tensor = on_gpu(rank, count, dtype)
    dist.broadcast(tensor, src=size - 1)
    same(tensor.cpu(), values(size - 1, count, dtype), f"broadcast {count} {dtype}")
    everyone = torch.cat([values(other, count, dtype) for other in range(size)])
    gathered = torch.empty(count * size, dtype=dtype, device=DEVICE)
    dist.all_gather_into_tensor(gathered, on_gpu(rank, count, dtype))
    same(gathered.cpu(), everyone, f"all_gather {count} {dtype}")
    parts = list(torch.empty_like(gathered).chunk(size)) if rank == 0 else None
    dist.gather(on_gpu(rank, count, dtype), parts, dst=0)
    if rank == 0:
        same(torch.cat([part.cpu() for part in parts]), everyone, f"gather {count} {dtype}")
    part = torch.empty(count, dtype=dtype, device=DEVICE)
    dist.scatter(part, list(everyone.to(DEVICE).chunk(size)) if rank == 0 else None, src=0)
    same(part.cpu(), values(rank, count, dtype), f"scatter {count} {dtype}")
    swapped = torch.empty_like(gathered)
    dist.all_to_all_single(swapped, on_gpu(rank, count * size, dtype))
    pieces = [values(other, count * size, dtype).chunk(size)[rank] for other in range(size)]
    same(swapped.cpu(), torch.cat(pieces), f"all_to_all {count} {dtype}")


def messages(rank, size, count):
    """Around the ring, sent and received together."""
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, received = on_gpu(rank, count), torch.empty(count, device=DEVICE)
    operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(received.cpu(), values(left, count), f"ring {count}")
    if rank == 0:
        dist.send(sent, size - 1)
    elif rank == size - 1:
        dist.recv(received, 0)
        same(received.cpu(), values(0, count), f"recv {count}")


def everything():
    rank, size = joined()
    for count in COUNTS:
        for dtype in TYPES:
            reductions(rank, size, count, dtype)
            moves(rank, size, count, dtype)
        if size > 1:
            messages(rank, size, count)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    for first, group in zip(range(0, size - 1, 2), pairs, strict=True):
        if rank in (first, first + 1):
            tensor = on_gpu(rank, 1000)
            dist.all_reduce(tensor, group=group)
            same(tensor.cpu(), values(first, 1000) + values(first + 1, 1000), "a part of the world")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_comes_out_is_what_the_cpu_says(world, size):
    world.run(everything, size, seconds=80)


def large(count):
    rank, size = joined()
    tensor = on_gpu(rank, count)
    dist.all_reduce(tensor)
    same(tensor.cpu(), reduced(size, count, torch.float32))
    dist.destroy_process_group()


def test_sixty_four_mebibytes(world):
    world.run(large, 2, 1 << (20 if gpu_device.FAKE else 24), seconds=60)


def streams():
    """An operation begins behind what its stream has, and what comes later is behind it."""
    rank, size = joined()
    tensor, twice = torch.zeros(1 << 20, device=DEVICE), torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            tensor.add_(rank + 1)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()  # For the current stream, which is another one.
    twice.copy_(tensor).mul_(2)
    assert twice.unique().tolist() == [40.0 * sum(range(1, size + 1))]
    dist.destroy_process_group()


def test_operations_are_in_the_order_of_streams(world):
    world.run(streams, 2)


def bound():
    """The group is connected for its device as it is made."""
    gpu_device.load()
    dist.init_process_group("resilient", device_id=DEVICE, timeout=gpu_device.TIMEOUT)
    dist.barrier()
    tensor = torch.ones(4, device=DEVICE)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 4
    dist.destroy_process_group()


def test_a_group_that_is_bound_to_the_device(world):
    world.run(bound, 2)


def pooled():
    """Memory that NCCL has allocated: in a pool of torch's, and given back to it for good."""
    rank, size = joined()
    backend = dist.group.WORLD._get_backend(DEVICE)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        mine, all_of_them = on_gpu(rank, 1000), torch.empty(1000 * size, device=DEVICE)
    assert pool.snapshot()
    dist.all_gather_into_tensor(all_of_them, mine)
    dist.all_reduce(mine)
    same(mine.cpu(), reduced(size, 1000, torch.float32), "all_reduce in a pool")
    everyone = torch.cat([values(other, 1000) for other in range(size)])
    same(all_of_them.cpu(), everyone, "all_gather in a pool")
    del mine, all_of_them, pool
    torch.cuda.empty_cache()
    dist.all_reduce(on_gpu(rank, 1000))
    dist.destroy_process_group()


@pytest.mark.skipif(gpu_device.FAKE, reason="pools of torch's are made on a real GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_memory_of_nccl_in_a_pool_of_torch(world, size):
    world.shared = size > 1
    world.run(pooled, size, seconds=60)
