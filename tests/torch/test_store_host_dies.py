"""The store's host dies, under each launcher: no survivor waits for ever.

Goal: every rank that is left knows within RESILIENT_BUDGET, a lease and a second, whatever it was
doing. Method: two hosts, made of network namespaces (hosts.py), the store on the first one, beside
rank 0 or where the launcher has it; then the store and rank 0 are killed, or the host vanishes.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import test_run_hosts
from store_access import plain_environment

from torch_resilient import _server

BUDGET_SECONDS = 4.0
network = test_run_hosts.network
LEASE_SECONDS = test_run_hosts.LEASE_SECONDS
KNOWN_SECONDS = BUDGET_SECONDS + LEASE_SECONDS + 1
WATCHDOG_SECONDS = 120
MASTER = "10.2.0.1"
PORT = "29500"  # The namespace is this test's own.
RANKS = 4  # Two on each host.

PROGRAM = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist, torch_resilient

state, go = sys.argv[1], pathlib.Path(sys.argv[2])
rank = int(os.environ["RANK"])
started = go.with_name(f"started-{rank}")
if started.exists():
    signal.pause()  # A replacement that comes no further: what is rebuilt waits for it.
started.touch()
dist.init_process_group("resilient")


def say(line):
    os.write(1, f"rank {rank} {line}\\n".encode())


dist.barrier()
say(f"is {os.getpid()}")
try:
    if state == "idle":
        while not go.exists():
            time.sleep(0.01)
    elif state == "rebuild":
        if rank == 3:
            signal.pause()
        try:
            dist.all_reduce(torch.ones(1))
        except torch_resilient.RankLostError:
            say("rebuilds")
            torch_resilient.rebuild()
    while True:
        dist.all_reduce(torch.ones(1))
except dist.DistError as error:
    say(f"knows {time.monotonic()} {type(error).__name__} {error}")
    sys.exit(1)
"""


class Job:
    """The processes of one job on both hosts, and what they have said."""

    def __init__(self, network, stack):
        self._network, self._stack = network, stack
        self._pipes, self._text = [], ""

    def start(self, host, command, **variables):
        variables = {
            "RESILIENT_BUDGET": f"{BUDGET_SECONDS:g}s",
            "RESILIENT_LEASE_TTL": f"{LEASE_SECONDS:g}s",
            "RESILIENT_SEAT_WAIT": "300s",
            "RESILIENT_LINGER": "2s",
            "RESILIENT_SOCKET_IFNAME": "data",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        process = subprocess.Popen(
            [*self._network.on(host), *map(str, command)],
            env={**plain_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._pipes.append(process.stdout)
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait)
        return process

    def until(self, pattern, count, seconds):
        """That many matches of the pattern in what was said."""
        deadline = time.monotonic() + seconds
        while len(found := re.findall(pattern, self._text)) < count:
            ready, _, _ = select.select(self._pipes, [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{len(found)} of {count} {pattern!r} within {seconds} s:\n{self._text}"
            for pipe in ready:
                if data := os.read(pipe.fileno(), 1 << 16):
                    self._text += data.decode(errors="replace")
                else:
                    self._pipes.remove(pipe)
        return found


def on_host(network, number):
    """{number: command line} of the processes in that host's network, but those that make it."""
    name = os.readlink(f"/proc/{network.pid(number)}/ns/net")
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") == name:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    found[int(pid)] = file.read().decode(errors="replace")
    return {pid: line for pid, line in found.items() if "rank_server" not in line}


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(network):
    with contextlib.ExitStack() as stack:
        try:
            yield Job(network, stack)
        finally:
            kill([pid for host in (0, 1) for pid in on_host(network, host)])


def plain(job, program):
    for rank in range(RANKS):
        local = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), **local}
        where = {"MASTER_ADDR": MASTER, "MASTER_PORT": PORT}
        job.start(rank // 2, [sys.executable, *program], **variables, **where)


def torchrun(job, program):
    for node in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank"]
        command += [node, "--nproc-per-node", 2, "--master-addr", MASTER, "--master-port", PORT]
        job.start(node, [*command, *program])


def resilient_run(job, program):
    serve = [_server.binary(), "serve", "--listen", f"{MASTER}:{PORT}", "--log-level", "warn"]
    job.start(0, [*serve, "--lease-ttl", f"{LEASE_SECONDS:g}s"])
    for node in (0, 1):
        command = [sys.executable, "-m", "torch_resilient.run", "--nnodes", 2, "--node-rank", node]
        command += ["--nproc", 2, "--store", f"{MASTER}:{PORT}", "--job", "night"]
        job.start(node, [*command, "--max-restarts", 3, *program])


def die(network, death, ranks, launcher):
    """Returns when, and which ranks are left: launchers end what else they have on that host."""
    before = time.monotonic()
    if death == "host":
        for link in ("ctl", "data"):
            network.down(link, 0)
        kill(on_host(network, 0))
        return before, {2, 3}
    stores = [pid for pid, line in on_host(network, 0).items() if "resilient-store\0serve" in line]
    assert len(stores) == 1
    kill([*stores, ranks[0]])
    return before, {1, 2, 3} if launcher == "plain" else {2, 3}


# In `make soak` all of them; in between, each launcher, each state and each death.
SHORT = {
    ("plain", "collective", "host"),
    ("torchrun", "idle", "store and rank"),
    ("resilient_run", "rebuild", "host"),
}
LAUNCHERS = {"plain": plain, "torchrun": torchrun, "resilient_run": resilient_run}
CASES = [
    pytest.param(
        *case, marks=pytest.mark.slow if case in SHORT else pytest.mark.soak, id="-".join(case)
    )
    for case in [
        (launcher, state, death)
        for launcher in LAUNCHERS
        for state in ("collective", "idle", "rebuild")
        for death in ("host", "store and rank")
        # torchrun ends all ranks of a host where one ends: none of them rebuilds.
        if (launcher, state) != ("torchrun", "rebuild")
    ]
]


@pytest.mark.parametrize(("launcher", "state", "death"), CASES)
def test_every_survivor_knows(tmp_path, network, job, launcher, state, death):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    go = tmp_path / "go"
    LAUNCHERS[launcher](job, [program, state, go])
    said = job.until(r"rank (\d) is (\d+)", RANKS, 90)
    ranks = {int(rank): int(pid) for rank, pid in said}
    if state == "rebuild":
        kill([ranks[3]])
        job.until(r"rank \d rebuilds", 3, 30)
    since, left = die(network, death, ranks, launcher)
    left -= {3} if state == "rebuild" else set()
    if state == "idle":
        go.touch()
    wanted = "".join(map(str, left))
    told = job.until(rf"rank ([{wanted}]) knows ([\d.]+) (\w+)", len(left), WATCHDOG_SECONDS)
    assert {int(rank) for rank, _, _ in told} == left
    for rank, when, name in told:
        assert name in ("StoreLostError", "RankLostError"), told
        assert float(when) - since < KNOWN_SECONDS, (rank, told)
