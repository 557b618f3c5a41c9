"""SIGTERM: a rank that a launcher ends because of another one says what came first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
import torch.distributed as dist
from rank_server import tell

TORCHRUN_SECONDS = 60


def wait_for_it(ready=True):
    """Not in any call of ours; ends by the signal, or fails."""
    if ready:
        tell("ready")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        sum(range(10_000))
    raise AssertionError("nothing has ended this rank")


def busy():
    dist.init_process_group("resilient")
    dist.barrier()
    wait_for_it()


def test_a_rank_that_is_ended_names_the_first_cause(world):
    victim = 1
    ranks = world.start(busy, 3, env={"RESILIENT_LOG": "error"})
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[victim].signal()
    assert ranks[victim].wait() == -signal.SIGKILL  # An agent ends the others when it has ended.
    for number, rank in enumerate(ranks):
        if number != victim:
            rank.signal(signal.SIGTERM)
    started = time.monotonic()
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.wait() == -signal.SIGTERM
            [line] = [text for text in rank.stderr().splitlines() if "SIGTERM" in text]
            assert f"rank {number}: SIGTERM ends this rank; what came first:" in line
            assert "[resilient:RANK_LOST] rank 1 " in line
    assert time.monotonic() - started < 3


def test_without_a_failure_it_ends_all_the_same(world):
    [rank] = world.start(busy, 1)
    assert rank.told() == "ready"
    _, sent = rank.signal(signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM
    assert time.time() - sent < 3
    assert "SIGTERM" not in rank.stderr()


def with_a_handler_of_its_own(when):
    seen = []

    def handler(number, frame):
        seen.append(number)

    if when == "before":
        signal.signal(signal.SIGTERM, handler)
    dist.init_process_group("resilient")
    if when == "after":
        signal.signal(signal.SIGTERM, handler)
    tell("ready")
    until = time.monotonic() + 20
    while not seen and time.monotonic() < until:
        sum(range(10_000))
    dist.destroy_process_group()
    return seen, signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_user_is_left_alone(world, when):
    [rank] = world.start(with_a_handler_of_its_own, 1, when)
    assert rank.told() == "ready"
    rank.signal(signal.SIGTERM)
    assert rank.value(30) == ([signal.SIGTERM], True)


def with_helpers():
    dist.init_process_group("resilient")
    helper = os.fork()
    if helper == 0:
        try:
            wait_for_it(ready=False)
        finally:
            os._exit(1)
    os.kill(helper, signal.SIGTERM)
    ended = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    dist.barrier()  # This process goes on.
    dist.destroy_process_group()
    tell("ready")
    wait_for_it(ready=False) if ended == -signal.SIGTERM else None
    return ended


def test_a_helper_ends_alone_and_after_the_end_it_is_as_before(world):
    [rank] = world.start(with_helpers, 1)
    assert rank.told() == "ready"
    rank.signal(signal.SIGTERM)
    assert rank.wait() == -signal.SIGTERM


PROGRAM = """
import os, signal, time
import torch.distributed as dist
dist.init_process_group("resilient")
store = dist.distributed_c10d._get_default_store()
dist.barrier()
if dist.get_rank() == 1:
    store.wait(["past the barrier/0", "past the barrier/2"])
    os.kill(os.getpid(), signal.SIGKILL)
store.set(f"past the barrier/{dist.get_rank()}", "")
until = time.monotonic() + 40
while time.monotonic() < until:
    sum(range(10_000))
"""


def test_under_torchrun_each_other_rank_says_why(tmp_path):
    script = Path(tmp_path) / "train.py"
    script.write_text(PROGRAM)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    command += ["--master-addr=127.0.0.1", f"--master-port={harness.free_port()}", str(script)]
    run = subprocess.run(
        command,
        env={**kept, "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s"},
        capture_output=True,
        text=True,
        timeout=TORCHRUN_SECONDS,
    )
    assert run.returncode == 1
    for number in (0, 2):
        told = (
            f"rank {number}: SIGTERM ends this rank; what came first: [resilient:RANK_LOST] rank 1 "
        )
        assert run.stderr.count(told) == 1, run.stderr
        own = [
            text
            for text in run.stderr.splitlines()
            if f"W rank {number}: incident {{" in text and '"code": "RANK_LOST"' in text
        ]
        assert len(own) == 1, run.stderr
