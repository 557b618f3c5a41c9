"""Every way in which a rank may end is a loss that heals, and every other rank is told what it was.

A rank ends at step 3 of an elastic run (end_program.py); it is replaced by resilient-run, or by
hand, as a pod would be. Nobody begins at step 0 again."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import harness
import pytest
from launching import run
from store_shell import until

PROGRAM = os.path.join(os.path.dirname(__file__), "end_program.py")
RANKS = 3
# The way, and what the survivors are told, by the dying rank or by who saw its end.
TOLD = {
    "raise": r"ended by RuntimeError: CUDA out of memory \(pretended\) \(end_program.py:\d+\)",
    "slow": r"ended by RuntimeError: CUDA out of memory \(pretended\) \(end_program.py:\d+\)",
    "exit": r"ended by sys.exit\(3\) \(end_program.py:\d+\)",
    "system_exit": r"ended by SystemExit\(5\) \(end_program.py:\d+\)",
    "thread": r"ended by RuntimeError: in a thread \(end_program.py:\d+\), then sys.exit\(4\)",
    "loader": r"ended by ValueError: .*end_program.py:\d+\)",
    "backward": r"ended by RuntimeError: in backward \(end_program.py:\d+\)",
    "int": r"ended by KeyboardInterrupt \(end_program.py:\d+\)",
    "os_exit": r"ended by os._exit\(6\) \(end_program.py:\d+\)",
    "abort": r"(signal 6 \(SIGABRT\)|its process ended|lost its connection)",
    "term": r"(signal 15 \(SIGTERM\)|its process ended|lost its connection)",
    "quit": r"(signal 3 \(SIGQUIT\)|its process ended|lost its connection)",
    "kill": r"(signal 9 \(SIGKILL\)|its process ended|lost its connection)",
    "leave": r"(has left|exited with code 1)",
}
WHERE = ("collective", "idle", "commit")


def check(way, text):
    """`text`: what all processes have said."""
    begun = re.findall(r"rank (\d) begins at step (\d+)", text)
    assert sorted(rank for rank, step in begun if step == "0") == ["0", "1", "2"], text
    assert [rank for rank, step in begun if step != "0"].count("1") == 1, text
    assert len(re.findall(r"rank \d done", text)) == RANKS, text
    told = [line for line in text.splitlines() if re.search("FENCED (RANK_LOST|LEFT) ", line)]
    assert len([line for line in told if re.search(TOLD[way], line)]) >= RANKS - 1, text


def launched(tmp_path, way, where):
    arguments = ["--nproc", RANKS, PROGRAM, tmp_path / "mark", way, where]
    code, stdout, stderr = run(*arguments, seconds=90)
    assert code == 0, stdout + stderr
    assert "(1 of 3 restarts)" in stderr and "2 of 3" not in stderr, stderr
    check(way, stdout)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def by_hand(tmp_path, way, where, store="", host=None):
    """Plain variables; as pods, with a `store` that outlives them. `host`: the rank that starts the
    store; None: any."""
    port = harness.free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RESILIENT_SEAT_WAIT": "60s",
        "OMP_NUM_THREADS": "1",
        "RESILIENT_LINGER": "5s",
    }
    said = open(tmp_path / "said", "w+")  # noqa: SIM115
    with contextlib.ExitStack() as stack:
        stack.callback(said.close)
        if store:
            common |= {"RESILIENT_STORE": store, "RESILIENT_JOB": str(tmp_path)}
        command = [sys.executable, PROGRAM, str(tmp_path / "mark"), way, where]

        def start(rank):
            environment = {**common, "RANK": str(rank)}
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
            stack.callback(lambda: process.poll() is None and process.kill())
            return process

        ranks = [None] * RANKS
        if host is not None:
            ranks[host] = start(host)
            until(lambda: listens(port), "the store listens")
        ranks = [rank or start(number) for number, rank in enumerate(ranks)]
        assert ranks[1].wait(60) != 0
        ranks[1] = start(1)
        deadline = time.monotonic() + 60
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in ranks:
                rank.wait(max(deadline - time.monotonic(), 0.1))
        text = (tmp_path / "said").read_text()
        assert [rank.poll() for rank in ranks] == [0] * RANKS, text
    check(way, text)


@pytest.mark.parametrize(("way", "where"), [("raise", "commit")])
def test_is_healed_by_the_launcher(tmp_path, way, where):
    launched(tmp_path, way, where)


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", TOLD)
@pytest.mark.parametrize("start", ["resilient-run", "plain", "pods"])
def test_each_way(tmp_path, store, start, way, where):
    if start == "resilient-run":
        launched(tmp_path, way, where)
    else:
        by_hand(tmp_path, way, where, store if start == "pods" else "")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["leave", "kill"])
def test_whoever_hosts_the_store_is_replaced(tmp_path, way):
    by_hand(tmp_path, way, "collective", host=1)


REPLACES_ITSELF = """
import os, sys, torch, torch.distributed as dist, torch_resilient
from torch_resilient import State, elastic

dist.init_process_group("resilient")
rank = dist.get_rank()

def say(line):
    os.write(1, f"{line}\\n".encode())

torch_resilient.on_event(lambda event: event["event"] == "fenced" and say(f"FENCED on {rank}"))

def train(state):
    while state.step < 6:
        if rank == 1 and state.step == 3 and "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()

elastic(train)(State(step=0))
say(f"rank {rank} done")
dist.destroy_process_group()
"""


def test_a_program_that_replaces_itself_is_the_replacement(world, tmp_path):
    """By exec: the number of the process stays."""
    program = tmp_path / "program.py"
    program.write_text(REPLACES_ITSELF)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **world.environment(rank, RANKS, {"RESILIENT_SEAT_WAIT": "60s"})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate(timeout=90) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said
    for rank, (stdout, _) in enumerate(said):
        fences = [] if rank == 1 else [f"FENCED on {rank}"]
        assert sorted(stdout.splitlines()) == [*fences, f"rank {rank} done"], said


AGAIN = """
import torch, torch.distributed as dist, torch_resilient
dist.init_process_group("resilient")
def train(state):
    while state.step < 6:
        dist.all_reduce(torch.ones(2))
        if state.step == 3 and dist.get_rank() == 1:
            raise RuntimeError("always here")
        state.step += 1
        state.commit()
torch_resilient.elastic(train)(torch_resilient.State(step=0))
"""


def test_the_same_exception_at_the_same_commit_is_not_tried_a_third_time(tmp_path):
    program = tmp_path / "again.py"
    program.write_text(AGAIN)
    code, _, stderr = run("--nproc", 2, program, seconds=90)
    assert code == 1, stderr
    assert "RuntimeError: always here (again.py:8) has ended a rank twice at commit" in stderr
    assert "(1 of 3 restarts)" in stderr and "2 of 3" not in stderr, stderr
