"""Which GPU this rank uses, as far as that is known when it joins; CUDA is asked only where the
program uses it already, and never started."""

import torch

from torch_resilient import _names
from torch_resilient._say import say

_VISIBLE_DEVICES_MAX = 200  # Characters: the store takes no claim without a limit.


def claim_of(native, settings, rank, device_id, environment):
    """What this rank says of its GPU. Without a uuid it is not known, and nothing is claimed."""
    fakes = settings["fake_devices"]
    if rank < len(fakes):
        claim = fakes[rank]
        local_rank = _names.number(environment.get("LOCAL_RANK"))
        claim.local_rank = -1 if local_rank is None or local_rank < 0 else local_rank
        claim.visible_devices = environment.get("CUDA_VISIBLE_DEVICES", "")
    elif fakes:
        claim = native.DeviceClaim()
    else:
        ordinal = _ordinal(device_id)
        claim = native.find_device(ordinal, dict(environment))
        if ordinal >= 0 and torch.cuda.is_initialized():
            _ask_cuda(claim)
    if len(claim.visible_devices) > _VISIBLE_DEVICES_MAX:
        claim.visible_devices = claim.visible_devices[:_VISIBLE_DEVICES_MAX] + "..."
    return claim


def warn_of_crowd(world):
    """One line on the first rank of a host that has more ranks than GPUs, where no rank says which
    of them it uses. With CUDA_VISIBLE_DEVICES each may have some of its own: then nobody knows."""
    device = world.device
    if device.uuid or device.visible < 1 or device.visible_devices:
        return
    if world.settings["allow_shared_gpu"]:
        return
    members = world.session.membership()["members"]
    host = members[world.rank]["host"]
    ranks = [member["rank"] for member in members if member["host"] == host]
    if len(ranks) <= device.visible or ranks[0] != world.rank:
        return
    gpus = f"{device.visible} GPU" + ("s" if device.visible > 1 else "")
    say(
        f"[resilient] warning: host {host} has {len(ranks)} ranks and {gpus}: should they use"
        f" CUDA, start no more than {device.visible} there (torchrun --nproc_per_node="
        f"{device.visible}); pass device_id= to init_process_group to have that checked"
    )


def bound_ordinal(device_id):
    """N of the cuda:N that the program has bound this rank to; -1: to none that is there."""
    return -1 if device_id is None or not torch.cuda.is_available() else _ordinal(device_id)


def _ordinal(device_id):
    """N of the cuda:N that this rank uses; -1: not known."""
    if torch.version.hip:
        return -1
    if isinstance(device_id, int):
        return device_id
    if device_id is not None:
        return device_id.index if device_id.type == "cuda" and device_id.index is not None else -1
    if not torch.cuda.is_initialized():
        return -1
    # To have asked CUDA something is no use of device 0, which is current in every process that has
    # not chosen: memory on a device is, and so is to have chosen another.
    try:
        used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i) > 0]
    except RuntimeError:  # An allocator that does not count.
        return -1
    if used:
        return used[0] if len(used) == 1 else -1
    return torch.cuda.current_device() or -1


def _ask_cuda(claim):
    """CUDA's own word, which counts more than what the environment says now. It tells no instances
    of a split GPU apart."""
    claim.visible = torch.cuda.device_count()
    if claim.ordinal >= claim.visible:
        return  # Torch has its own word for that.
    properties = torch.cuda.get_device_properties(claim.ordinal)
    if "MIG" not in properties.name and getattr(properties, "uuid", None):
        claim.uuid = f"GPU-{properties.uuid}"
