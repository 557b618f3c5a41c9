"""What the tests' own harness promises."""

import contextlib
import os
import subprocess
import threading

import harness
from rank_server import hear, tell


def test_children_are_found_while_threads_come_and_go():
    ended = threading.Event()

    def come_and_go():
        while not ended.is_set():
            brief = threading.Thread(target=lambda: None)
            brief.start()
            brief.join()

    with contextlib.ExitStack() as stack:
        child = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(child.kill)
        restless = threading.Thread(target=come_and_go)
        restless.start()
        stack.callback(restless.join)
        stack.callback(ended.set)
        for _ in range(300):
            assert child.pid in harness.children()


def test_a_child_is_found_while_it_is_being_executed():
    for _ in range(200):
        with subprocess.Popen(["sleep", "60"]) as child:
            try:
                assert child.pid in harness.children()
            finally:
                child.kill()


def returns():
    return True


def test_ended_worlds_hold_no_descriptors(rank_server, store):
    def run_world():
        with contextlib.closing(harness.World(rank_server, store)) as world:
            assert all(world.run(returns, 2))
        return len(os.listdir("/proc/self/fd"))

    assert run_world() == run_world()


def ends_when_told():
    tell("all that the test needs")
    hear()


def never_ends():
    hear()


def test_a_world_waits_for_the_ends_of_its_ranks(rank_server, store):
    world = harness.World(rank_server, store)
    rank = world.start_rank(ends_when_told, 0, 1)
    assert rank.told()
    rank.say("end")  # It takes some milliseconds for that.
    assert world.close() == []


def test_a_rank_that_does_not_end_is_reported_and_killed(rank_server, store):
    world = harness.World(rank_server, store)
    rank = world.start_rank(never_ends, 0, 1)
    (report,) = world.close(seconds=0.1)
    assert f"rank process {rank.pid}" in report and not rank.alive()
