"""What the survivors see: exceptions with attributes, on every call until rebuild()."""

import json
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

KNOWN_SECONDS = 0.5
GRACE_SECONDS = 0.3  # For the exception to leave the call, on a busy machine.


def mismatch(kind):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    try:
        if kind == "shape":
            dist.all_reduce(torch.ones(4 if rank else 6))
        elif kind == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank else torch.float64))
        elif kind == "operation":
            dist.all_reduce(torch.ones(4)) if rank else dist.broadcast(torch.ones(4), src=0)
        elif kind == "root":
            dist.broadcast(torch.ones(4), src=rank % 2)
        else:
            dist.all_reduce(torch.ones(4), op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
        dist.barrier()  # For a rank whose own part of the operation was complete.
    except torch_resilient.MismatchError as error:
        assert isinstance(error, dist.DistBackendError)
        assert error.code == "MISMATCH"
        assert str(error).startswith("[resilient:MISMATCH]")
        assert error.seq
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["shape", "dtype", "operation", "root", "reduce op"])
def test_mismatch_is_an_error_on_every_rank(world, kind):
    started = time.monotonic()
    texts = world.run(mismatch, 3, kind, seconds=20)
    assert all(texts), texts
    assert time.monotonic() - started < 10


def mismatch_on_threads():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    texts = []

    def reduce():
        try:
            dist.all_reduce(torch.ones(4 if rank else 6))
            dist.barrier()
        except torch_resilient.MismatchError as error:
            texts.append(str(error))

    thread = threading.Thread(target=reduce)
    thread.start()
    thread.join()
    return texts


def test_a_mismatch_names_the_lines_of_threads_other_than_main(world):
    for texts in world.run(mismatch_on_threads, 2):
        assert len(texts) == 1 and texts[0].count("test_failures.py:") == 2, texts


def check_lost(error, rank):
    assert isinstance(error, torch_resilient.RankLostError), repr(error)
    assert isinstance(error, dist.DistBackendError)
    assert error.code == "RANK_LOST"
    assert str(error).startswith("[resilient:RANK_LOST]")
    assert error.rank == rank
    assert error.pid and error.host and error.generation


def lose_in(situation, victim):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    tell("ready")
    if rank == victim:
        signal.pause()
    try:
        if situation == "all_reduce":
            dist.all_reduce(tensor)
        elif situation == "barrier":
            dist.barrier()
        elif situation == "recv":
            dist.recv(tensor, victim)
        elif situation == "async":
            dist.all_reduce(tensor, async_op=True).wait()
        elif situation == "object":
            dist.all_gather_object([None] * dist.get_world_size(), rank)
        else:
            dist.distributed_c10d._get_default_store().get("nobody sets this")
    except Exception as error:
        check_lost(error, victim)
        return torch_resilient.last_incident()["known"], time.time()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("situation", ["all_reduce", "barrier", "recv", "async", "object", "store"])
def test_a_killed_rank_is_raised_where_the_others_wait(world, situation):
    victim = 1
    ranks = world.start(lose_in, 3, situation, victim)
    for rank in ranks:
        assert rank.told() == "ready"
    _, killed = ranks[victim].signal()
    for number, rank in enumerate(ranks):
        if number != victim:
            known, raised = rank.value(10)
            assert known - killed < KNOWN_SECONDS
            assert raised - killed < KNOWN_SECONDS + GRACE_SECONDS
    assert ranks[victim].wait() == -signal.SIGKILL


def lose_in_backward(victim):
    dist.init_process_group("resilient")
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    model(torch.ones(8, 64)).sum().backward()
    tell("ready")  # A rank must not die while another is still in the first one.
    if dist.get_rank() == victim:
        hear()
        # Dies between the all-reduces of one backward.
        layers[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for _ in range(100):
            model(torch.ones(8, 64)).sum().backward()
    except Exception as error:
        check_lost(error, victim)
        return True
    raise AssertionError("nothing was raised")


def test_a_loss_in_backward_keeps_its_class_and_attributes(world):
    victim = 2
    ranks = world.start(lose_in_backward, 3, victim)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[victim].say("go")
    assert ranks[victim].wait() == -signal.SIGKILL
    assert [rank.value(10) for number, rank in enumerate(ranks) if number != victim] == [True, True]


def sticky():
    dist.init_process_group("resilient")
    size = dist.get_world_size()
    subgroup = dist.new_group([0, 1])
    first = outlive(size - 1)
    # Not a member of this group was lost; still all groups of the session move together.
    for group in (None, subgroup, None):
        with pytest.raises(torch_resilient.RankLostError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        assert caught.value.rank == size - 1
    assert torch_resilient.failure().code == "RANK_LOST"
    assert "RANK_LOST" in torch_resilient.status()["failure"]
    hear()
    membership = torch_resilient.rebuild()
    assert membership["generation"] > first.generation
    assert torch_resilient.failure() is None
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(torch.ones(1), group=subgroup)
    dist.destroy_process_group()
    return total.item()


def replacement():
    dist.init_process_group("resilient")
    dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_failure_is_sticky_until_rebuild_and_a_replacement_takes_the_seat(world):
    wait = {"RESILIENT_SEAT_WAIT": "30s"}
    ranks = world.start(sticky, 3, env=wait)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[2].signal()
    newcomer = world.start_rank(replacement, 2, 3, env=wait)
    for rank in ranks[:2]:
        rank.say("go")
    assert [rank.value(20) for rank in (*ranks[:2], newcomer)] == [3.0, 3.0, 3.0]


def nobody_comes():
    dist.init_process_group("resilient")
    outlive(1)
    with pytest.raises(torch_resilient.RankLostError):
        torch_resilient.rebuild()
    with pytest.raises(torch_resilient.RankLostError):
        dist.barrier()


def test_without_a_replacement_rebuild_raises_the_first_cause(world):
    ranks = world.start(nobody_comes, 3, env={"RESILIENT_SEAT_WAIT": "1s"})
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for rank in (ranks[0], ranks[2]):
        rank.value(20)


def leaves():
    dist.init_process_group("resilient")
    dist.barrier()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return True
    with pytest.raises(torch_resilient.RankLostError) as caught:
        dist.all_reduce(torch.ones(1))
    assert caught.value.rank == 0
    return caught.value.code


def test_an_operation_that_needs_a_rank_that_left(world):
    assert world.run(leaves, 2, seconds=20) == [True, "LEFT"]


def stops():
    dist.init_process_group("resilient")
    dist.barrier()
    tell("ready")
    if dist.get_rank() == 1:
        hear()
        dist.barrier()
        return None
    with pytest.raises(torch_resilient.RankLostError) as caught:
        dist.barrier()
    assert caught.value.rank == 1
    return time.monotonic()


def stop_and_wake(world, lease):
    ranks = world.start(stops, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    stopped, _ = ranks[1].signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        assert rank.value(20) - stopped < lease + 1 + 1
    # The others have entered their barrier: what the rank would need is there already.
    ranks[1].say("go")
    ranks[1].signal(signal.SIGCONT)
    error = ranks[1].error(20)
    assert isinstance(error, torch_resilient.FencedError), repr(error)
    ranks[1].wait()


@pytest.mark.slow
def test_a_stopped_rank_is_lost_by_its_lease_and_fenced_when_it_wakes(world):
    stop_and_wake(world, 5)


@pytest.mark.parametrize("_", range(3))
def test_a_rank_that_wakes_enters_no_operation(quick_world, _):
    stop_and_wake(quick_world, 2)


def incident_survivor(victim):
    refused = threading.Event()
    torch_resilient.on_event(lambda event: event["event"] == "refused" and refused.set())
    dist.init_process_group("resilient")
    dist.all_reduce(torch.ones(10))
    tell(os.getpid())
    if dist.get_rank() == victim:
        signal.pause()
    try:
        dist.barrier()
    except torch_resilient.RankLostError:
        pass
    # Behind the abort, so that the line has its time: destroy_process_group() waits for nothing.
    assert refused.wait(10)
    incident = torch_resilient.last_incident()
    dist.destroy_process_group()
    return incident


def incident_lines(log):
    """As any tool can read them: the JSON object at the end of a line, or a member of the line."""
    for line in log.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            if record.get("event") == "incident":
                yield record["incident"]
        elif " incident {" in line:
            yield json.loads(line[line.index("{") :])


@pytest.mark.parametrize("log", ["warn", "json:warn"])
def test_each_survivor_logs_one_incident_line(world, log):
    victim = 1
    ranks = world.start(incident_survivor, 3, victim, env={"RESILIENT_LOG": log})
    pids = [rank.told() for rank in ranks]
    ranks[victim].signal()
    for number, rank in enumerate(ranks):
        if number == victim:
            continue
        seen = rank.value(15)
        [incident] = incident_lines(rank.stderr())
        assert incident["schema"] == 1 and incident["outcome"] == "closed"
        assert incident["generation"] == 1 and incident["next_generation"] is None
        assert incident["life"] == 1 and incident["round"] == 1
        assert incident["reporter"]["rank"] == number
        assert incident["reporter"]["pid"] == pids[number]
        assert incident["accused"]["rank"] == victim and incident["accused"]["pid"] == pids[victim]
        assert incident["accused"]["host"] == incident["reporter"]["host"]
        assert incident["cause"]["code"] == "RANK_LOST"
        assert seen["cause"].endswith(incident["cause"]["text"])
        assert incident["evidence"]["by"] == "fence" and incident["evidence"]["since"]
        assert abs(incident["known"] - seen["known"]) < 0.001
        phases = incident["phases_ms"]
        assert phases["known"] == 0 and phases["running"] is None
        assert 0 <= phases["aborted"] <= phases["ended"] < 10_000
