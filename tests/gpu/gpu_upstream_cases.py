"""Runs a part of torch's own tests of collectives on CUDA tensors, all ranks on one GPU.

    PYTHONPATH=tests/gpu:tests/torch GPU_TESTS=real python -c \\
        "import gpu_upstream_cases; gpu_upstream_cases.main()" --out FILE [CASE ...]

As tests/torch/upstream_cases.py, which leaves out what needs NCCL. The module is loaded as it is
where the backend is called "nccl", and told that each rank has a GPU, which is the same for all.
Cases that name the GPU of their rank by its number are left out.
"""

import argparse
import json
import multiprocessing
import os

os.environ.setdefault("WORLD_SIZE", "2")

import gpu_device
import torch

# What torch loads for its tests asks CUDA how many devices there are, and who has done that has
# none in the processes that are forked from it.
_ASKED = {
    (torch.cuda, "is_available"): lambda: False,
    (torch.cuda, "device_count"): lambda: 0,
    (torch.accelerator, "is_available"): lambda: False,
    (torch.accelerator, "device_count"): lambda: 0,
    (torch.accelerator, "current_accelerator"): lambda check_available=False: None,
}
_real = {place: getattr(*place) for place in _ASKED}
for (_module, _name), _answer in _ASKED.items():
    setattr(_module, _name, _answer)

import upstream_cases  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

CASES = (
    "test_all_gather_cuda",
    "test_all_gather_cuda_complex",
    "test_all_gather_into_cat_tensor_cuda",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_gather_v_cuda",
    "test_all_reduce_sum_cuda",
    "test_all_reduce_sum_cuda_async",
    "test_all_reduce_sum_cuda_complex",
    "test_all_to_all_cuda",
    "test_all_to_all_cuda_complex",
    "test_all_to_all_single_equal_split_cuda",
    "test_all_to_all_single_unequal_split_cuda",
    "test_broadcast_cuda",
    "test_coalescing_manager",
    "test_coalescing_manager_async",
    "test_gather_cuda",
    "test_reduce_scatter_tensor_cuda",
    "test_reduce_scatter_v_cuda",
    "test_reduce_sum_cuda",
    "test_reduce_sum_cuda_twice",
    "test_scatter_cuda",
    "test_scatter_cuda_complex",
    "test_send_recv_nccl",
    "test_batch_isend_irecv_nccl",
    "test_batch_isend_irecv_ring_exchange_nccl",
    "test_batch_isend_irecv_self_nccl",
)

for _name in ("skip_if_no_gpu", "skip_if_small_worldsize"):
    setattr(common_distributed, _name, lambda case: case)
common_distributed.skip_if_lt_x_gpu = lambda count, **_: lambda case: case
_cases = upstream_cases._load("nccl", "_on_gpu")
_cases.init_multigpu_helper = lambda size, backend: {
    rank: [gpu_device.DEVICE.index] for rank in range(int(size))
}
for (_module, _name), _answer in _real.items():
    setattr(_module, _name, _answer)


class OnGpu(
    upstream_cases._ForkedRanks,
    _cases.TestDistBackend,
    _cases.DistributedTest._DistTestBase,
):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, environment, **kwargs):
        os.environ.update(gpu_device.environment(rank))
        gpu_device.load()
        count = int(os.environ["WORLD_SIZE"])
        torch.cuda.device_count = torch.accelerator.device_count = lambda: count
        set_device = torch.cuda.set_device  # Some make the device of their rank's number current.
        torch.cuda.set_device = lambda device: set_device(gpu_device.DEVICE)
        _cases.INIT_METHOD = environment["INIT_METHOD"]
        super()._run(rank, test_name, file_name, pipe, environment=environment, **kwargs)


def _has_device():
    gpu_device.load()
    torch.ones(1, device=gpu_device.DEVICE).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="file for the outcomes")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    multiprocessing.set_forkserver_preload(["gpu_upstream_cases"])
    probe = multiprocessing.get_context("forkserver").Process(target=_has_device)
    probe.start()
    probe.join(60)
    if probe.exitcode != 0:  # It has asked CUDA all the same; this takes longer.
        upstream_cases.START = "spawn"
    outcomes = upstream_cases._Outcomes()
    for name in args.cases:
        OnGpu(name).run(outcomes)
    with open(args.out, "w") as file:
        json.dump(outcomes.found, file, indent=1)
