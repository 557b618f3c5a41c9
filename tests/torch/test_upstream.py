"""torch's own tests of collectives and DDP, with our backend; upstream_cases.py runs them.

What does not pass is listed here with its reason. A case that newly fails, newly passes or is newly
skipped fails our test. Of the 127 cases that ask for no GPU 126 pass, three of them with torch's
meaning of time-outs; Gloo, run in the same way, passes 123.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("upstream_cases.py")
CASES = 285
PASSED = 123
PASSED_ON_CPU = 79  # Of those that ask for GPUs.

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.15."), reason="the lists are those of torch 2.15"
)

# They want a late rank to be an error; without "strict" one that lives is waited for.
STRICT_TIMEOUTS = {
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_barrier_timeout_group",
}

# {case: (reason, what its failure says)}
EXPECTED_FAILURES = {
    "test_ddp_logging_data_cpu": (
        "DDP's log has the names of torch's own backends, and calls every other one custom",
        r"'custom' != 'resilient'",
    ),
}

# (reason, what torch says, cases). None is skipped for what our backend is.
SKIPPED = [
    (
        "they need two GPUs or more, most through NCCL",
        r"accelerator|Nccl|NCCL|nccl",
        """
        test_DistributedDataParallel_SyncBatchNorm
        test_DistributedDataParallel_SyncBatchNorm_2D_Input
        test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        test_DistributedDataParallel_SyncBatchNorm_half test_all_gather_cuda
        test_all_gather_cuda_complex test_all_gather_into_cat_tensor_cuda
        test_all_gather_into_stack_tensor_cuda test_all_gather_v_cuda test_all_to_all_cuda
        test_all_to_all_cuda_complex test_all_to_all_full_group_cuda test_all_to_all_group_cuda
        test_all_to_all_single_equal_split_cuda test_all_to_all_single_equal_split_cuda_complex
        test_all_to_all_single_equal_split_full_group_cuda
        test_all_to_all_single_equal_split_group_cuda test_all_to_all_single_unequal_split_cuda
        test_all_to_all_single_unequal_split_cuda_complex
        test_all_to_all_single_unequal_split_full_group_cuda
        test_all_to_all_single_unequal_split_group_cuda test_average_parameters
        test_batch_isend_irecv_mixed_backend_err test_batch_isend_irecv_nccl
        test_batch_isend_irecv_no_rank_zero_nccl test_batch_isend_irecv_op_err
        test_batch_isend_irecv_op_list_err test_batch_isend_irecv_ring_exchange_nccl
        test_batch_isend_irecv_self_nccl test_coalescing_manager test_coalescing_manager_async
        test_ddp_apply_optim_in_backward
        test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
        test_ddp_apply_optim_in_backward_ignored_params test_ddp_compile_static_graph
        test_ddp_device test_ddp_inference test_ddp_logging_data_gpu
        test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
        test_ddp_native_mixed_precision_ignored_params
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
        test_ddp_uneven_inputs_stop_iteration_sync_bn test_gather_cuda
        test_monitored_barrier_allreduce_hang
        test_monitored_barrier_allreduce_hang_wait_all_ranks test_nccl_backend_bool_allgather
        test_nccl_backend_bool_allreduce test_nccl_backend_bool_broadcast
        test_nccl_backend_bool_reduce test_nccl_high_priority_stream
        test_reduce_scatter_tensor_cuda test_reduce_scatter_v_cuda test_reduce_sum_cuda
        test_reduce_sum_cuda_twice test_scatter_cuda test_scatter_cuda_complex
        test_send_recv_nccl test_send_recv_nccl_autograd_profiler
        test_send_recv_nccl_torch_profiler test_sync_bn_logged
        """,
    ),
    (
        "torch has switched them off",
        r"github.com/pytorch",
        """
        test_DistributedDataParallel test_DistributedDataParallel_non_default_stream
        test_barrier_timeout_arg test_broadcast_object_list
        test_compute_bucket_assignment_by_size_sparse_error_with_logger test_ddp_has_finalized
        test_ddp_model_diff_shape_across_ranks test_ddp_profiling_autograd_profiler
        test_ddp_profiling_execution_trace test_ddp_sync_bn_training_vs_eval test_new_subgroups
        test_new_subgroups_by_enumeration
        """,
    ),
    (
        "it needs torchvision, which nothing else here does",
        r"torchvision",
        """
        test_SyncBatchNorm_process_group
        """,
    ),
]

SKIPPED_CASES = {name: words for _, words, names in SKIPPED for name in names.split()}


def run(store, tmp_path, *arguments, **settings):
    """What the program printed and {case: (outcome, why)}."""
    out = tmp_path / "outcomes.json"
    environment = {**os.environ, "RESILIENT_STORE": store, "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "4", "KINETO_LOG_LEVEL": "99", **settings}
    result = subprocess.run(
        [sys.executable, PROGRAM, "--out", out, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    outcomes = json.loads(out.read_text()) if out.exists() else {}
    return result.stdout, {name: (found[0], found[1]) for name, found in outcomes.items()}


def expected(name):
    """The outcome of the case, and a pattern of what is said about it."""
    if name in SKIPPED_CASES:
        return "skipped", SKIPPED_CASES[name]
    if name in EXPECTED_FAILURES:
        return "failed", EXPECTED_FAILURES[name][1]
    return "passed", ""


def differences(found):
    """Lines on what is not as the lists say."""
    lines = []
    for name, (outcome, why) in found.items():
        wanted, words = expected(name)
        if outcome != wanted or not re.search(words, why):
            lines.append(f"{name}: {outcome}, expected: {wanted} {words}\n{why[-3000:]}")
    return "\n".join(lines)


@pytest.fixture
def cases(store, tmp_path):
    """{name: class} of all that this torch has."""
    lines = run(store, tmp_path, "--list")[0].splitlines()
    cases = {name: kind for kind, name in map(str.split, lines)}
    assert len(cases) == CASES
    assert set(SKIPPED_CASES) | set(EXPECTED_FAILURES) | STRICT_TIMEOUTS <= set(cases)
    return cases


def expected_to_pass(cases, on_cpu):
    """Those that ask for GPUs and run on the CPU, or the others."""
    passing = [name for name in cases if expected(name)[0] == "passed"]
    chosen = [name for name in passing if (cases[name] == "OnCpu") == on_cpu]
    return [name for name in chosen if name not in STRICT_TIMEOUTS]


def check(store, tmp_path, wanted, passed, **settings):
    """Runs the cases; so many pass."""
    _, found = run(store, tmp_path, *wanted, **settings)
    assert list(found) == wanted
    assert not differences(found), differences(found)
    assert sum(outcome == "passed" for outcome, _ in found.values()) == passed


@pytest.mark.slow
def test_what_passes(cases, store, tmp_path):
    check(store, tmp_path, expected_to_pass(cases, on_cpu=False), PASSED)


@pytest.mark.slow
def test_what_passes_with_strict_timeouts(cases, store, tmp_path):
    wanted = sorted(STRICT_TIMEOUTS)
    check(store, tmp_path, wanted, len(wanted), RESILIENT_TIMEOUT_POLICY="strict")


@pytest.mark.slow
def test_what_passes_with_the_cpu_for_gpus(cases, store, tmp_path):
    check(store, tmp_path, expected_to_pass(cases, on_cpu=True), PASSED_ON_CPU)


@pytest.mark.slow
def test_what_does_not_pass(cases, store, tmp_path):
    wanted = [name for name in cases if expected(name)[0] != "passed"]
    check(store, tmp_path, wanted, 0)
    assert len(wanted) == CASES - PASSED - PASSED_ON_CPU - len(STRICT_TIMEOUTS)
