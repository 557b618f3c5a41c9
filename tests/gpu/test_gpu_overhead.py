"""What a call costs on a communicator of one rank, beside torch's own ProcessGroupNCCL.

Both groups are called in turn in one process, for each size: the time until the call has returned
(the operation is in the device's queue), and until the device has ended it.
"""

import gc
import statistics
import time

import gpu_device
import torch
import torch.distributed as dist
from gpu_device import DEVICE, joined

SIZES = (8, 64 << 10, 1 << 20)  # Bytes.
PAIRS = 300 if gpu_device.FAKE else 2000
WARM = 50


def call(backend, tensor):
    """(seconds until it returned, until the device was done)"""
    torch.cuda.synchronize()
    began = time.perf_counter()
    backend.allreduce([tensor]).wait()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return returned - began, time.perf_counter() - began


def summary(seconds):
    """In microseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(1e6 * cuts[49], 2), "p99": round(1e6 * cuts[98], 2)}


def measure():
    joined()
    groups = {"resilient": dist.group.WORLD._get_backend(DEVICE)}
    if not gpu_device.FAKE:
        groups["nccl"] = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1)
    results = {}
    gc.disable()
    for size in SIZES:
        tensor = torch.ones(size // 4, device=DEVICE)
        times = {name: [] for name in groups}
        for number in range(WARM + PAIRS):
            order = list(groups) if number % 2 == 0 else list(groups)[::-1]
            for name in order:
                measured = call(groups[name], tensor)
                if number >= WARM:
                    times[name].append(measured)
        assert tensor[0].item() == 1  # The sum over one rank.
        results[size] = {
            name: {
                "returned us": summary([returned for returned, _ in found]),
                "done us": summary([done for _, done in found]),
            }
            for name, found in times.items()
        }
    if "nccl" in groups:
        groups["nccl"].shutdown()
    dist.destroy_process_group()
    return results


def test_what_a_call_costs(world, figures):
    world.shared = False  # Nobody else is on the GPU: NCCL as it is.
    (results,) = world.run(measure, 1, seconds=35)
    for size, found in results.items():
        figures(f"all_reduce of {size} bytes, one rank", found)
        assert all(cost["done us"]["p50"] > 0 for cost in found.values())
