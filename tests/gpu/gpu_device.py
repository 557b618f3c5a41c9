"""The device of the tests in this folder: one real GPU that all ranks share, or the fake one.

Which of the two the variable GPU_TESTS says, "real" or "fake"; run.sh sets it. On the fake these
tests show that they themselves are right, and nothing of NCCL or of a GPU.
"""

import atexit
import ctypes
import importlib.metadata
import os
import re
import signal
import sys
import types
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))

import fake_device
import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
FAKE = os.environ.get("GPU_TESTS") == "fake"
DEVICE = torch.device("cuda", 0)
CYCLES = 2_000_000_000  # A second has no more of a GPU's.
TIMEOUT = timedelta(seconds=60)  # Of init: a rank makes its context on the GPU meanwhile.

# NCCL takes two ranks on a GPU where it believes them on two hosts, as NCCL_HOSTID says. They talk
# over sockets then, with little memory that is pinned; LL is slow where ranks take turns.
SHARED = {
    "RESILIENT_ALLOW_SHARED_GPU": "nccl",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_TUNER_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_PROTO": "Simple",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
# What a process needs to find the driver and the libraries, beyond what the harness hands on.
HANDED_ON = ("CUDA_", "NVIDIA_", "LD_", "GPU_TESTS", "PYTORCH_", "NCCL_DEBUG")


def environment(rank, shared=True):
    """Of one rank, beyond what a launcher sets."""
    found = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
    if shared:
        found |= {**SHARED, "NCCL_HOSTID": f"rank{rank}"}
    if FAKE:
        path = str(fake_device.LIBRARY)
        found |= {"RESILIENT_NCCL_LIBRARY": path, "RESILIENT_CUDA_RUNTIME": path}
    return found


def refusal():
    """Why the tests cannot run here; None when they can. Makes no context on a GPU."""
    mode = os.environ.get("GPU_TESTS")
    if FAKE:
        return fake_device.refusal()
    if mode != "real":
        return "they are run by tests/gpu/run.sh, or with GPU_TESTS=real or fake"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None


def facts():
    """What a result is of. In a process of its own: it makes a context."""
    found = {"torch": torch.__version__, "python": sys.version.split()[0]}
    found["resilient"] = importlib.metadata.version("torch-resilient")
    if FAKE:
        return found | {"gpu": "fake"}
    version = torch.cuda.nccl.version()
    return found | {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "nccl": ".".join(map(str, version)) if isinstance(version, tuple) else str(version),
    }


def _driver():
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"\d+\.[\d.]+", file.readline())
            return found.group() if found else "unknown"
    except OSError:
        return "unknown"


def load():
    """In a rank: makes the device the current one. The fake takes the place of torch's for good."""
    # A rank whose test was killed by its time limit would keep the GPU busy for all that follow.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if FAKE:
        fake_device.load()
        state = torch.zeros(1)  # It has no generators.
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.cuda.get_rng_state = lambda device=None: state
        torch.cuda.set_rng_state = lambda state, device=None: None
        torch.cuda.get_rng_state_all = lambda: [state]
        torch.cuda.set_rng_state_all = lambda states: None
        properties = types.SimpleNamespace(name="fake", uuid="fake-0", major=8, minor=0)
        torch.cuda.get_device_properties = lambda device=None: properties
        torch.cuda.device_count = torch._C._cuda_getDeviceCount = lambda: 1
    torch.cuda.set_device(DEVICE)


def hang(seconds):
    """In a rank: a kernel on the current stream that lasts so long, and the end of the process with
    it; on the fake one that never ends."""
    if not FAKE:
        torch.cuda._sleep(int(seconds * CYCLES))
        return
    import fake_cuda

    fake_cuda.hold()
    fake_cuda.change("hang_abort=1")
    atexit.register(fake_cuda.synchronize)  # As the driver does.


class Graph:
    """In a rank: what `function` puts on the device, to be replayed."""

    def __init__(self, function):
        if FAKE:
            import fake_cuda

            self._stream = fake_cuda.new_stream(DEVICE.index)
            self._graph = fake_cuda.Graph(self._stream)
            with self._graph:
                function()
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                function()

    def replay(self):
        self._graph.replay()


def joined():
    """In a rank: (rank, world size) after init."""
    load()
    dist.init_process_group("resilient", timeout=TIMEOUT)
    return dist.get_rank(), dist.get_world_size()
