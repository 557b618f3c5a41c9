"""Tensors for tests of collectives: other values on every rank, exact in every type."""

import torch
import torch.distributed as dist

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SMALL_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]


def values(rank, count, dtype=torch.float32, limit=3):
    """Whole numbers below `limit`."""
    numbers = (torch.arange(count) * (rank + 1) + rank) % limit
    if dtype == torch.bool:
        return numbers.remainder(2).bool()
    if dtype in COMPLEX:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.double().to(dtype)


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(ours, expected, what=""):
    """Equal to the bit, also in types that torch itself cannot compare."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, what
    assert torch.equal(bits(ours), bits(expected)), (
        f"{what}: {ours.reshape(-1)[:8]} is not {expected.reshape(-1)[:8]}"
    )


def joined():
    """(rank, world size) after init."""
    dist.init_process_group("resilient")
    return dist.get_rank(), dist.get_world_size()
