"""What a rank can tell about its operations: the log of a group, the names in torch's profiler."""

import time

import pytest
import rank_server
import torch
import torch.distributed as dist
from tensors import joined, values

LOGGED = 2000


def entries():
    import torch_resilient

    rank, _size = joined()
    assert torch_resilient.op_log() == []
    before = time.time()
    dist.all_reduce(values(rank, 12))
    dist.barrier(async_op=True).wait()
    peer = 1 - rank
    work = dist.irecv(torch.empty(3, dtype=torch.int64), peer)
    dist.send(values(rank, 3, torch.int64), peer)
    work.wait()
    log = torch_resilient.op_log()
    assert [entry["name"] for entry in log] == ["all_reduce", "barrier", "recv", "send"]
    assert [entry["seq"] for entry in log] == [1, 2, 1, 2]
    assert [entry["id"] for entry in log] == [1, 2, 3, 4]
    assert all(entry["state"] == "completed" and not entry["failure"] for entry in log)
    assert all(before <= entry["started"] <= entry["ended"] <= time.time() for entry in log)
    assert (log[0]["dtype"], log[0]["count"]) == ("float32", 12)
    assert (log[2]["dtype"], log[2]["count"]) == ("int64", 3)
    assert log[0]["call_site"].startswith("test_op_log.py:")
    assert log[0]["call_site"].endswith(" entries")
    group = dist.new_group()
    assert torch_resilient.op_log(group) == []
    with pytest.raises(torch_resilient.ConfigError, match="no such group"):
        torch_resilient.op_log(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(torch_resilient.ResilientError, match="another backend"):
        torch_resilient.op_log(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def test_the_log_of_a_group(world):
    world.run(entries, 2)


def ring():
    import torch_resilient

    joined()
    tensor = torch.ones(1)
    for _ in range(LOGGED + 10):
        dist.all_reduce(tensor)
    log = torch_resilient.op_log()
    assert [entry["seq"] for entry in log] == list(range(11, LOGGED + 11))
    dist.destroy_process_group()


def test_the_log_keeps_the_latest(world):
    world.run(ring, 1)


def lost_peer():
    import torch_resilient

    rank, _ = joined()
    dist.barrier()
    if rank == 1:
        rank_server.tell("here")
        rank_server.hear()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    running = torch_resilient.op_log()[-1]
    assert (running["state"], running["ended"]) == ("running", 0)
    rank_server.tell("running")
    with pytest.raises(torch_resilient.RankLostError):
        work.wait()
    with pytest.raises(torch_resilient.RankLostError):
        dist.barrier()
    failed, refused = torch_resilient.op_log()[-2:]
    assert failed["state"] == "failed" and "RANK_LOST" in failed["failure"]
    assert refused["state"] == "failed" and refused["seq"] == 0
    return True


def test_the_log_tells_what_failed(world):
    ranks = world.start(lost_peer, 2)
    assert (ranks[0].told(), ranks[1].told()) == ("running", "here")
    ranks[1].signal()
    assert ranks[0].value()


def profiled():
    rank, size = joined()
    tensor = torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=0, async_op=True).wait()
        peer = 1 - rank
        work = dist.irecv(torch.empty(1), peer)
        dist.send(torch.ones(1), peer)
        work.wait()
    names = {event.name for event in profile.events()}
    expected = {"all_reduce", "broadcast", "send", "recv"}
    assert {f"resilient:{name}" for name in expected} <= names
    assert tensor[0].item() == size
    dist.destroy_process_group()


def test_the_profiler_shows_the_operations(world):
    world.run(profiled, 2)
