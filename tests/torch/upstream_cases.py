"""Runs torch's own tests of collectives and DDP, which its wheel carries, with our backend.

    python upstream_cases.py [--list] [--out FILE] [CASE ...]

runs the cases (default: all), each in WORLD_SIZE processes, and writes {case: [outcome, why,
seconds]} as JSON; "passed", "failed" or "skipped". test_upstream.py says what is to be expected.

Many cases are decorated with the names of the backends that torch has them for ("Only MPI
supports all_to_all"), and no other name passes. So the module is loaded once under the name "gloo"
and once under "mpi", and only then told the real name: each case comes from the first of the two
that would run it. It is loaded once more, under "gloo", for the cases that ask for a GPU a rank
without need: their tensors are on the CPU.

torch starts new interpreters for each case; here the processes are forked from a server that has
imported torch once, which takes a tenth of the time.
"""

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
import unittest

if __name__ == "__main__":
    # As a module of its own name, which the fork server loads once and its children find there: a
    # child loads a program anew, and the fork server knows the path only from the environment.
    _paths = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
    _code = "import upstream_cases; upstream_cases.main()"
    os.execv(sys.executable, [sys.executable, "-c", _code, *sys.argv[1:]])

os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
BACKEND = os.environ.get("BACKEND", "resilient")
START = "forkserver"  # How the processes of a case start.

import cpu_for_gpu  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

for _feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[_feature].add(BACKEND)
common_distributed.TIMEOUT_OVERRIDE["test_ddp_uneven_inputs"] = 180
# It asks for a world of eight; what it decorates uses the ranks 1 and 2.
common_distributed.skip_if_small_worldsize = lambda case: case

# SyncBatchNorm, streams of their own, a group of NCCL, torch.compile; or the device is the subject.
NEEDS_GPUS = {
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_average_parameters",
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_compile_static_graph",
    "test_ddp_device",
    "test_ddp_inference",
    "test_ddp_logging_data_gpu",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_monitored_barrier_allreduce_hang",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks",
    "test_sync_bn_logged",
}

_numbers = itertools.count(1)


def _load(name, kind=""):
    """torch's module, as it is imported where the backend is called `name`."""
    module_name = f"distributed_test_as_{name}{kind}"
    if module_name in sys.modules:  # In a process of a case this file is imported twice.
        return sys.modules[module_name]
    os.environ.update(BACKEND=name, INIT_METHOD="file://")
    origin = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test").origin
    spec = importlib.util.spec_from_file_location(module_name, origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    os.environ["BACKEND"] = module.BACKEND = BACKEND
    return module


class _ForkedRanks:
    """What differs from torch's own runs: how the processes of a case start, and that all of them
    have to end well, not only the first."""

    def setUp(self):
        super().setUp()
        # Our server's environment is the one in which it was started.
        environment = {
            "TEMP_DIR": os.environ["TEMP_DIR"],
            "INIT_METHOD": os.environ["INIT_METHOD"],
            "RESILIENT_JOB": f"upstream-{os.getpid()}-{next(_numbers)}",
        }
        forked = multiprocessing.get_context(START).Process

        def start(kwargs, **more):
            return forked(kwargs=kwargs | {"environment": environment}, **more)

        self._start_processes(start)

    def tearDown(self):
        started = self.processes
        super().tearDown()
        for process in started:
            process.join()
        if os.path.exists(self.file_name):
            os.unlink(self.file_name)

    def _check_return_codes(self, fn, elapsed_time):
        super()._check_return_codes(fn, elapsed_time)
        self.assertEqual({process.exitcode for process in self.processes}, {0})

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, environment, **kwargs):
        os.environ.update(environment)
        for module in (_as_gloo, _as_mpi, _on_cpu):
            module.INIT_METHOD = environment["INIT_METHOD"]
        super()._run(rank, test_name, file_name, pipe, **kwargs)

    def run_test(self, test_name, pipe):
        # These choose between CPU and GPU by the name; the process group is made already.
        if test_name.startswith("test_accumulate_gradients_no_sync"):
            _as_gloo.BACKEND = "gloo"
        super().run_test(test_name, pipe)


_as_gloo = _load("gloo")
_as_mpi = _load("mpi")


def _wants_gpus(case):
    case.wants_gpus = True
    return case


common_distributed.skip_if_no_gpu = _wants_gpus
common_distributed.skip_if_lt_x_gpu = lambda count, **_: _wants_gpus
_on_cpu = _load("gloo", "_on_cpu")


class AsGloo(_ForkedRanks, _as_gloo.TestDistBackend, _as_gloo.DistributedTest._DistTestBase):
    pass


class AsMpi(_ForkedRanks, _as_mpi.TestDistBackend, _as_mpi.DistributedTest._DistTestBase):
    pass


class OnCpu(_ForkedRanks, _on_cpu.TestDistBackend, _on_cpu.DistributedTest._DistTestBase):
    def run_test(self, test_name, pipe):
        cpu_for_gpu.install(_on_cpu, int(self.world_size))
        super().run_test(test_name, pipe)


def _is_skipped(cases, name):
    return getattr(getattr(cases, name), "__unittest_skip__", False)


def all_cases():
    """{name: class}"""
    names = unittest.defaultTestLoader.getTestCaseNames(AsGloo)
    found = {}
    for name in names:
        found[name] = AsGloo
        if _is_skipped(AsGloo, name) and not _is_skipped(AsMpi, name):
            found[name] = AsMpi
        elif getattr(getattr(OnCpu, name), "wants_gpus", False) and name not in NEEDS_GPUS:
            found[name] = OnCpu
    return found


class _Outcomes(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.found = {}

    def startTest(self, test):
        super().startTest(test)
        self._began = time.monotonic()

    def addSuccess(self, test):
        self._add(test, "passed", "")

    def addSkip(self, test, reason):
        self._add(test, "skipped", reason)

    def addError(self, test, error):
        self._add(test, "failed", "".join(traceback.format_exception(*error)))

    addFailure = addError

    def _add(self, test, outcome, why):
        seconds = round(time.monotonic() - self._began, 2)
        self.found[test._testMethodName] = [outcome, why, seconds]
        print(f"{outcome:8} {seconds:6.2f} s {test._testMethodName}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only print classes and names")
    parser.add_argument("--out", help="file for the outcomes")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    known = all_cases()
    if args.list:
        print("\n".join(f"{cases.__name__} {name}" for name, cases in known.items()))
        return
    multiprocessing.set_forkserver_preload(["upstream_cases"])
    outcomes = _Outcomes()
    for name in args.cases or known:
        known[name](name).run(outcomes)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(outcomes.found, file, indent=1)
