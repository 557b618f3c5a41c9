"""Fifty aborts and rebuilds on a GPU leave no descriptors, threads or device memory behind."""

import gc
import itertools
import os

import gpu_device
import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, joined

import torch_resilient

REBUILDS = int(os.environ.get("GPU_REBUILDS", "50"))
WARM = 5  # What is made once is made by then.
FEW = 2  # Threads and descriptors that come and go.
SLACK_BYTES = 32 << 20


def used():
    gc.collect()
    found = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    if not gpu_device.FAKE:  # Of all processes together, which are all quiet now.
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info()
        found["device bytes"] = whole - free
    return found


def abort_and_rebuild(count):
    rank, size = joined()
    backend = dist.group.WORLD._get_backend(DEVICE)
    warm = None
    for number in range(count):
        tensor = torch.ones(5000, device=DEVICE)
        dist.all_reduce(tensor)
        dist.barrier()
        assert tensor[0].item() == size
        if number == WARM:
            warm = used()
        with pytest.raises(torch_resilient.CommError):
            for operation in itertools.count():  # The fence comes in some operation.
                dist.all_reduce(torch.ones(5000, device=DEVICE))
                if operation == 1 and rank == number % size:
                    backend.abort()  # The one before is in flight.
                dist.barrier()
        torch_resilient.rebuild()
    dist.all_reduce(torch.ones(5000, device=DEVICE))
    dist.barrier()
    end = used()
    dist.barrier()
    dist.destroy_process_group()
    return warm, end


def test_rebuilds_leave_nothing_behind(world, figures):
    outcomes = world.run(abort_and_rebuild, 2, REBUILDS, seconds=105)
    for rank, (warm, end) in enumerate(outcomes):
        figures(f"rank {rank}, {WARM} and {REBUILDS} rebuilds", [warm, end])
        for name, slack in (("descriptors", FEW), ("threads", FEW), ("device bytes", SLACK_BYTES)):
            assert end.get(name, 0) <= warm.get(name, 0) + slack, f"{name} of rank {rank}"
