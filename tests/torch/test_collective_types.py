"""Every element type with every operator, against the same in wide numbers."""

import functools

import pytest
import torch
import torch.distributed as dist
from tensors import COMPLEX, FLOATS, SMALL_FLOATS, UNSIGNED, WHOLE, joined, same, values

OPS = dist.ReduceOp
BITS = {
    OPS.BAND: torch.bitwise_and,
    OPS.BOR: torch.bitwise_or,
    OPS.BXOR: torch.bitwise_xor,
}
# Four ranks: a quarter of their sum is exact in all the floating point types.
SIZE = 4


def reference(op, dtype, count, factor=1):
    """In the widest type of its kind, then cut."""
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    if dtype in WHOLE + UNSIGNED or dtype == torch.bool:
        wide = torch.int64
    inputs = [values(rank, count, dtype).to(wide) for rank in range(SIZE)]
    if op in BITS:
        return functools.reduce(BITS[op], inputs).to(dtype)
    stacked = torch.stack(inputs)
    if op == OPS.SUM:
        result = stacked.sum(0)
    elif op == OPS.AVG:
        result = stacked.sum(0)
        result = result // SIZE if wide == torch.int64 else result / SIZE
    elif op == OPS.PRODUCT:
        result = stacked.prod(0)
    elif op == OPS.MIN:
        result = stacked.amin(0)
    elif op == OPS.MAX:
        result = stacked.amax(0)
    else:
        result = (stacked * factor).sum(0)
    return result.to(dtype)


def reduced(dtype, count, op):
    """By the group itself: torch.distributed turns complex numbers into pairs before."""
    tensor = values(dist.get_rank(), count, dtype)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    dist.group.WORLD.allreduce([tensor], options).wait()
    return tensor


def reductions(count):
    joined()
    ordered = [OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX]
    for dtype in WHOLE + UNSIGNED + FLOATS + SMALL_FLOATS:
        for op in ordered:
            same(reduced(dtype, count, op), reference(op, dtype, count), (dtype, op))
    for dtype in [*WHOLE, *UNSIGNED, torch.bool]:
        for op in BITS:
            same(reduced(dtype, count, op), reference(op, dtype, count), (dtype, op))
    for dtype in COMPLEX:
        for op in (OPS.SUM, OPS.AVG, OPS.PRODUCT):
            same(reduced(dtype, count, op), reference(op, dtype, count), (dtype, op))
    some = torch.stack([values(rank, count, torch.bool) for rank in range(SIZE)])
    for op in (OPS.SUM, OPS.MAX):
        same(reduced(torch.bool, count, op), some.any(0), op)
    for op in (OPS.PRODUCT, OPS.MIN):
        same(reduced(torch.bool, count, op), some.all(0), op)
    for dtype in FLOATS + COMPLEX:
        for factor in (0.5, torch.tensor([0.5])):
            op = dist._make_nccl_premul_sum(factor)
            same(reduced(dtype, count, op), reference(op, dtype, count, 0.5), (dtype, factor))
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [5, 4099])
def test_reductions(world, count):
    world.run(reductions, SIZE, count)


def movements():
    """Also of types that no reduction knows."""
    rank, size = joined()
    count = 67
    known = [*WHOLE, *UNSIGNED, *FLOATS, *SMALL_FLOATS, *COMPLEX, torch.bool]
    for dtype in [*known, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]:
        tensor = values(rank, count, dtype)
        dist.broadcast(tensor, src=size - 1)
        same(tensor, values(size - 1, count, dtype), ("broadcast", dtype))
        outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values(rank, count, dtype))
        for other, output in enumerate(outputs):
            same(output, values(other, count, dtype), ("all_gather", dtype))
        exchanged = torch.empty(2 * size, dtype=dtype)
        dist.all_to_all_single(exchanged, values(rank, 2 * size, dtype))
        parts = [values(other, 2 * size, dtype)[2 * rank : 2 * rank + 2] for other in range(size)]
        for other, part in enumerate(parts):
            same(exchanged[2 * other : 2 * other + 2], part, ("all_to_all", dtype))
        scattered = torch.empty(count, dtype=dtype)
        inputs = [values(other, count, dtype) for other in range(size)] if rank == 0 else None
        dist.scatter(scattered, inputs, src=0)
        same(scattered, values(rank, count, dtype), ("scatter", dtype))
    with pytest.raises(RuntimeError, match="moved but not reduced"):
        dist.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fnuz))
    dist.destroy_process_group()


def test_movements(world):
    world.run(movements, 3)


def complex_views():
    """Through torch.distributed, and as a lazily conjugated tensor."""
    rank, size = joined()
    tensor = values(rank, 9, torch.complex64)
    dist.all_reduce(tensor)
    same(tensor, sum(values(other, 9, torch.complex64) for other in range(size)), "sum")
    plain = values(rank, 9, torch.complex64)
    # Past torch's dispatcher, which hands groups a copy.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.broadcast([plain.conj()], dist.BroadcastOptions()).wait()
    same(plain, values(0, 9, torch.complex64), "conjugated on both sides")
    dist.destroy_process_group()


def test_complex_numbers(world):
    world.run(complex_views, 2)
