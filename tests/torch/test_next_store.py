"""The store is lost, and another one answers: elastic goes on there from the commits that the ranks
hold in their memory.

Method: ranks make steps until the test stops them, each with a sum of its own. Meanwhile their
store ends and another one begins: at the same address with nothing kept, at another address of the
list, or started by the ranks themselves. The sums say that no step was lost or made twice.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import conftest
import harness
import hosts
import launching
import pytest
import test_run_nodes
import torch
import torch.distributed as dist
from rank_server import hear, tell
from store_shell import Store
from store_support import ResilientServer

import torch_resilient
from torch_resilient import _server

BUDGET_SECONDS = 3.0
LEASE_SECONDS = 2.0
ENV = {
    "RESILIENT_BUDGET": f"{BUDGET_SECONDS:g}s",
    "RESILIENT_LEASE_TTL": f"{LEASE_SECONDS:g}s",  # Of stores that ranks start,
    "RESILIENT_LINGER": "1s",  # and of no others.
}
WATCHDOG_SECONDS = 120
STEPS = 20  # Of each call of the function, before a rank tells of them.


@pytest.fixture
def servers(subreaper):
    """Makes stores that can be killed."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(ResilientServer("--lease-ttl", f"{LEASE_SECONDS:g}"))


@pytest.fixture
def world_of(rank_server):
    """Makes the world whose store is at these addresses."""
    with contextlib.ExitStack() as stack:
        make = contextlib.contextmanager(conftest.world_at)
        yield lambda *addresses: stack.enter_context(make(rank_server, ",".join(addresses)))


@pytest.fixture
def stop(tmp_path):
    """The file whose presence ends the training."""
    return tmp_path / "stop"


def trains(stop, keep_per_rank="store", group_before=False):
    """Returns the steps, their sum, this rank's own sum, and how often the function was called; or
    what ended it."""
    dist.init_process_group("resilient")
    if group_before:
        dist.new_group([0])
    calls = 0
    state = torch_resilient.State(
        total=torch.zeros(1), step=0, per_rank={"own": 0}, keep_per_rank=keep_per_rank
    )

    @torch_resilient.elastic
    def train(state):
        nonlocal calls
        calls += 1
        first = state.step
        everybody = dist.new_group()  # As a program's own groups are: made inside.
        go_on = True
        while go_on:
            stopped = dist.get_rank() == 0 and os.path.exists(stop)
            tensor = torch.tensor([dist.get_rank() + 1.0, stopped])
            dist.all_reduce(tensor, group=everybody)
            state.total += tensor[0]
            state.step += 1
            state.own += dist.get_rank() + 1
            state.commit()
            if state.step == first + STEPS:
                tell(calls)
            go_on = not tensor[1]
        return state.step, state.total.item(), state.own

    try:
        result = train(state)
    except torch_resilient.StoreLostError as error:
        return str(error)
    dist.destroy_process_group()
    return *result, calls


def await_steps(ranks, *calls):
    """All have made STEPS in this call of the function: its number on all ranks, or on each."""
    assert [rank.told(WATCHDOG_SECONDS) for rank in ranks] == of_each(calls, ranks)


def end(ranks, stop, *calls):
    stop.touch()
    values = [rank.value(WATCHDOG_SECONDS) for rank in ranks]
    steps, size = values[0][0], len(ranks)
    each = size * (size + 1) / 2
    assert values == [
        (steps, steps * each, steps * (rank + 1), call)
        for rank, call in enumerate(of_each(calls, ranks))
    ]


def of_each(calls, ranks):
    return list(calls * (1 if len(calls) > 1 else len(ranks)))


@pytest.mark.parametrize("keep", ["store", "buddy"])
def test_goes_on_at_a_store_that_has_begun_anew(servers, world_of, stop, keep):
    server = servers()
    ranks = world_of(server.address).start(trains, 3, stop, keep, env=ENV)
    for call in range(1, 4):
        await_steps(ranks, call)
        server.kill()
        server.start()  # At the same address, with nothing of the one before.
    await_steps(ranks, 4)
    end(ranks, stop, 4)


def test_goes_on_at_another_address_of_the_list(servers, world_of, stop):
    first, second = servers(), servers()
    world = world_of(first.address, second.address)
    ranks = world.start(trains, 3, stop, env=ENV)
    await_steps(ranks, 1)
    first.kill()
    await_steps(ranks, 2)
    end(ranks, stop, 2)
    looks = f"looks for the one to go on with, at {first.address}, {second.address}"
    assert all(looks in rank.stderr() for rank in ranks)
    assert all("the ranks have met again at the next store" in rank.stderr() for rank in ranks)


def goes_ahead():
    """Rank 0 asks something of the lost store; the others wait for it in an operation alone."""
    dist.init_process_group("resilient")
    state = torch_resilient.State(step=0)

    @torch_resilient.elastic
    def train(state):
        state.step += 1
        state.commit()
        dist.barrier()
        if state.step == 1:
            tell("ready")
            if dist.get_rank() == 0:
                assert hear() == "lost"
                state.commit()
            dist.barrier()
        return state.step

    return train(state)


def test_a_rank_follows_one_that_has_gone_before_it(servers, world_of):
    """A goodbye is all that the others hear: who asks nothing of the store does not miss it."""
    server = servers()
    ranks = world_of(server.address).start(goes_ahead, 3, env=ENV)
    assert [rank.told(WATCHDOG_SECONDS) for rank in ranks] == ["ready"] * 3
    server.kill()
    ranks[0].say("lost")
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not all("looks for the one to go on with" in rank.stderr() for rank in ranks):
        assert time.monotonic() < deadline, [rank.stderr() for rank in ranks]
        time.sleep(0.05)
    server.start()
    assert [rank.value(WATCHDOG_SECONDS) for rank in ranks] == [2] * 3
    gone_before = r"the store is lost \(no store answers any more; rank [01] \("
    assert all(re.search(gone_before, rank.stderr()) for rank in ranks[1:])


def loses_a_rank_too(servers, world_of, stop, keep):
    """The ranks of a world that has lost its store and rank 1, and has another one of each."""
    server = servers()
    world = world_of(server.address)
    ranks = world.start(trains, 3, stop, keep, env=ENV)
    await_steps(ranks, 1)
    server.kill()
    ranks[1].signal()
    server.start()
    ranks[1] = world.start_rank(trains, 1, 3, stop, keep, env=ENV)
    return ranks


def test_a_rank_that_is_lost_with_the_store_comes_back(servers, world_of, stop):
    ranks = loses_a_rank_too(servers, world_of, stop, "buddy")
    await_steps(ranks, 2, 1, 2)
    end(ranks, stop, 2, 1, 2)


def test_what_only_the_store_had_of_a_rank_is_lost_with_both(servers, world_of, stop):
    for rank in loses_a_rank_too(servers, world_of, stop, "store"):
        text = str(rank.error(WATCHDOG_SECONDS))
        assert text.startswith("[resilient:COMM_FAILED] no commit is complete"), text
        # Of the other commit rank 0 may lack its own: where it had gone ahead by one more.
        assert "the per-rank part of ranks [1] is missing" in text, text
        assert "is missing; it was lost with the store" in text, text


def store_of_ranks():
    """The number of the process that ranks have started as their store."""
    commands = harness.children().items()
    (found,) = [pid for pid, command in commands if "serve --detach" in command]
    return found


def test_the_ranks_start_it_again_where_they_have_started_it(subreaper, world_of, stop):
    port = str(harness.free_port())
    variables = {"RESILIENT_STORE": None, "RESILIENT_JOB": None, "MASTER_PORT": port}
    ranks = world_of("none").start(trains, 3, stop, env={**ENV, **variables})
    await_steps(ranks, 1)
    os.kill(store_of_ranks(), signal.SIGKILL)
    await_steps(ranks, 2)
    end(ranks, stop, 2)


PROGRAM = f"""
import os, sys, torch, torch.distributed as dist, torch_resilient

dist.init_process_group("resilient")
state = torch_resilient.State(total=torch.zeros(1), step=0, keep_per_rank=sys.argv[2])

@torch_resilient.elastic
def train(state):
    first = state.step
    go_on = True
    while go_on:
        stopped = dist.get_rank() == 0 and os.path.exists(sys.argv[1])
        tensor = torch.tensor([1.0, stopped])
        dist.all_reduce(tensor)
        state.total += tensor[0]
        state.step += 1
        state.commit()
        if state.step == first + {STEPS} and dist.get_rank() == 0:
            print(f"{STEPS} steps from {{first}}", flush=True)
        go_on = not tensor[1]

train(state)
assert state.total.item() == state.step * dist.get_world_size()
print("trained", flush=True)
dist.destroy_process_group()
"""
TORCHRUN = ("-m", "torch.distributed.run")


def launched(tmp_path, stop, keep, *options, **others):
    """One that has made the first steps."""
    process = launch(tmp_path, stop, keep, *options, **others)
    launching.line_with(process, "stdout", "steps from 0")
    return process


def launch(tmp_path, stop, keep, *options, **others):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, **ENV, "OMP_NUM_THREADS": "1"}
    return launching.launch(*options, program, stop, keep, env=env, **others)


def trains_to_its_end(process, stop):
    launching.line_with(process, "stdout", "steps from ", WATCHDOG_SECONDS)
    stop.touch()
    stdout, stderr = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 0 and stdout.count("trained") == 2, stdout + stderr


@pytest.mark.slow
def test_under_torchrun(subreaper, tmp_path, stop):
    options = ("--nproc-per-node=2", "--master-port", harness.free_port())
    process = launched(tmp_path, stop, "store", *options, program=TORCHRUN)
    os.kill(store_of_ranks(), signal.SIGKILL)
    trains_to_its_end(process, stop)


@pytest.mark.slow
@pytest.mark.parametrize("a_rank_too", [False, True])
def test_under_resilient_run_with_two_stores(servers, tmp_path, stop, a_rank_too):
    first, second = servers(), servers()
    stores = f"{first.address},{second.address}"
    options = ("--nproc", 2, "--store", stores, "--job", "two-stores")
    process = launched(tmp_path, stop, "buddy", *options)
    first.kill()
    if a_rank_too:
        started = test_run_nodes.children(process.pid)
        (rank,) = [pid for pid in started if b"RANK=1\0" in environment_of(pid)]
        os.kill(rank, signal.SIGKILL)
    trains_to_its_end(process, stop)


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.fixture
def three_hosts(namespaces, rank_server):
    network = hosts.Network(rank_server, ("alpha", "beta", "gamma"), (4,), lease="2s")
    yield network
    network.close()


@contextlib.contextmanager
def store_on(network, host):
    """A store on that host, at `address`."""
    command = (_server.binary(), "--lease-ttl", f"{LEASE_SECONDS:g}")
    store = Store(*command, host=f"10.1.{host}.2", prefix=network.on(host))
    try:
        yield store.listening()
    finally:
        store.end()


@pytest.mark.slow
def test_the_host_of_the_store_is_lost_and_its_node_comes_back_elsewhere(
    three_hosts, subreaper, tmp_path, stop
):
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(store_on(three_hosts, host)) for host in (0, 1))

        def node(number, host):
            options = ("--nnodes", 2, "--node-rank", number, "--nproc", 1)
            options += ("--store", f"{first.address},{second.address}", "--job", "two-hosts")
            process = launch(tmp_path, stop, "buddy", *options, prefix=three_hosts.on(host))
            stack.callback(test_run_nodes.end, process)
            return process

        lost, survives = node(0, 0), node(1, 1)
        launching.line_with(lost, "stdout", "steps from 0")
        three_hosts.down("ctl", 0)
        three_hosts.down("data", 0)
        lost.kill()
        first.end()
        replaced = node(0, 2)
        launching.line_with(replaced, "stdout", "steps from ", WATCHDOG_SECONDS)
        stop.touch()
        for process in (replaced, survives):
            stdout, stderr = process.communicate(timeout=WATCHDOG_SECONDS)
            assert process.returncode == 0 and "trained\n" in stdout, stdout + stderr


def goes_on_with_fewer(stop, min_world):
    dist.init_process_group("resilient")
    state = torch_resilient.State(total=torch.zeros(1), step=0, keep_per_rank="buddy")

    @torch_resilient.elastic(min_world=min_world)
    def train(state):
        go_on, first = True, state.step
        while go_on:
            tensor = torch.tensor([1.0, dist.get_rank() == 0 and os.path.exists(stop)])
            dist.all_reduce(tensor)
            state.total += tensor[0]
            state.step += 1
            state.commit()
            if state.step == first + STEPS:
                tell((dist.get_rank(), dist.get_world_size(), first, state.total.item()))
            go_on = not tensor[1]
        return state.step, state.total.item()

    try:
        return train(state)
    except torch_resilient.StoreLostError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_goes_on_with_fewer_ranks_where_the_program_wants_that(servers, world_of, stop, several):
    """The host of the store, and with it a rank."""
    first, second = servers(), servers()
    addresses = (first.address, second.address)[: 1 + several]
    ranks = world_of(*addresses).start(goes_on_with_fewer, 3, stop, 1, env=ENV)
    assert [rank.told(WATCHDOG_SECONDS)[:3] for rank in ranks] == [(n, 3, 0) for n in range(3)]
    first.kill()
    ranks.pop(1).signal()
    if not several:
        first.start()
    told = [rank.told(WATCHDOG_SECONDS) for rank in ranks]
    at = told[0][2]
    assert told == [(number, 2, at, 3.0 * at + 2 * STEPS) for number in range(2)]
    stop.touch()
    steps, total = ranks[0].value(WATCHDOG_SECONDS)
    assert ranks[1].value(WATCHDOG_SECONDS) == (steps, total) == (steps, 2.0 * steps + at)
    assert all("2 of 3 ranks have met again" in rank.stderr() for rank in ranks)


@pytest.mark.slow
def test_fewer_than_half_of_the_ranks_begin_no_world_where_there_may_be_two(
    servers, world_of, stop
):
    first, second = servers(), servers()
    world = world_of(first.address, second.address)
    ranks = world.start(goes_on_with_fewer, 2, stop, 1, env=ENV)
    assert [rank.told(WATCHDOG_SECONDS)[:3] for rank in ranks] == [(n, 2, 0) for n in range(2)]
    first.kill()
    ranks[1].signal()
    text = ranks[0].value(WATCHDOG_SECONDS)
    assert text.startswith("[resilient:STORE_LOST]") and "missing ranks 1" in text, text


@pytest.mark.slow
def test_ends_with_the_store_where_none_is_found(servers, world_of, stop):
    server = servers()
    ranks = world_of(server.address).start(trains, 2, stop, env=ENV)
    await_steps(ranks, 1)
    begun = time.monotonic()
    server.kill()
    for rank in ranks:
        text = rank.value(WATCHDOG_SECONDS)
        assert text.startswith("[resilient:STORE_LOST]"), text
        assert "the ranks did not meet at another store within 33 s" in text
    assert time.monotonic() - begun < 2 * BUDGET_SECONDS + LEASE_SECONDS + 1 + 33


def test_groups_from_before_the_run_cannot_go_on(servers, world_of, stop):
    server = servers()
    ranks = world_of(server.address).start(trains, 2, stop, "store", True, env=ENV)
    await_steps(ranks, 1)
    server.kill()
    server.start()
    for rank in ranks:
        text = rank.value(WATCHDOG_SECONDS)
        assert text.startswith("[resilient:STORE_LOST]"), text
        assert "all groups are made inside the function that it runs, and 1 were made" in text
