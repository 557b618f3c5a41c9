"""torch_resilient.status(): a dictionary for programs, a table for people."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from rank_server import tell

import torch_resilient


def look(backend):
    before = torch_resilient.status()
    assert before == {"backend": None} and "no session" in str(before)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    part = dist.new_group([0, 1], backend="gloo")
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if rank < 2:
        dist.broadcast(torch.ones(5, dtype=torch.int64), 0, group=part)
    status = torch_resilient.status()
    assert isinstance(status, dict) and status["backend"] == "resilient"
    assert status["membership"]["state"] == "RUNNING" and status["failure"] is None
    assert [group["size"] for group in status["groups"]] == ([size, 2] if rank < 2 else [size])
    dist.barrier()
    dist.destroy_process_group()
    return str(status), repr(status), os.getpid(), status["server"], status["job"]


def test_the_table(world):
    env = {"RESILIENT_TAKE_OVER": "gloo"}
    ranks = world.start(look, 3, "gloo", env=env)
    results = [rank.value(30) for rank in ranks]
    for rank, (text, shown, _, server, job) in enumerate(results):
        assert shown == text
        assert f"job {job}," in text and server and server in text
        assert f"rank {rank} is RUNNING: generation 1, life 1, round 1\n" in text
        lines = [line.split() for line in text.splitlines()]
        assert ["rank", "host", "pid", "state"] in lines
        for number, (_, _, pid, _, _) in enumerate(results):
            row = next(line for line in lines if line[:1] == [str(number)] and str(pid) in line)
            state = " ".join(row[3:])
            assert state == ("this process, RUNNING" if number == rank else "member")
        assert "failure: none\nlast incident: none\n" in text
        world_row = next(line for line in text.splitlines() if line.startswith("world "))
        assert "gloo served by resilient" in world_row and f"{rank} of 3" in world_row
        assert "#2 barrier completed at test_status.py:" in world_row
        inside = [line for line in text.splitlines() if "broadcast(int64[5]) completed" in line]
        assert len(inside) == (1 if rank < 2 else 0)
        assert all("gloo served by resilient" in line for line in inside)


def look_at_a_loss(victim):
    dist.init_process_group("resilient")
    if dist.get_rank() == victim:
        signal.pause()
    work = dist.barrier(async_op=True)
    tell("waits")  # What is started behind the loss is refused, and fails nowhere.
    with pytest.raises(torch_resilient.RankLostError):
        work.wait()
    status = torch_resilient.status()
    assert status["accused"] == victim
    return str(status)


def test_the_table_after_a_loss(world):
    victim = 1
    ranks = world.start(look_at_a_loss, 3, victim)
    survivors = [rank for number, rank in enumerate(ranks) if number != victim]
    for rank in survivors:
        assert rank.told(15) == "waits"
    ranks[victim].signal()
    assert ranks[victim].wait() == -signal.SIGKILL
    for rank in survivors:
        text = rank.value(15)
        assert "failure: [resilient:RANK_LOST] rank 1 " in text
        assert "last incident: RANK_LOST ended generation 1, known " in text
        assert any(line.endswith("named by the failure") for line in text.splitlines())
        assert "barrier failed at test_status.py:" in text
