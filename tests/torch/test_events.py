"""on_event: what the program hears of its sessions, and when it hears no more.

Goal: each fence and what follows it is told in order with the right numbers, to the end of the
process and not behind it. Method: real ranks, of which one is killed; callbacks that fill a queue.
"""

import atexit
import os
import queue
import sys
import threading

import pytest
import torch.distributed as dist
from losses import outlive
from rank_server import hear

import torch_resilient
from torch_resilient import on_event

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
SIZE = 3


class Heard:
    """A callback, and the events that it got."""

    def __init__(self):
        self._queue = queue.Queue()

    def __call__(self, event):
        assert threading.current_thread().name == "res-events"
        self._queue.put(event)

    def next(self):
        return self._queue.get(timeout=20)

    def brief(self, count):
        events = [self.next() for _ in range(count)]
        return [(event["number"], event["event"], event["generation"]) for event in events]


def hears_of_a_loss(first):
    heard, late = Heard(), Heard()
    on_event(heard)
    dist.init_process_group("resilient")
    begun = heard.next()
    assert (begun["event"], begun["missed"], begun["code"]) == ("running", 0, None)
    assert [member["rank"] for member in begun["members"]] == list(range(SIZE))
    if not first:
        dist.destroy_process_group()
        return begun["generation"], heard.brief(1)
    on_event(late)
    pid = begun["members"][1]["pid"]
    outlive(1)
    hear()
    torch_resilient.rebuild()
    dist.destroy_process_group()
    fenced = heard.next()
    cause = [fenced[name] for name in ("event", "code", "rank", "pid", "members")]
    assert cause == ["fenced", "RANK_LOST", 1, pid, None]
    assert fenced["text"].startswith("[resilient:RANK_LOST]") or "rank 1" in fenced["text"]
    assert fenced["job"] == os.environ["RESILIENT_JOB"]
    return heard.brief(3), late.brief(4)


def test_a_loss_is_told_in_order(world):
    ranks = world.start(hears_of_a_loss, SIZE, True, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(hears_of_a_loss, 1, SIZE, False, env=WAIT)
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    after = [(3, "rebuilt", 2), (4, "running", 2), (5, "closed", 2)]
    for rank in (ranks[0], ranks[2]):
        assert rank.value(30) == (after, [(2, "fenced", 1), *after])
    assert ranks[1].value(30) == (2, [(2, "closed", 2)])


def hears_of_two_sessions():
    heard = Heard()
    handle = on_event(heard)
    told = []
    for _ in range(2):
        dist.init_process_group("resilient")
        dist.barrier()
        dist.destroy_process_group()
        told += [event for _, event, _ in heard.brief(2)]
    handle.remove()
    handle.remove()
    other = Heard()
    on_event(other)
    dist.init_process_group("resilient")
    assert other.next()["event"] == "running"
    dist.destroy_process_group()
    assert heard._queue.empty()
    assert [thread.name for thread in threading.enumerate()].count("res-events") == 1
    return told


def test_sessions_one_after_the_other(world):
    assert world.run(hears_of_two_sessions, 2) == [["running", "closed"] * 2] * 2


def raises_in_a_callback(how):
    heard = Heard()

    def broken(event):
        raise how(f"a bug at {event['event']}")

    on_event(broken)
    on_event(heard)
    dist.init_process_group("resilient")
    dist.destroy_process_group()
    return heard.brief(2)


@pytest.mark.parametrize("how", [KeyError, SystemExit])
def test_a_callback_that_raises_is_shown_once_and_stops_nobody(world, how):
    (rank,) = world.start(raises_in_a_callback, 1, how)
    assert [event for _, event, _ in rank.value()] == ["running", "closed"]
    assert rank.stderr().count("a bug at running") == 1, rank.stderr()
    assert "a bug at closed" not in rank.stderr()
    assert "in broken" in rank.stderr()


def ends_with_a_callback(destroyed):
    atexit.register(sys.stderr.write, "before\n")
    dist.init_process_group("resilient")
    on_event(lambda event: sys.stderr.write(f"heard {event['event']}\n"))
    dist.barrier()
    if destroyed:
        dist.destroy_process_group()


@pytest.mark.parametrize("destroyed", [True, False])
def test_the_process_ends_with_the_last_event(world, destroyed):
    for rank in world.start(ends_with_a_callback, 2, destroyed):
        assert rank.wait(20) == 0, rank.stderr()
        lines = [line for line in rank.stderr().splitlines() if line in ("heard closed", "before")]
        if destroyed:  # Callbacks hold up nothing: the program may go on before this one runs.
            assert sorted(lines) == ["before", "heard closed"], rank.stderr()
        else:  # What a program registers after the import of torch runs before its worlds close.
            assert lines == ["before", "heard closed"], rank.stderr()
        assert "Traceback" not in rank.stderr() and "terminate" not in rank.stderr()


def ends_while_a_callback_runs():
    torch_resilient._events._END_SECONDS = 0.2
    entered = threading.Event()

    def endless(event):
        entered.set()
        threading.Event().wait()

    on_event(endless)
    dist.init_process_group("resilient")
    assert entered.wait(20)
    dist.destroy_process_group()


def test_a_callback_that_never_returns_does_not_hold_up_the_end(world):
    (rank,) = world.start(ends_while_a_callback_runs, 1)
    assert rank.wait(20) == 0
    assert "a callback of on_event still runs" in rank.stderr()


def forks():
    on_event(Heard())
    dist.init_process_group("resilient")
    child = os.fork()
    if child == 0:
        on_event(Heard())
        atexit._run_exitfuncs()
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    dist.destroy_process_group()
    return ended


def test_a_forked_child_has_none_of_it(world):
    assert world.run(forks, 2) == [0, 0]


def test_what_is_no_function_is_refused():
    with pytest.raises(torch_resilient.ConfigError, match="a function of one event"):
        on_event("fenced")
