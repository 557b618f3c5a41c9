"""resilient-run on two hosts, made of network namespaces (hosts.py): a rank is replaced, a spare of
the other host takes a seat, and a host goes away with its launcher and all that this has started.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import hosts
import pytest
from launching import events, line_with
from test_run_nodes import children, job, stop

from torch_resilient import _server

NAMES = ("alpha", "beta")
LEASE_SECONDS = 2.0
RECOVERY_SECONDS = 10.0  # Of both, beside what else runs on the machine; semantics say 2 and 1.
# Says where it stands at each entry, until all are told by a file that it is enough.
RUNS = """
import os, pathlib, socket
import torch, torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")
enough = pathlib.Path(__file__).with_name("enough")


def train(state):
    place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    generation = torch_resilient.membership()["generation"]
    os.write(1, f"{socket.gethostname()}: {place} in {generation}\\n".encode())
    told = torch.zeros(1)
    while not told:
        told.fill_(enough.exists())
        dist.all_reduce(told)
        state.step += 1
        state.commit()


torch_resilient.elastic(train)(torch_resilient.State(step=0))
dist.destroy_process_group()
"""


def left_in(folder, **more):
    """An environment: nobody is left on a host that goes away to clear up."""
    return {"TMPDIR": str(folder), **more}


@pytest.fixture
def network(namespaces, rank_server):
    network = hosts.Network(rank_server, NAMES, (4,), lease=f"{LEASE_SECONDS:g}s")
    yield network
    network.close()


def script(tmp_path):
    path = tmp_path / "runs.py"
    path.write_text(RUNS)
    return path


def pid_of(log, number):
    return [e["pid"] for e in events(log) if (e["event"], e.get("rank")) == ("started", number)][-1]


def await_spares(network, count):
    """Returns once so many processes wait at the store."""
    command = [*network.on(0), _server.binary(), "members", "--store", network.store.address]
    command += ["--job", "night", "--json"]
    until = time.monotonic() + 60
    while time.monotonic() < until:
        told = subprocess.run(command, capture_output=True, check=True, timeout=10)
        if sum(member["state"] == "spare" for member in json.loads(told.stdout)) == count:
            return
    raise AssertionError(f"there are not {count} spares: {told.stdout}")


def power_failure(network, number, launcher):
    """The host is gone: nobody on it says a last word. Returns the time before."""
    before = time.monotonic()
    for link in ("ctl", "data"):
        network.down(link, number)
    stop(launcher)
    for pid in children(launcher.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait(60)
    return before


def test_seats_go_from_host_to_host(tmp_path, network):
    """And back, and then there is one host."""
    logs = [tmp_path / "events0", tmp_path / "events1"]
    each = [["--spares", 1, "--events", logs[0]], ["--events", logs[1]]]
    with job(
        [1, 1], script(tmp_path), each=each, network=network, env=left_in(tmp_path), seconds=90
    ) as both:
        alpha, beta = both.launchers
        line_with(alpha, "stdout", "alpha: rank 0 of 2 in 1")
        line_with(beta, "stdout", "beta: rank 1 of 2 in 1")
        await_spares(network, 1)
        os.kill(pid_of(logs[1], 1), signal.SIGKILL)
        line_with(alpha, "stdout", "alpha: rank 1 of 2 in 2")
        await_spares(network, 1)  # What has replaced it on beta.
        os.kill(pid_of(logs[0], 0), signal.SIGKILL)
        line_with(beta, "stdout", "beta: rank 0 of 2 in 3")
        await_spares(network, 1)
        killed = power_failure(network, 1, beta)
        line_with(alpha, "stdout", "alpha: rank 0 of 2 in 4")
        assert time.monotonic() - killed < LEASE_SECONDS + 1 + RECOVERY_SECONDS
        (tmp_path / "enough").touch()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, -9], ends


@pytest.mark.slow
def test_a_rank_is_replaced_and_a_host_is_done_without(tmp_path, network):
    log = tmp_path / "events1"
    each = [["--max-restarts", 0], ["--max-restarts", 1, "--events", log]]
    at = {
        "seconds": 90,
        "each": each,
        "network": network,
        "env": left_in(tmp_path, RESILIENT_SEAT_WAIT="10s"),
    }
    with job([1, 1], "--min-world", 1, script(tmp_path), **at) as both:
        alpha, beta = both.launchers
        line_with(beta, "stdout", "beta: rank 1 of 2 in 1")
        os.kill(pid_of(log, 1), signal.SIGKILL)
        line_with(beta, "stdout", "beta: rank 1 of 2 in 2")
        line_with(alpha, "stdout", "alpha: rank 0 of 2 in 2")
        killed = power_failure(network, 1, beta)
        line_with(alpha, "stdout", "alpha: rank 0 of 1 in 3")
        assert time.monotonic() - killed < LEASE_SECONDS + 1 + 10 + RECOVERY_SECONDS
        (tmp_path / "enough").touch()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, -9], ends


def test_without_a_host_the_job_ends_and_says_so(tmp_path, network):
    at = {"seconds": 90, "network": network, "env": left_in(tmp_path, RESILIENT_SEAT_WAIT="1s")}
    with job([1, 1], "--max-restarts", 0, script(tmp_path), **at) as both:
        alpha, beta = both.launchers
        line_with(alpha, "stdout", "alpha: rank 0 of 2 in 1")
        killed = power_failure(network, 1, beta)
        ends = both.finish()
        assert time.monotonic() - killed < LEASE_SECONDS + 1 + 1 + RECOVERY_SECONDS
    assert [code for code, _, _ in ends] == [1, -9], ends
    assert re.search(r"RankLostError: \[resilient:RANK_LOST\] rank 1 .*beta", ends[0][2]), ends
    assert "ended with exit code 1; all 0 restarts are used; ending the job" in ends[0][2]
