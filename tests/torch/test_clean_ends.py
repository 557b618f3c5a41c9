"""Ends that are no loss, and the order of ends where one is.

Goal: a rank that ends with code 0 has left, however it ends; no other rank is disturbed unless an
operation needs it. Where a rank fails, launchers that show the process that ended first show that
rank and no victim. Method: ranks that end by os._exit, as children of multiprocessing and by the
system call alone, while others go on; worlds under mp.spawn and torchrun.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import time

import harness
import pytest
import torch
import torch.distributed as dist
from launching import run
from rank_server import hear, tell
from store_access import plain_environment

import torch_resilient

GOES_ON_SECONDS = 1.0  # A loss would be known after half of it.


def goes_on(group, first):
    """Operations of `group` for that time; its rank `first` has the clock."""
    until = time.monotonic() + GOES_ON_SECONDS
    going = torch.ones(1)
    while going.item():
        going.fill_(time.monotonic() < until)
        dist.broadcast(going, src=first, group=group)


def part(end, needed):
    """Rank 0 has done its part, and ends; the others go on without it."""
    dist.init_process_group("resilient")
    rest = dist.new_group([1, 2])
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        return end()
    tell("ready")
    hear()
    try:
        if needed:
            dist.all_reduce(torch.ones(1))
        else:
            goes_on(rest, 1)
    except torch_resilient.RankLostError as error:
        return error.code
    dist.destroy_process_group()
    return "went on"


def by_os_exit():
    part(lambda: os._exit(0), False)


def as_a_task():
    process = multiprocessing.get_context("fork").Process(target=part, args=(int, False))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("way", [by_os_exit, as_a_task])
def test_an_end_with_code_0_is_a_leave(world, way, needed):
    leaver = world.start_rank(way, 0, 3)
    others = [world.start_rank(part, rank, 3, None, needed) for rank in (1, 2)]
    for rank in others:
        assert rank.told() == "ready"
    assert leaver.wait() == 0
    for rank in others:
        rank.say("go")
    assert [rank.value() for rank in others] == ["LEFT" if needed else "went on"] * 2


def exits_with_6():
    part(lambda: os._exit(6), False)


def fails():
    raise ValueError("of a task")


def task_fails():
    process = multiprocessing.get_context("fork").Process(target=part, args=(fails, False))
    process.start()
    process.join()


def loses_one():
    dist.init_process_group("resilient")
    dist.new_group([1, 2])
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (exits_with_6, "ended by os._exit(6) (test_clean_ends.py:"),
        (task_fails, "ended by ValueError: of a task (test_clean_ends.py:"),
    ],
)
def test_another_end_of_these_is_told_on_all(world, way, text):
    world.start_rank(way, 0, 3)
    for rank in [world.start_rank(loses_one, rank, 3) for rank in (1, 2)]:
        error = rank.error()
        assert error.code == "RANK_LOST" and text in str(error), error


SYSTEM_CALL = """
import ctypes, sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_clean_ends import goes_on
dist.init_process_group("resilient")
rest = dist.new_group([1, 2])
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    ctypes.CDLL(None)._exit(0)
goes_on(rest, 1)
dist.destroy_process_group()
"""


def test_the_launcher_knows_the_code_where_the_process_says_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SYSTEM_CALL.format(tests=os.path.dirname(__file__)))
    code, stdout, stderr = run("--nproc", 3, program, seconds=60)
    assert code == 0 and "restarts" not in stderr, stdout + stderr


# ---- The root cause ends first ----

FAILS = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size, **where):
    dist.init_process_group("resilient", rank=rank, world_size=size, **where)
    dist.barrier()
    if rank == 2:
        raise ValueError("the root cause")
    dist.all_reduce(torch.ones(1))

def spawned(rank, port):
    work(rank, 4, init_method=f"tcp://127.0.0.1:{port}")

if __name__ == "__main__":
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    try:
        mp.spawn(spawned, (int(sys.argv[1]),), nprocs=4)
    except mp.ProcessRaisedException as error:
        print("shown", error.error_index)
"""
MANY = pytest.param(10, marks=pytest.mark.slow)


def result(program, *arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments[:-1]), program, str(arguments[-1])],
        env={**plain_environment(), "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s"},
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize("rounds", [1, MANY])
def test_mp_spawn_shows_the_rank_that_failed(tmp_path, rounds):
    program = tmp_path / "program.py"
    program.write_text(FAILS)
    for _ in range(rounds):
        ended = result(program, harness.free_port())
        assert ended.stdout.split() == ["shown", "2"], ended.stdout + ended.stderr


@pytest.mark.parametrize("rounds", [MANY])
def test_torchrun_shows_the_rank_that_failed(tmp_path, rounds):
    program = tmp_path / "program.py"
    program.write_text(FAILS)
    for _ in range(rounds):
        port = harness.free_port()
        where = ["--nproc-per-node", 4, "--master-addr", "127.0.0.1", "--master-port", port]
        ended = result(program, "-m", "torch.distributed.run", *where, 0)
        assert ended.returncode != 0
        shown = re.search(r"Root Cause.*?rank\s*: (\d+)", ended.stderr, re.DOTALL)
        assert shown and shown[1] == "2", ended.stderr
