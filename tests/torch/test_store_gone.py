"""The store is gone for good: what runs goes on, and no wait has its only end in a word of a store
that is dead. A rank that is needed and gone ends the wait within RESILIENT_BUDGET and a lease."""

import os
import re
import signal
import time

import conftest
import pytest
import test_hosts
import torch
import torch.distributed as dist
from rank_server import hear, tell
from store_support import ResilientServer
from tensors import joined

import torch_resilient

BUDGET_SECONDS = 3.0
LEASE_SECONDS = 2.0
ENV = {"RESILIENT_BUDGET": f"{BUDGET_SECONDS:g}s"}
KNOWN_SECONDS = BUDGET_SECONDS + LEASE_SECONDS + 1
WATCHDOG_SECONDS = 120

network, spread = test_hosts.network, test_hosts.spread


@pytest.fixture
def server(subreaper):
    with ResilientServer("--lease-ttl", f"{LEASE_SECONDS:g}") as server:
        yield server


@pytest.fixture
def orphans(rank_server, server):
    """A world whose store can be killed."""
    yield from conftest.world_at(rank_server, server.address)


def reduce_until_told(operation="all_reduce"):
    """Steps with the others, one for each "step" of the test; tells what ended them."""
    rank, size = joined()
    tell("ready")
    try:
        while hear() == "step":
            tensor = torch.full((10,), float(rank))
            if operation == "all_reduce":
                dist.all_reduce(tensor)
                assert tensor.eq(sum(range(size))).all()
            elif rank == 0:
                dist.recv(tensor, 1)
            elif rank == 1:
                dist.send(tensor, 0)
            tell("done")
    except dist.DistError as error:
        return type(error).__name__, str(error), time.monotonic()
    dist.destroy_process_group()
    return "left"


def started(world, size, *args, env=None):
    ranks = world.start(reduce_until_told, size, *args, env={**ENV, **(env or {})})
    for rank in ranks:
        assert rank.told() == "ready"
    return ranks


def step(ranks):
    for rank in ranks:
        rank.say("step")


def check_store_lost(rank, server, of_rank, since, bound=KNOWN_SECONDS):
    name, text, when = rank.value(WATCHDOG_SECONDS)
    assert name == "StoreLostError", text
    assert text.startswith("[resilient:STORE_LOST]"), text
    assert f"the store at {server.address} has not answered for" in text, text
    assert re.search(rf"rank {of_rank} \(host \S+, pid \d+\)", text), text
    assert when - since < bound, text


@pytest.mark.parametrize(
    "way", ["in the operation", pytest.param("before it", marks=pytest.mark.slow), "sigstop"]
)
def test_a_rank_that_is_gone_with_the_store_ends_the_wait(orphans, server, way):
    ranks = started(orphans, 3)
    step(ranks)
    assert [rank.told() for rank in ranks] == ["done"] * 3
    survivors = [ranks[0], ranks[2]]
    if way == "in the operation":
        step(survivors)
    begun = time.monotonic()
    server.kill()
    ranks[1].signal(signal.SIGSTOP if way == "sigstop" else signal.SIGKILL)
    if way != "in the operation":
        step(survivors)
    # The first of them to be sure ends, and with it what the other one waits for.
    texts = [rank.value(WATCHDOG_SECONDS) for rank in survivors]
    for name, text, when in texts:
        assert name == "StoreLostError" and when - begun < KNOWN_SECONDS, text
        assert f"the store at {server.address} has not answered for" in text, text
    told = r"gives no answer over the network" if way == "sigstop" else r"has gone"
    assert any(re.search(rf"rank 1 \(host \S+, pid \d+\) {told}", text) for _, text, _ in texts)
    if way == "sigstop":
        ranks[1].signal(signal.SIGKILL)
        ranks[1].wait()


@pytest.mark.slow
def test_a_message_of_a_rank_that_is_gone_is_not_waited_for(orphans, server):
    ranks = started(orphans, 3, "recv")
    begun = time.monotonic()
    server.kill()
    ranks[1].signal()
    ranks[0].say("step")
    check_store_lost(ranks[0], server, 1, begun)
    # It waits for nobody, and is told nothing.
    ranks[2].say("step")
    assert ranks[2].told() == "done"
    ranks[2].say("leave")
    assert ranks[2].value() == "left"


def test_a_rank_that_lives_is_waited_for(orphans, server):
    ranks = started(orphans, 3)
    server.kill()
    step(ranks[:2])
    # Late by more than what a rank that is gone would get.
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(KNOWN_SECONDS + 2)
    step(ranks[2:])
    assert [rank.told() for rank in ranks] == ["done"] * 3
    for rank in ranks:
        rank.say("leave")
    assert [rank.value(WATCHDOG_SECONDS) for rank in ranks] == ["left"] * 3


def rebuild_when_lost():
    rank, _ = joined()
    tell("ready")
    if rank == 1:
        hear()  # Until it is killed.
    try:
        dist.all_reduce(torch.ones(4))
    except torch_resilient.RankLostError:
        tell("lost")
    hear()
    begun = time.monotonic()
    try:
        torch_resilient.rebuild()
    except torch_resilient.StoreLostError as error:
        return str(error), time.monotonic() - begun
    return "rebuilt", 0.0


def test_a_rebuild_without_a_store_ends(orphans, server):
    env = {**ENV, "RESILIENT_SEAT_WAIT": "60s"}
    ranks = orphans.start(rebuild_when_lost, 3, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    survivors = [ranks[0], ranks[2]]
    for rank in survivors:
        assert rank.told() == "lost"
    server.kill()
    for rank in survivors:
        rank.say("rebuild")
    for rank in survivors:
        text, seconds = rank.value(WATCHDOG_SECONDS)
        assert "the world cannot be rebuilt without it" in text, text
        assert "[resilient:RANK_LOST]" in text, text
        assert seconds < KNOWN_SECONDS, text


@pytest.mark.slow
def test_a_host_that_goes_with_the_store_ends_the_wait(network, spread):
    """Silently: nothing says that its links have ended."""
    budget = test_hosts.LEASE_SECONDS + 1
    ranks = spread.start(reduce_until_told, 4, env={"RESILIENT_BUDGET": f"{budget:g}s"})
    for rank in ranks:
        assert rank.told() == "ready"
    step(ranks[:2])
    begun = time.monotonic()
    network.down("ctl", 1)
    network.kill(1)
    os.kill(network.store.process.pid, signal.SIGKILL)
    bound = budget + test_hosts.LEASE_SECONDS + 1
    texts = [rank.value(WATCHDOG_SECONDS) for rank in ranks[:2]]
    for name, text, when in texts:
        assert name == "StoreLostError" and when - begun < bound, text
    assert any("gives no answer over the network" in text for _, text, _ in texts), texts
