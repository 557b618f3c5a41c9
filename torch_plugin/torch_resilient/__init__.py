"""A process group and store for torch.distributed in which liveness decides, not the clock.

`torch.distributed.init_process_group("resilient")` needs no import of this package. What is here
is for programs that heal (`State`, `elastic`, `rebuild`, `agree`, `ElasticSampler`), for those that
look (`failure`, `membership`, `status`, `op_log`, `on_event`) or announce to be slow
(`expect_slow`), `join` for uneven batches, `NcclOptions` for groups with CUDA tensors, the
exceptions, and `ulfm`, four verbs after MPI's.

Everything is loaded when it is first used: `python -m torch_resilient.run` does not import torch.
"""

import importlib
import sys

__version__ = "0.1.0"

_HOMES = {
    "ElasticSampler": "_sampler",
    "NcclOptions": "_options",
    "State": "_state",
    "elastic": "_elastic",
    "Store": "_api",
    "agree": "_agree",
    "expect_slow": "_api",
    "failure": "_api",
    "join": "_join",
    "last_incident": "_api",
    "membership": "_api",
    "on_event": "_events",
    "op_log": "_api",
    "rebuild": "_api",
    "status": "_status",
    "ResilientError": "_errors",
    "RankLostError": "_errors",
    "FencedError": "_errors",
    "CommError": "_errors",
    "MismatchError": "_errors",
    "DeadlockError": "_errors",
    "StalledError": "_errors",
    "DeviceError": "_errors",
    "GrowthError": "_errors",
    "ConfigError": "_errors",
    "InvalidArgumentError": "_errors",
    "StoreError": "_errors",
    "JoinTimeoutError": "_errors",
    "StoreLostError": "_errors",
    "StoreTimeoutError": "_errors",
    "QueueEmptyError": "_errors",
    "ConnectError": "_errors",
}

_MODULES = ("ulfm",)

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


# With TORCH_DEVICE_BACKEND_AUTOLOAD=0 an explicit import takes the place of the entry point. While
# torch itself is being imported the entry point is still to come.
if hasattr(sys.modules.get("torch"), "distributed"):
    from torch_resilient import _autoload

    _autoload.autoload()
