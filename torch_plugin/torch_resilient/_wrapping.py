"""Functions of torch.distributed with ours around them. Imported with torch: it imports nothing."""

import sys

WRAPPED = "_resilient_wrapped"  # An attribute of those that are.


def replace(name, wrapper):
    """Puts the wrapper wherever torch.distributed has already bound the original."""
    original = wrapper.__wrapped__
    for module_name in (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
        "torch.distributed.rendezvous",
        "torch.distributed.device_mesh",
    ):
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, name, None) is original:
            setattr(module, name, wrapper)
