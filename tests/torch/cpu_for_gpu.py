"""Lets code that was written for one GPU a process run on the CPU.

Devices that are named in calls to torch become the CPU, and DDP is not told of any. For tests whose
subject is not the device.
"""

import torch
from torch.nn import parallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_device(value):
    return type(value) is int or (
        isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    )


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if _is_device(kwargs.get("device")):
            kwargs["device"] = CPU
        if function is torch.Tensor.to and len(args) > 1 and _is_device(args[1]):
            args = (args[0], CPU, *args[2:])
        return function(*args, **kwargs)


class _Ddp(parallel.DistributedDataParallel):
    def __init__(self, module, device_ids=None, output_device=None, **kwargs):
        super().__init__(module, **kwargs)


def install(module, gpus):
    """In this process, for good; `module` is the one whose DistributedDataParallel is meant."""
    _OnCpu().__enter__()
    torch.nn.Module.cuda = lambda self, device=None: self
    plain_to = torch.nn.Module.to

    def to(self, *args, **kwargs):
        args = tuple(CPU if _is_device(value) else value for value in args)
        return plain_to(self, *args, **kwargs)

    torch.nn.Module.to = to
    torch.cuda.set_device = torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda.is_available = lambda: False  # By NVML it is what device_count says.
    torch.nn.parallel.DistributedDataParallel = module.DistributedDataParallel = _Ddp
