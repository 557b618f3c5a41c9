"""Goal: a resolver that hangs keeps no rank and no launcher for longer than they mean to wait, and
Ctrl-C ends the wait at once. Method: real processes with a preloaded library whose lookups hang for
as long as a file exists (tests/support/stuck_calls.cc); for the Python part alone a lookup that the
test holds up."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import pytest

from torch_resilient import _resolver

STUCK_CALLS = Path(__file__).resolve().parents[2] / "build" / "tests" / "libstuck_calls.so"
PATIENCE = 60
SOON = 15  # An import of torch included.


class Stuck:
    """A resolver that hangs, for processes that are started with `env`."""

    def __init__(self, folder):
        self._while = folder / "stuck"
        self._hit = folder / "stuck.hit"
        self._while.touch()
        self.env = {"LD_PRELOAD": str(STUCK_CALLS), "STUCK_WHILE": str(self._while)}

    def await_hit(self):
        deadline = time.monotonic() + PATIENCE
        while not self._hit.exists():
            assert time.monotonic() < deadline, "no lookup hangs"
            time.sleep(0.01)

    def release(self):
        self._while.unlink(missing_ok=True)


@pytest.fixture
def stuck(tmp_path):
    if not STUCK_CALLS.exists():
        pytest.skip(f"no {STUCK_CALLS}: build with RESILIENT_BUILD_TESTS")
    if os.environ.get("LD_PRELOAD"):
        pytest.skip("a sanitizer's runtime has to be loaded first")
    made = Stuck(tmp_path)
    yield made
    made.release()


def started(command, env):
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


INIT = """
import datetime, sys, torch.distributed as dist, torch_resilient
try:
    dist.init_process_group("resilient", timeout=datetime.timedelta(seconds=2))
except torch_resilient.ConnectError as error:
    print("ConnectError", error, flush=True)
"""


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_init_ends_at_its_deadline_and_says_that_the_name_is_not_resolved(
    world, stuck, given, rank
):
    port = str(harness.free_port())
    where = {"RESILIENT_STORE": f"localhost:{port}"} if given else {"RESILIENT_STORE": ""}
    env = world.environment(
        rank, 2, {**where, "MASTER_ADDR": "localhost", "MASTER_PORT": port, **stuck.env}
    )
    process = started([sys.executable, "-c", INIT], env)
    stuck.await_hit()
    stdout, stderr = process.communicate(timeout=SOON)  # The lookup that hangs keeps it not.
    assert stdout.startswith("ConnectError [resilient:RESOLVE]"), (stdout, stderr)
    assert "the name 'localhost' is not resolved: the resolver of this host" in stdout


KNOCK = """
import torch_resilient
try:
    torch_resilient.Store("localhost:9", timeout=600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_store_that_waits_for_a_name(world, stuck):
    env = world.environment(0, 1, stuck.env)
    process = started([sys.executable, "-c", KNOCK], env)
    stuck.await_hit()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=SOON)
    assert stdout == "interrupted\n", (stdout, stderr)


def test_ctrl_c_ends_a_launcher_that_waits_for_a_name(world, stuck):
    run = [sys.executable, "-m", "torch_resilient.run", "--nnodes", "2", "--node-rank", "1"]
    command = [*run, "--store", "localhost:9", "--job", "names", "--nproc", "1", os.devnull]
    process = started(command, world.environment(0, 1, stuck.env))
    stuck.await_hit()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode != 0


# ---- The Python part alone


class Held:
    """socket.getaddrinfo of names, held up until `answer` is set."""

    def __init__(self, monkeypatch):
        self.answer = threading.Event()
        self.asked = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._ask)

    def _ask(self, host, *args, flags=0, **options):
        if flags & socket.AI_NUMERICHOST:
            return self._real(host, *args, flags=flags, **options)
        self.asked.append(host)
        self.answer.wait(PATIENCE)
        return self._real("127.0.0.1", *args, **options)


@pytest.fixture
def held(monkeypatch):
    made = Held(monkeypatch)
    yield made
    made.answer.set()


def within(seconds):
    return time.monotonic() + seconds


def test_numbers_are_asked_of_nobody(held):
    assert _resolver.addresses("10.1.2.3", within(0)) == ("10.1.2.3",)
    assert _resolver.addresses("::1", within(0)) == ("::1",)
    assert not held.asked


def test_who_waits_ends_at_the_deadline_and_later_ones_join_the_lookup(held):
    with pytest.raises(_resolver.NoAnswerError, match=r"'a-name' is not resolved: .* for \d\.\d s"):
        _resolver.addresses("a-name", within(0.2))
    joining = []
    with pytest.raises(_resolver.NoAnswerError):
        _resolver.addresses("a-name", within(0.01))
    assert held.asked == ["a-name"]
    thread = threading.Thread(
        target=lambda: joining.append(_resolver.addresses("a-name", within(PATIENCE)))
    )
    thread.start()
    assert not joining
    held.answer.set()
    thread.join(PATIENCE)
    assert joining == [("127.0.0.1",)]
    asked = len(held.asked)
    assert _resolver.addresses("a-name", within(PATIENCE)) == ("127.0.0.1",)
    assert held.asked == ["a-name"] * (asked + 1), "the next one asks again"


def test_a_forked_child_asks_for_itself(held):
    with pytest.raises(_resolver.NoAnswerError):
        _resolver.addresses("forked", within(0.01))
    child = os.fork()
    if child == 0:
        held.answer.set()
        os._exit(0 if _resolver.addresses("forked", within(PATIENCE)) == ("127.0.0.1",) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_name_without_an_address_is_told():
    with pytest.raises(socket.gaierror):
        _resolver.addresses("no-such-host.invalid", within(PATIENCE))
    with pytest.raises(socket.gaierror):
        _resolver.addresses("a" * 300, within(PATIENCE))
