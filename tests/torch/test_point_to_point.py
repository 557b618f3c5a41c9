"""Sends and receives, operations that are coalesced, the barrier that names who is missing."""

import itertools
import random
import threading
import time
from datetime import timedelta

import pytest
import rank_server
import torch
import torch.distributed as dist
from frameworks import join, same_as_gloo
from store_shell import until
from tensors import joined, same, values

import torch_resilient

SOON = timedelta(milliseconds=300)
LATER = timedelta(seconds=30)


def from_any():
    rank, size = joined()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            tensor = torch.empty(10, 2)[:, 0]  # Not contiguous: put in place before wait returns.
            source = dist.recv(tensor, tag=7)
            same(tensor, values(source, 10), source)
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
    else:
        dist.send(values(rank, 10), 0, tag=7)
    # In a group whose ranks are others than those of the world.
    pair = dist.new_group([1, 2])
    if rank == 1:
        tensor = torch.empty(3)
        assert dist.recv(tensor, group=pair) == 2
        same(tensor, values(2, 3))
    elif rank == 2:
        dist.send(values(2, 3), 1, group=pair)
    dist.destroy_process_group()


def test_recv_from_any_rank(world):
    world.run(from_any, 4)


def batches():
    rank, size = joined()
    before, after = (rank - 1) % size, (rank + 1) % size
    for count in (0, 5, 70_000):
        received = [torch.empty(count), torch.empty(count, dtype=torch.int64)]
        operations = [
            dist.P2POp(dist.irecv, received[0], before, tag=1),
            dist.P2POp(dist.isend, values(rank, count), after, tag=1),
            dist.P2POp(dist.irecv, received[1], before, tag=2),
            dist.P2POp(dist.isend, values(rank, count, torch.int64), after, tag=2),
        ]
        works = dist.batch_isend_irecv(operations)
        assert len(works) == 1
        works[0].wait()
        assert works[0].is_success()
        same(received[0], values(before, count), count)
        same(received[1], values(before, count, torch.int64), count)
    dist.destroy_process_group()


def test_a_batch_is_one_work(world):
    world.run(batches, 3)


def large_and_small(mebibytes):
    """A large message and two small ones, received in any order of their tags."""
    rank, _size = joined()
    counts = {1: mebibytes << 18, 2: 1, 3: 1000}
    for order in itertools.permutations(counts):
        if rank == 0:
            sent = [torch.full((count,), float(tag)) for tag, count in counts.items()]
            works = [
                dist.isend(tensor, 1, tag=tag) for tag, tensor in zip(counts, sent, strict=True)
            ]
            for work in works:
                work.wait()
        elif rank == 1:
            for tag in order:
                tensor = torch.empty(counts[tag])
                dist.recv(tensor, 0, tag=tag)
                assert bool((tensor == tag).all()), (order, tag)
    dist.barrier()
    dist.destroy_process_group()


LINKS = {
    "shm": {},
    "tcp": {"RESILIENT_SHM_LIMIT": "0"},
    "tcp, checksums": {"RESILIENT_SHM_LIMIT": "0", "RESILIENT_CHECKSUM": "1"},
    "replay": {"RESILIENT_REPLAY": "1"},
}
slow = pytest.mark.slow


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize(
    "mebibytes",
    [pytest.param(1, marks=slow), pytest.param(63, marks=slow), 65, pytest.param(100, marks=slow)],
)
def test_a_large_message_without_its_recv_holds_up_no_other(world, mebibytes, links):
    world.run(large_and_small, 2, mebibytes, env=LINKS[links])


def unordered(backend, meeting, seed, largest):
    """Messages of many sizes both ways, of which each rank receives in an order of its own."""
    rank, size = join(backend, meeting)
    generator = random.Random(seed)
    messages = []
    for tag in range(12):
        source = generator.randrange(size)
        target = (source + generator.randrange(1, size)) % size
        messages.append((source, target, tag, generator.choice([0, 1, 1000, largest])))
    works, received, kept = [], {}, []
    for source, target, tag, count in messages:
        if rank == source:
            kept.append(torch.arange(count, dtype=torch.int32) + tag)
            works.append(dist.isend(kept[-1], target, tag=tag))
    order = [message for message in messages if message[1] == rank]
    random.Random(seed * size + rank).shuffle(order)
    for source, _target, tag, count in order:
        received[f"message {tag}"] = tensor = torch.empty(count, dtype=torch.int32)
        dist.recv(tensor, source, tag=tag)
    for work in works:
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return {name: int(tensor.long().sum()) for name, tensor in received.items()} | {"rank": rank}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=slow) for seed in range(2, 9))])
def test_messages_in_any_order_are_those_of_gloo(world, tmp_path, seed):
    # Several of these are more than a rank keeps of another, and so is one of the last.
    largest = (20 if seed % 2 else 70) << 18
    same_as_gloo(world, tmp_path, unordered, 3, seed, largest, exact=True)


def coalesced():
    rank, size = joined()
    manager = dist.distributed_c10d._coalescing_manager
    cpu = torch.device("cpu")
    sums = [values(rank, 100 * (number + 1)) for number in range(3)]
    with manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    for tensor in sums:
        same(tensor, sum(values(other, tensor.numel()) for other in range(size)), "all_reduce")
    inputs = [values(rank, 10), values(rank, 20, torch.int64)]
    outputs = [torch.empty(size * 10), torch.empty(size * 20, dtype=torch.int64)]
    with manager(async_ops=True) as batch:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    batch.wait()
    same(outputs[0], torch.cat([values(other, 10) for other in range(size)]), "all_gather")
    scattered = [torch.empty(10), torch.empty(20)]
    with manager():
        for output in scattered:
            dist.reduce_scatter_tensor(output, torch.ones(size * output.numel()))
    assert all(torch.equal(output, torch.full_like(output, size)) for output in scattered)
    # Of different kinds, one of them waited for within, one copied back at the end.
    matrix = torch.full((2, 3), float(rank))
    gathered = [torch.empty(4) for _ in range(size)]
    with manager(device=cpu, async_ops=True) as batch:
        dist.broadcast(matrix.t(), src=1, async_op=True)
        dist.all_gather(gathered, values(rank, 4))
        dist.barrier(async_op=True)
    batch.wait()
    same(matrix, torch.ones(2, 3), "broadcast")
    same(gathered[1], values(1, 4), "all_gather")
    with manager(device=cpu, async_ops=True) as batch:
        pass
    batch.wait()
    dist.destroy_process_group()


def test_operations_are_coalesced(world):
    world.run(coalesced, 2)


def failed_batch():
    """What raises inside ends the batch for that thread; the group goes on."""
    _rank, size = joined()
    batch = dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="is not a rank of a group of 2"), batch:
        dist.group.WORLD.broadcast(torch.ones(1), 9)
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()


def test_a_batch_that_raises_does_no_harm(world):
    world.run(failed_batch, 2)


def all_come():
    _rank, _size = joined()
    for wait_all in (False, True):
        dist.monitored_barrier(timeout=LATER, wait_all_ranks=wait_all)
    group = dist.new_group([0, 2])
    dist.monitored_barrier(group, timeout=LATER)
    dist.destroy_process_group()


def test_a_monitored_barrier_that_all_reach(world):
    world.run(all_come, 3)


def test_a_monitored_barrier_of_one_rank(world):
    world.run(alone, 1)


def alone():
    joined()
    dist.monitored_barrier(timeout=SOON)
    dist.destroy_process_group()


def tell_when_sent():
    """While this rank waits for the verdict of its monitored barrier: its part is on the way."""
    sent = ("monitored_barrier", "completed")
    until(
        lambda: sent in [(entry["name"], entry["state"]) for entry in torch_resilient.op_log()],
        "its arrival is sent to rank 0",
    )
    rank_server.tell("sent")


def some_are_missing(wait_all):
    """Ranks 1 and 3 of 4 come late, and rank 0 behind rank 2; nobody is fenced, and the late ones
    are told. Only rank 0 decides, so only its time is short."""
    rank, size = joined()
    dist.barrier()
    if rank == 2:
        threading.Thread(target=tell_when_sent).start()
    else:
        rank_server.hear()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=LATER if rank else SOON, wait_all_ranks=wait_all)
    rank_server.tell((str(caught.value), time.monotonic() - started))
    dist.monitored_barrier(timeout=LATER)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()


@pytest.mark.parametrize("wait_all", [False, True])
def test_a_monitored_barrier_names_who_is_missing(world, wait_all):
    ranks = world.start(some_are_missing, 4, wait_all)
    assert ranks[2].told() == "sent"
    ranks[0].say("go")
    text, seconds = ranks[0].told()
    named = "Ranks 1, 3 failed" if wait_all else "Rank 1 failed"
    assert text.startswith("[resilient:TIMEOUT]") and f"{named} to pass monitoredBarrier" in text
    assert "1, 3" in text
    assert 0.3 <= seconds < 5
    text, _ = ranks[2].told()
    assert "Rank 2 successfully reached monitoredBarrier" in text and "1, 3" in text
    for late in (1, 3):
        ranks[late].say("go")
    for late in (1, 3):
        text, seconds = ranks[late].told()
        assert f"Rank {late} successfully reached monitoredBarrier" in text and "1, 3" in text
        assert seconds < 5  # The verdict was there already.
    for rank in ranks:
        rank.value()


def rank_0_is_missing():
    rank, _ = joined()
    dist.barrier()
    if rank == 0:
        assert rank_server.hear() == "go"
    else:
        with pytest.raises(RuntimeError, match=r"no verdict within 300 ms"):
            dist.monitored_barrier(timeout=SOON)
        rank_server.tell("alone")
    dist.barrier()
    leave_together()


def leave_together():
    """What a monitored barrier has given up still needs the ranks that did not come: one that left
    while another is on its way out of the last operation would end that with LEFT."""
    rank_server.tell("met")
    assert rank_server.hear() == "leave"
    dist.destroy_process_group()


def let_leave(ranks):
    for rank in ranks:
        assert rank.told() == "met"
    for rank in ranks:
        rank.say("leave")
    for rank in ranks:
        rank.value()


def test_a_monitored_barrier_without_rank_0(world):
    ranks = world.start(rank_0_is_missing, 2)
    assert ranks[1].told() == "alone"
    ranks[0].say("go")
    let_leave(ranks)


def subgroup_is_told_in_ranks_of_the_world():
    rank, _ = joined()
    group = dist.new_group([2, 1])
    if rank == 1:  # Rank 0 of the group.
        with pytest.raises(RuntimeError, match=r"Rank 1 failed .*; in the world: 2; group"):
            dist.monitored_barrier(group, timeout=SOON)
    dist.barrier()
    leave_together()


def test_a_monitored_barrier_of_a_group(world):
    let_leave(world.start(subgroup_is_told_in_ranks_of_the_world, 3))
