"""Ranks that share one GPU, through memory of the host: on the fake CUDA devices, without NCCL.

Where the module fake_cuda is not built nothing of it is tested.
"""

import os
import signal

import fake_device
import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from tensors import joined, same, values

import torch_resilient

pytestmark = pytest.mark.skipif(
    fake_device.refusal() is not None, reason=fake_device.refusal() or ""
)


def environment(ranks=2, **more):
    """All ranks have the same GPU, and there is no NCCL."""
    return {
        "RESILIENT_ALLOW_SHARED_GPU": "1",
        "RESILIENT_NCCL_LIBRARY": "/nowhere/libnccl.so.2",
        "RESILIENT_CUDA_RUNTIME": str(fake_device.LIBRARY),
        "RESILIENT_FAKE_DEVICES": ";".join(["host|GPU-1|0|1"] * ranks),
        **more,
    }


def shared():
    """(fake_cuda, rank, world size) of a rank on cuda:0, as all are."""
    cuda = fake_device.load()
    rank, size = joined()
    cuda.set_device(0)
    return cuda, rank, size


def fetched(cuda, tensor):
    cuda.synchronize()
    return cuda.host(tensor)


def leave(cuda):
    counts = cuda.counts()
    assert counts["misuse"] == [], counts
    assert counts["unique_ids"] == 0 and counts["kernels_begun"] == 0, counts
    assert counts["pinned_most"] <= 8, counts
    dist.destroy_process_group()


def operations():
    cuda, rank, size = shared()
    total = {
        dtype: cuda.tensor(values(rank, count, dtype), device=0)
        for dtype, count in [(torch.float32, 3_000_001), (torch.bfloat16, 5), (torch.int16, 7)]
    }
    for dtype, tensor in total.items():
        dist.all_reduce(tensor)
        expected = sum(values(other, tensor.numel(), dtype) for other in range(size))
        same(fetched(cuda, tensor), expected, dtype)
    flags = cuda.tensor(torch.tensor([1 << rank], dtype=torch.int32), device=0)
    dist.all_reduce(flags, op=dist.ReduceOp.BOR)  # NCCL has none.
    assert fetched(cuda, flags).item() == (1 << size) - 1
    gathered = cuda.tensor(torch.zeros(size * 1000), device=0)
    dist.all_gather_into_tensor(gathered, cuda.tensor(values(rank, 1000), device=0))
    same(fetched(cuda, gathered), torch.cat([values(other, 1000) for other in range(size)]))
    parts = [cuda.tensor(torch.zeros(3 + other), device=0) for other in range(size)]
    sent = [cuda.tensor(values(rank, 3 + rank), device=0) for _ in range(size)]
    dist.all_to_all(parts, sent)  # Sizes that others do not know.
    for other, part in enumerate(parts):
        same(fetched(cuda, part), values(other, 3 + other))
    received = cuda.tensor(torch.zeros(2_000_000), device=0)
    message = cuda.tensor(values(rank, 2_000_000), device=0)
    batch = [
        dist.P2POp(dist.isend, message, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    same(fetched(cuda, received), values((rank - 1) % size, 2_000_000))
    dist.barrier()
    leave(cuda)


def test_operations_on_one_gpu(world):
    world.run(operations, 2, env=environment())


def wait_is_for_the_peers():
    """wait() returns when the parts of the peers are there, and does not wait for the device."""
    cuda, rank, size = shared()
    tensor = cuda.tensor(values(rank, 1000), device=0)
    copy = cuda.tensor(torch.zeros(1000), device=0)
    dist.all_reduce(tensor)
    cuda.copy(copy, tensor)  # Behind it, in the same stream.
    same(fetched(cuda, copy), sum(values(other, 1000) for other in range(size)))
    with cuda.hold() as held:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        held.release()
    work.get_future().wait()
    assert work.is_completed()
    leave(cuda)


def test_the_stream_goes_on_behind_an_operation(world):
    world.run(wait_is_for_the_peers, 2, env=environment())


def train(cuda, rank, size, weights, steps):
    """Steps as DDP makes them: gradients of two buckets are averaged while the next are made."""
    for step in steps:
        gradients = [
            cuda.tensor(values(rank + step, count), device=0) for count in (300_000, 1_500_000)
        ]
        works = [
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True) for gradient in gradients
        ]
        for work, weight, gradient in zip(works, weights, gradients, strict=True):
            work.wait()
            weight -= fetched(cuda, gradient)


def trained(size, steps):
    weights = [torch.zeros(300_000), torch.zeros(1_500_000)]
    for step in steps:
        for weight in weights:
            weight -= sum(values(rank + step, weight.numel()) for rank in range(size)) / size
    return weights


def heals(first):
    cuda, rank, size = shared()
    weights = [torch.zeros(300_000), torch.zeros(1_500_000)]
    if first:
        train(cuda, rank, size, weights, range(3))
        dist.barrier()
        tell("ready")
        if rank == 1:
            signal.pause()
        with pytest.raises(torch_resilient.RankLostError) as caught:
            train(cuda, rank, size, weights, range(1000))
        assert caught.value.rank == 1
        torch_resilient.rebuild()
    weights = [torch.zeros(300_000), torch.zeros(1_500_000)]
    train(cuda, rank, size, weights, range(5))
    for ours, expected in zip(weights, trained(size, range(5)), strict=True):
        same(ours, expected)
    leave(cuda)


def test_training_on_one_gpu_heals_in_place(world):
    env = environment(RESILIENT_SEAT_WAIT="60")
    ranks = world.start(heals, 2, True, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert ranks[1].wait() == -signal.SIGKILL
    successor = world.start_rank(heals, 1, 2, False, env=env)
    for rank in (ranks[0], successor):
        rank.value()


def mismatched():
    cuda, rank, size = shared()
    tensor = cuda.tensor(torch.ones(2_000_000 + rank), device=0)
    with pytest.raises(torch_resilient.MismatchError) as caught:
        dist.all_reduce(tensor)
    text = str(caught.value)
    assert "piece 2 of 2 of all_reduce(float32[2000000], sum) #1" in text, text
    assert "piece 2 of 2 of all_reduce(float32[2000001], sum) #1" in text, text
    assert "mismatched" in text and "world/cuda" in text, text
    torch_resilient.rebuild()
    tensor = cuda.tensor(torch.ones(4), device=0)
    dist.all_reduce(tensor)
    same(fetched(cuda, tensor), torch.full((4,), float(size)))
    leave(cuda)


def test_different_sizes_are_a_mismatch_on_every_rank(world):
    world.run(mismatched, 2, env=environment())


def knocks():
    with pytest.raises(torch_resilient.ConfigError) as caught:
        dist.init_process_group("resilient")
    assert caught.value.code == "DUPLICATE_DEVICE"
    assert "RESILIENT_ALLOW_SHARED_GPU=1" in str(caught.value)


def test_by_default_ranks_may_not_share(world):
    world.run(knocks, 2, env=environment(RESILIENT_ALLOW_SHARED_GPU="0"))


def goes_another_way():
    if os.environ["RANK"] == "1":
        os.environ["RESILIENT_ALLOW_SHARED_GPU"] = "nccl"
    cuda, *_ = shared()
    with pytest.raises(torch_resilient.ConfigError) as caught:
        dist.all_reduce(cuda.tensor(torch.ones(4), device=0))
    assert caught.value.code == "SETTING"
    assert "RESILIENT_ALLOW_SHARED_GPU alike on all ranks" in str(caught.value)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_ranks_that_go_different_ways_are_told_so(world):
    env = environment(RESILIENT_NCCL_LIBRARY=str(fake_device.LIBRARY))
    world.run(goes_another_way, 2, env=env)
