"""Fixtures for tests with real rank processes."""

import subprocess

import harness
import hosts
import pytest


@pytest.fixture(scope="session")
def rank_server(subreaper):
    server = harness.Server.launch()
    yield server
    server.close()


@pytest.fixture(scope="session")
def store(subreaper):
    """Address of one store for the whole session; each world is a job of its own there."""
    yield from serve()


@pytest.fixture(scope="session")
def quick_store(subreaper):
    """One with leases of two seconds."""
    yield from serve("--lease-ttl", "2")


def serve(*options):
    from torch_resilient import _server

    command = [_server.binary(), "serve", "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(
        [*command, "--print-address", "--parent-death"], stdout=subprocess.PIPE, text=True
    )
    yield process.stdout.readline().split()[0]
    process.terminate()
    process.wait(10)
    process.stdout.close()


@pytest.fixture(scope="session")
def namespaces():
    if why := hosts.refusal():
        pytest.skip(f"no network namespaces here: {why}")


@pytest.fixture
def world(rank_server, store):
    """Runs ranks; see harness.World."""
    yield from world_at(rank_server, store)


@pytest.fixture
def quick_world(rank_server, quick_store):
    """The same with leases of two seconds."""
    yield from world_at(rank_server, quick_store)


def world_at(rank_server, store):
    world = harness.World(rank_server, store)
    yield world
    left = world.close()
    if left:
        pytest.fail("still running at the end of the test:\n" + "\n".join(left))
