"""Fixtures for tests with real rank processes."""

import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(1, os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))

import harness


@pytest.fixture(scope="session", autouse=True)
def subreaper():
    harness.become_subreaper()


@pytest.fixture(scope="session")
def rank_server(subreaper):
    server = harness.Server.launch()
    yield server
    server.close()


@pytest.fixture(scope="session")
def store(subreaper):
    """Address of one store for the whole session; each world is a job of its own there."""
    from torch_resilient import _server

    command = [_server.binary(), "serve", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--print-address", "--parent-death"], stdout=subprocess.PIPE, text=True
    )
    yield process.stdout.readline().split()[0]
    process.terminate()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def world(rank_server, store):
    """Runs ranks; see harness.World."""
    world = harness.World(rank_server, store)
    yield world
    left = world.close()
    if left:
        pytest.fail("still running at the end of the test:\n" + "\n".join(left))


@pytest.fixture(autouse=True)
def no_leftovers(subreaper, request):
    """Every process that a test has started ends with it, also detached ones."""
    for name in ("rank_server", "store"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    known = set(harness.children())
    yield
    left = harness.collect_orphans(known)
    if left:
        pytest.fail(f"processes were left behind (and killed now): {left}")
