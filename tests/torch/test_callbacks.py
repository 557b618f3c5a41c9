"""Callbacks of futures: their order, and the collectives that they start."""

import hashlib
import threading

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear
from tensors import joined
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_resilient


def summed(value, **options):
    return dist.all_reduce(torch.full((8,), float(value)), async_op=True, **options).get_future()


def late(rank):
    """Work that only this rank does: the others' futures have completed by then, or have not."""
    if dist.get_rank() == rank:
        torch.mm(torch.ones(700, 700), torch.ones(700, 700))


def two_steps(count):
    """Callbacks that reduce again, while the program goes on with reductions of the same shape."""
    _, size = joined()
    results = []

    def second(tag):
        return lambda future: summed(future.value()[0][0]).wait()[0][0].item() / tag

    for tag in range(1, count + 1):
        first = summed(tag)
        late(tag % size)
        results.append(first.then(second(tag)))
        results.append(summed(1000 * tag).then(lambda future, tag=tag: future.value()[0][0] / tag))
    factors = [float(result.wait()) for result in results]
    dist.destroy_process_group()
    return set(factors[::2]), set(factors[1::2])


@pytest.mark.parametrize("size", [2, 3])
def test_what_callbacks_start_is_matched_among_themselves(world, size):
    for twice, once in world.run(two_steps, size, 60):
        assert (twice, once) == ({size * size}, {1000.0 * size})


def order(count):
    joined()
    ran = []
    here = threading.get_ident()
    futures = [summed(number) for number in range(count)]
    futures[0].wait()
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ran.append(number))
        child = future.then(lambda _: threading.get_ident())
    last = child.then(lambda future: (future.wait(), threading.get_ident())).wait()
    dist.destroy_process_group()
    assert ran == list(range(count))
    assert here not in last  # Not within the call that has added it, whatever had completed.


def test_callbacks_run_in_the_order_in_which_they_were_added(world):
    world.run(order, 2, 200)


def outcomes():
    """What becomes of results, exceptions and failures is as with torch's own."""
    rank, size = joined()
    future = summed(1)
    child = future.then(lambda future: future.value()[0].sum().item())
    assert isinstance(child, torch.futures.Future)
    both = torch.futures.collect_all([future, child]).wait()
    assert both[1].value() == child.value() == 8 * size
    assert child.done()

    def fails(_):
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        summed(1).then(fails).then(lambda future: future.value()).wait()
    summed(1).add_done_callback(fails)
    assert summed(3).then(lambda future: future.value()[0][0].item()).wait() == 3 * size
    with torch.inference_mode():
        was = summed(1).then(lambda _: torch.is_inference_mode_enabled())
    assert was.wait()
    group = dist.new_group([0, 1])
    inside = summed(1).then(lambda _: summed(rank, group=group).wait()[0][0].item())
    assert inside.wait() == 1
    with dist._coalescing_manager(group=group, async_ops=True) as both:
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_reduce(torch.ones(3), group=group)
    both.wait()
    dist.destroy_process_group()


def test_results_and_exceptions(world):
    world.run(outcomes, 2)


def nested(depth):
    """A sum that is started in so many callbacks, one within the other."""
    if depth == 0:
        return summed(1).wait()[0][0].item()
    return summed(1).then(lambda _: nested(depth - 1)).wait()


def deep(depth):
    joined()
    try:
        total = nested(depth)
    except RuntimeError as error:
        total = str(error)
    dist.destroy_process_group()
    return total


def test_callbacks_of_callbacks(world):
    assert world.run(deep, 2, 8) == [2, 2]


def test_too_deep_is_an_error_on_all_ranks(world):
    for text in world.run(deep, 2, 9):
        assert "[resilient:FAILED_PRECONDITION]" in text and "nested in 8 others" in text


def powers():
    rank, _ = joined()
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Linear(96, 96, bias=False) for _ in range(6)])
    model = DistributedDataParallel(model, bucket_cap_mb=0.03)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(8):
        model(torch.randn(4, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def test_power_sgd_gives_all_ranks_the_same_model(world):
    one, other = world.run(powers, 2)
    assert one == other


def loses():
    rank, _ = joined()
    assert nested(1) == 3
    rebuilt = threading.Event()

    def starts(_):
        try:
            return hear() if rank == 2 else summed(1).wait()
        finally:
            rebuilt.wait(30)

    child = summed(1).then(starts)
    future = summed(1)
    future.wait()
    late = future.then(lambda _: summed(1).wait())
    outlive(2)
    hear()
    torch_resilient.rebuild()
    rebuilt.set()
    with pytest.raises(RuntimeError, match="RANK_LOST"):
        child.wait()
    with pytest.raises(RuntimeError, match="has been rebuilt since"):
        late.wait()
    return again()


def again():
    total = nested(1)
    dist.destroy_process_group()
    return total


def replaces():
    joined()
    return again()


def test_a_loss_ends_what_a_callback_waits_for_and_callbacks_begin_again(world):
    wait = {"RESILIENT_SEAT_WAIT": "30s"}
    ranks = world.start(loses, 3, env=wait)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[2].signal()
    newcomer = world.start_rank(replaces, 2, 3, env=wait)
    for rank in ranks[:2]:
        rank.say("go")
    assert [rank.value(30) for rank in (*ranks[:2], newcomer)] == [3, 3, 3]


def shrinks():
    joined()
    assert nested(1) == 3
    outlive(1)
    torch_resilient.rebuild(mode="shrink")
    return again()


def test_callbacks_follow_the_world_that_shrinks(world):
    ranks = world.start(shrinks, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert [ranks[rank].value(30) for rank in (0, 2)] == [2, 2]


def circle():
    """Each rank's callback waits for a message that the other one never sends."""
    rank, _ = joined()
    child = summed(1).then(lambda _: dist.recv(torch.zeros(1), src=1 - rank))
    with pytest.raises(RuntimeError, match="DEADLOCK"):
        child.wait()
    return torch_resilient.failure().code


def test_callbacks_that_all_wait_are_a_circle(world):
    assert world.run(circle, 2) == ["DEADLOCK"] * 2
