"""torch's abort and completion hooks, and the flight recorder that torch 2.15 attaches by them.

Goal: an abort hook runs once for each failure, on its own thread, whoever is aborted and how often
the world is built again, and holds nobody up; completed operations are told, failed ones are not.
Method: real ranks that are killed and abort; what the recorder writes is read.
"""

import json
import os
import pickle
import queue
import threading
import time

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from test_reconfigure import Member, reconfigure

import torch_resilient

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "supports_completion_hooks"), reason="torch is older than 2.15"
)

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
SECONDS = 20
OURS = 1_000_001  # Number of a hook; torch's own begin at another one.
ABSENT_SECONDS = 0.3  # In which a hook would run that must not.
AT_ONCE_SECONDS = 2.0  # On a busy machine.


class Calls:
    """An abort hook; knows the threads that have called it."""

    def __init__(self):
        self._queue = queue.Queue()

    def __call__(self):
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            self._queue.put(file.read().strip())

    def next(self):
        return self._queue.get(timeout=SECONDS)

    def none(self):
        try:
            self._queue.get(timeout=ABSENT_SECONDS)
        except queue.Empty:
            return True
        return False


def hook_on(group):
    calls = Calls()
    assert group.supports_abort_hooks
    group.register_abort_hook(OURS, calls)
    return calls


def abort(group):
    group._get_backend(torch.device("cpu")).abort()


def meets_the_end():
    with pytest.raises(torch_resilient.CommError):
        while True:
            dist.barrier()


def aborts_in_turn(rounds):
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    half = dist.new_group([0, 1])
    groups = [dist.group.WORLD] + [half] * (rank < 2)
    calls = [hook_on(group) for group in groups]
    for number in range(rounds):
        tell("ready")  # Whoever aborts must not end what others are still in, or have no hook for.
        hear()
        if number % size == rank:
            abort(groups[number % len(groups)])
        meets_the_end()
        assert [call.next() for call in calls] == ["res-hooks"] * len(calls)
        torch_resilient.rebuild()
    dist.group.WORLD.unregister_abort_hook(OURS)
    tell("ready")
    hear()
    if rank == 0:
        abort(dist.group.WORLD)
    meets_the_end()
    for call in calls[1:]:
        assert call.next()
    assert all(call.none() for call in calls)
    tell("looked")  # Who leaves before may be a failure of the next generation to the others.
    hear()


def test_an_abort_hook_runs_once_for_each_failure(world):
    ranks = world.start(aborts_in_turn, 3, 5)
    for told in ["ready"] * 6 + ["looked"]:
        for rank in ranks:
            assert rank.told() == told
        for rank in ranks:
            rank.say("go")
    for rank in ranks:
        rank.value()


def rebuilds_beside_a_slow_hook(first):
    dist.init_process_group("resilient")
    if not first:
        dist.barrier()
        dist.destroy_process_group()
        return
    begun, end = threading.Event(), threading.Event()
    calls = hook_on(dist.group.WORLD)

    def slow():
        begun.set()
        assert end.wait(SECONDS)

    def broken():
        raise KeyError("a bug in a hook")

    dist.group.WORLD.register_abort_hook(OURS + 1, slow)
    dist.group.WORLD.register_abort_hook(OURS - 1, broken)
    outlive(1)
    hear()
    assert begun.wait(SECONDS)
    torch_resilient.rebuild()
    dist.barrier()
    assert calls.next()
    end.set()
    dist.destroy_process_group()
    assert calls.none()


def test_a_hook_that_is_slow_or_raises_holds_nobody_up(world):
    ranks = world.start(rebuilds_beside_a_slow_hook, 3, True, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(rebuilds_beside_a_slow_hook, 1, 3, False, env=WAIT)
    for number in (0, 2):
        ranks[number].say("go")
    for rank in ranks:
        rank.value(30)
    assert "a bug in a hook" in ranks[0].stderr()


def leaves_a_hook_behind(returns):
    """Destroys its groups beside a hook that nothing ends; seconds that this took."""
    dist.init_process_group("resilient")
    group = dist.new_group(range(dist.get_world_size()))
    begun, end, taken_out = threading.Event(), threading.Event(), threading.Event()

    def stuck():
        begun.set()
        end.wait()
        group.unregister_abort_hook(OURS)  # As torch's recorder does, on this thread.
        taken_out.set()

    group.register_abort_hook(OURS, stuck)
    outlive(1)
    started = time.monotonic()
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    seconds = time.monotonic() - started
    assert begun.wait(SECONDS)
    if returns:
        end.set()
        assert taken_out.wait(AT_ONCE_SECONDS)
    return seconds


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "stuck"])
def test_neither_destroy_nor_the_end_of_the_process_waits_for_a_hook(world, returns):
    ranks = world.start(leaves_a_hook_behind, 2, returns)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert ranks[0].value() < AT_ONCE_SECONDS
    assert "FATAL" not in ranks[0].stderr()


def takes_its_hook_out():
    """At the moment it knows of the failure."""
    dist.init_process_group("resilient")
    calls = hook_on(dist.group.WORLD)
    outlive(1)
    dist.group.WORLD.unregister_abort_hook(OURS)
    assert calls.next() == "res-hooks"
    dist.destroy_process_group()


def test_a_failure_that_is_known_finds_a_hook_that_is_taken_out(world):
    ranks = world.start(takes_its_hook_out, 2)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[0].value()


def keeps_its_hooks():
    member = Member()
    calls = hook_on(dist.group.WORLD)
    handles = member.handles()
    for uuid in (1, 2):
        reconfigure(uuid, handles)
        dist.barrier()
        tell("reconfigured")
        hear()
        if member.rank == 0:
            abort(dist.group.WORLD)
        meets_the_end()
        assert calls.next() == "res-hooks"
        # Who leaves before the next generation of this uuid is built is a failure to the other.
        deadline = time.monotonic() + SECONDS
        while torch_resilient.membership()["state"] != "READY":
            assert time.monotonic() < deadline
        tell("ready again")
        hear()
    assert calls.none()
    dist.destroy_process_group()


def test_hooks_stay_with_a_group_that_is_reconfigured(world):
    ranks = world.start(keeps_its_hooks, 2)
    for told in ["reconfigured", "ready again"] * 2:
        for rank in ranks:
            assert rank.told() == told
        for rank in ranks:
            rank.say("go")
    for rank in ranks:
        rank.value()


def entries(trace):
    return [(entry["profiling_name"], entry["state"]) for entry in trace["entries"]]


def recorded():
    """What the flight recorder has, once no operation is in flight there that has ended here."""
    trace = torch._C._distributed_c10d._dump_fr_trace_json(backend="resilient")
    return entries(json.loads(trace))


def records():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3, 4).t(), async_op=True).wait()  # Finished on another thread.
    dist.all_reduce(torch.ones(1_000_000), async_op=True).wait()
    (dist.send if rank == 0 else dist.recv)(torch.ones(2), 1 - rank)
    dist.barrier()
    names = ["all_reduce"] * 3 + ["send 0->1" if rank == 0 else "recv 1<-0", "barrier"]
    expected = [(f"resilient:{name}", "completed") for name in names]
    deadline = time.monotonic() + SECONDS
    while recorded() != expected and time.monotonic() < deadline:
        pass
    assert recorded() == expected
    if rank == 1:
        tell("ready")
        hear()
        return
    late = dist.all_reduce(torch.ones(3), async_op=True)
    tell("ready")
    with pytest.raises(torch_resilient.RankLostError):
        late.wait()
    path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}"
    dist.destroy_process_group()
    return trace_in(path)


def trace_in(path):
    """Once it is written to its end: nobody waits for that."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with open(path, "rb") as file:
                return entries(pickle.load(file))
        except (FileNotFoundError, EOFError, pickle.UnpicklingError):
            assert time.monotonic() < deadline


def test_the_flight_recorder_tells_what_was_completed(world, tmp_path):
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace"), "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
    ranks = world.start(records, 2, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    trace = ranks[0].value()
    assert trace[-1] == ("resilient:all_reduce", "scheduled")
    assert {state for _, state in trace[:-1]} == {"completed"}
