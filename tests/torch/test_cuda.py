"""Tensors on CUDA devices, without a GPU: the fake CUDA devices and the fake NCCL of tests/support.

Where the module fake_cuda is not built, only what needs no device is tested.
"""

import importlib.util
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tensors import joined, same, values

NEEDS_FAKE = pytest.mark.skipif(
    importlib.util.find_spec("fake_cuda") is None,
    reason="the module fake_cuda is not on the path (tests/support)",
)
SOON = timedelta(milliseconds=300)


def barrier_that_names_a_device():
    """No CUDA here: such a barrier is the host's, as with gloo."""
    _, size = joined()
    dist.barrier(device_ids=[0])
    options = dist.BarrierOptions()
    options.device_ids = [0]
    dist.group.WORLD._get_backend(torch.device("cpu")).barrier(options).wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    if "fake_cuda" not in sys.modules:
        assert not torch.cuda.is_initialized()
    dist.destroy_process_group()


def test_a_barrier_that_names_a_device_works_without_any(world):
    world.run(barrier_that_names_a_device, 2)


def faked():
    """(fake_cuda, rank, world size) of a rank whose device is the fake cuda:rank."""
    import fake_cuda

    fake_cuda.install()
    rank, size = joined()
    fake_cuda.set_device(rank)
    return fake_cuda, rank, size


def fake_run(world, function, size=2):
    import fake_cuda

    env = {name: fake_cuda.library for name in ("RESILIENT_NCCL_LIBRARY", "RESILIENT_CUDA_RUNTIME")}
    return world.run(function, size, env=env)


def stream_goes_on():
    """wait() does not wait for the device, and what follows in the stream does."""
    cuda, rank, size = faked()
    tensor = cuda.tensor(values(rank, 1000), device=rank)
    copy = cuda.tensor(torch.zeros(1000), device=rank)
    with cuda.hold() as held:  # Nobody's all_reduce can begin.
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed()
        cuda.copy(copy, tensor)  # Behind it, in the same stream.
        held.release()
    cuda.synchronize()
    same(cuda.host(copy), sum(values(other, 1000) for other in range(size)))
    work.get_future().wait()
    assert work.is_completed()
    with cuda.stream():  # Another stream: the operation begins behind what is in that one.
        dist.all_reduce(tensor)
    dist.barrier()  # On the device by now; waits for it.
    dist.destroy_process_group()


@NEEDS_FAKE
def test_the_stream_goes_on_behind_an_operation(world):
    fake_run(world, stream_goes_on)


def refusals():
    cuda, rank, _ = faked()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    here = cuda.tensor(torch.ones(4), device=rank)
    other = cuda.tensor(torch.ones(8), device=rank + 1)
    with pytest.raises(RuntimeError, match=f"not on cuda:{rank} and cpu"):
        backend._allgather_base(torch.ones(8), here, dist.AllgatherOptions())
    with pytest.raises(RuntimeError, match=f"not on cuda:{rank} and cuda:{rank + 1}"):
        backend._allgather_base(other, here, dist.AllgatherOptions())
    with pytest.raises(RuntimeError, match="UNIMPLEMENTED"):
        dist.recv(here)
    dist.all_reduce(here)
    dist.destroy_process_group()


@NEEDS_FAKE
def test_tensors_of_two_devices_are_refused(world):
    fake_run(world, refusals)


def not_contiguous():
    """The result is there when wait() returns."""
    cuda, rank, size = faked()
    tensor = cuda.tensor(torch.zeros(10, 2), device=rank)[:, 0]
    tensor.copy_(cuda.tensor(values(rank, 10), device=rank))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    same(cuda.host(tensor.contiguous()), sum(values(other, 10) for other in range(size)))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_results_are_put_in_place(world):
    fake_run(world, not_contiguous)


def batches():
    cuda, rank, _ = faked()
    peer = 1 - rank
    for count in (5, 70_000):
        received = cuda.tensor(torch.zeros(count), device=rank)
        sent = cuda.tensor(values(rank, count), device=rank)
        # Send first on both: one after the other they would wait for each other.
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        cuda.synchronize()
        same(cuda.host(received), values(peer, count), count)
    manager = dist.distributed_c10d._coalescing_manager
    with manager(device=sent.device, async_ops=True) as batch:
        first = dist.isend(sent, peer)
        with pytest.raises(RuntimeError, match="in a batch that has not ended"):
            first.wait()
        second = dist.irecv(received, peer)
    batch.wait()
    first.wait()
    second.wait(SOON)
    assert first.is_success() and second.is_success()
    same(cuda.host(received), values(peer, count))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_messages_of_a_batch_are_submitted_together(world):
    fake_run(world, batches)


def barriers():
    cuda, rank, size = faked()
    dist.barrier()  # The host's: no device is in use.
    tensor = cuda.tensor(torch.ones(3), device=rank)
    dist.all_reduce(tensor)
    dist.barrier()
    same(cuda.host(tensor), torch.full((3,), float(size)))
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_barrier_waits_for_the_device(world):
    fake_run(world, barriers)
