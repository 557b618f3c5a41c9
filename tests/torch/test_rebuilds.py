"""A world that is rebuilt a thousand times has no more descriptors, threads, shared memory and
memory than one that was rebuilt ten times. Its shared memory has no names: it is seen where it is
mapped; /dev/shm must not be used at all."""

import gc
import itertools
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import settled, thread_names

import torch_resilient

SIZE = 4
GROUPS = 3
# torch's recorder writes down all that it has at each failure: of what the allocator takes for
# that, some megabytes stay, now more and now fewer.
AUTO = {"RESILIENT_HEAL": "auto", "RESILIENT_LOG": "error", "TORCH_FR_BUFFER_SIZE": "0"}
WARM = 10  # What is made once is made by then.
# Of resident memory: a group keeps its latest operations, with the texts of those that failed. A
# leak of one group or session is much more.
PER_REBUILD_BYTES = 1024
REBUILDS = int(os.environ.get("SOAK_REBUILDS", "1000"))  # A part of them shows less growth.
SLACK_BYTES = 1 << 20  # Arenas of the allocator, and pages that come and go.


def more_than_one():
    """Threads beyond one of each name: those of a generation before that are about to be gone, and
    those that have no name of their own yet. Of "res-shm" each group has one."""
    names = [name for name in thread_names() if name != "res-shm"]
    return len(names) - len(set(names))


def used():
    """Counts, and resident memory in bytes."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    status = Path("/proc/self/status").read_text()
    settled(more_than_one, 0)
    threads = thread_names()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "res-shm": threads.count("res-shm"),
        "threads": len(threads) - threads.count("res-shm"),
        "shared mappings": maps.count("/memfd:"),
        "in /dev/shm": maps.count("/dev/shm"),
        "resident": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10,
    }


def rebuild_again_and_again(count):
    """Rank 0's groups abort in turn: the world, one in which all are, one of two ranks. The next
    operation rebuilds."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    groups = [dist.group.WORLD, dist.new_group(list(range(SIZE))), dist.new_group([0, 1])]
    cpu = torch.device("cpu")
    before = torch_resilient.membership()["generation"]
    warm = None
    for number in range(count):
        for group in groups if rank < 2 else groups[:2]:
            dist.all_reduce(torch.ones(5000), group=group)
        dist.barrier()
        if number == WARM:
            warm = used()
        with pytest.raises(torch_resilient.CommError):
            for operation in itertools.count():  # The fence comes in some operation.
                if operation == 1 and rank == 0:
                    # All have entered the first one: they are past the barrier.
                    groups[number % len(groups)]._get_backend(cpu).abort()
                dist.all_reduce(torch.ones(5000))
    for group in groups if rank < 2 else groups[:2]:
        dist.all_reduce(torch.ones(5000), group=group)
    dist.barrier()
    end = used()
    rebuilt = torch_resilient.membership()["generation"] - before
    dist.barrier()
    dist.destroy_process_group()
    return warm, end, rebuilt


def check(world, count, seconds):
    for rank, (warm, end, rebuilt) in enumerate(
        world.run(rebuild_again_and_again, SIZE, count, env=AUTO, seconds=seconds)
    ):
        assert rebuilt == count
        resident = end.pop("resident") - warm.pop("resident")
        # One of a group, from the first operation on that no caller runs itself.
        assert max(end.pop("res-shm"), warm.pop("res-shm")) <= GROUPS
        assert end == warm and not end["in /dev/shm"], f"rank {rank}"
        assert resident <= SLACK_BYTES + (count - WARM) * PER_REBUILD_BYTES, f"rank {rank}"
        print(f"rank {rank}: {count} rebuilds, {end}, resident memory grew by {resident} bytes")


def abort_and_rebuild():
    """Nothing is in flight on rank 0 that could fail, and the fence is still to come."""
    dist.init_process_group("resilient")
    before = torch_resilient.membership()["generation"]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    errors = torch._C._distributed_c10d.ErrorType
    for _ in range(10):
        if dist.get_rank() == 0:
            dist.barrier()  # The other one has acknowledged as well.
            backend.abort()
            assert backend.get_error() == errors.COMM_ERROR
        else:
            with pytest.raises(torch_resilient.CommError):
                while True:
                    dist.barrier()
        torch_resilient.rebuild()
        assert backend.get_error() == errors.SUCCESS
    dist.barrier()
    return torch_resilient.membership()["generation"] - before


def test_rebuild_right_behind_an_abort(world):
    assert world.run(abort_and_rebuild, 2) == [10, 10]


def test_thirty_rebuilds(world):
    check(world, 30, 60)


@pytest.mark.soak
def test_a_thousand_rebuilds(world):
    assert REBUILDS > WARM, "SOAK_REBUILDS must go beyond what is made once"
    check(world, REBUILDS, 900)
