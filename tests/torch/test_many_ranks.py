"""More ranks than cores: a world, a group and collectives of each kind, and nobody is judged by how
long it takes. Lines about lost connections, or of any warning, fail the test."""

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from tensors import joined

# An interpreter that ends touches all of its memory, which it has shared with the rank server until
# then: so many of them, of 0.4 GB each, at a time.
END_AT_A_TIME = 16
TRANSPORTS = pytest.mark.parametrize("shm_limit", ["256MiB", "0"], ids=["shm", "tcp"])


def every_collective(times):
    rank, size = joined()
    group = dist.new_group()
    dist.barrier(group)
    for turn in range(times):
        own = torch.full((8,), float(rank + turn))
        total = float(sum(range(size)) + turn * size)
        whole, part = torch.empty(8 * size), torch.empty(8)
        dist.all_reduce(own, group=group)
        assert own.eq(total).all(), turn
        dist.broadcast(own, turn % size, group=group)
        assert own.eq(total).all(), turn
        dist.all_gather_into_tensor(whole, torch.full((8,), float(rank)), group=group)
        assert whole[8 * turn % (8 * size)] == float(turn % size), turn
        dist.reduce_scatter_tensor(part, torch.ones(8 * size), group=group)
        assert part.eq(size).all(), turn
        dist.all_to_all_single(whole, torch.full((8 * size,), float(rank)), group=group)
        assert whole[-1] == size - 1, turn
        dist.reduce(torch.ones(8), turn % size, group=group)
        dist.barrier(group)
    dist.destroy_process_group()
    tell("left")
    hear()


def run(world, size, times, shm_limit, longer=0):
    ranks = world.start(every_collective, size, times, env={"RESILIENT_SHM_LIMIT": shm_limit})
    for rank in ranks:
        assert rank.told(30 + size + longer) == "left"
    for first in range(0, size, END_AT_A_TIME):
        for rank in ranks[first : first + END_AT_A_TIME]:
            rank.say("end")
        for rank in ranks[first : first + END_AT_A_TIME]:
            rank.value()
    for rank in ranks:
        told = [line for line in rank.stderr().splitlines() if " W " in line or " E " in line]
        # So many fill the memory of a small machine, which then stands still for seconds, and take
        # longer to start than a rank waits without a word.
        if size > 128:
            told = [line for line in told if "this process was paused for" not in line]
            told = [line for line in told if " s to join" not in line]
        assert not told


@pytest.mark.slow
def test_64_ranks(world):
    run(world, 64, 3, "0")


@pytest.mark.slow
@TRANSPORTS
@pytest.mark.parametrize("size", [64, 128, 256])
def test_many_ranks_again_and_again(world, size, shm_limit):
    for _ in range(5 if size < 256 else 2):
        run(world, size, 20 if size < 256 else 5, shm_limit)


@pytest.mark.soak
@TRANSPORTS
def test_256_ranks_as_often_as_fewer(world, shm_limit):
    for _ in range(5):
        run(world, 256, 20, shm_limit, longer=600)
