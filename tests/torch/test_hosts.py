"""Ranks on several hosts: the same results as on one, over the interface that was chosen, and the
promises of docs/semantics.md when a link or a host goes away. Hosts are namespaces (hosts.py)."""

import hashlib
import re
import select
import subprocess
import sys
import time

import hosts
import pytest
import rank_server
import test_collectives
import torch
import torch.distributed as dist
from rank_server import hear, tell
from store_shell import until
from tensors import bits, joined

import torch_resilient

NAMES = ("alpha", "beta")
RANKS = 4
LEASE_SECONDS = 3.0
PATIENCE = 30
GRACE_SECONDS = 0.7  # For the exceptions to leave the calls, on a busy machine.
MIB = 1 << 20


@pytest.fixture
def network(namespaces, rank_server, request):
    families = getattr(request, "param", (4, 6))
    network = hosts.Network(rank_server, NAMES, families, lease=f"{LEASE_SECONDS:g}s")
    yield network
    network.close()


@pytest.fixture
def spread(network):
    """A world over both hosts."""
    world = hosts.World(network)
    yield world
    left = world.close()
    if left:
        pytest.fail("still running at the end of the test:\n" + "\n".join(left))


# ---- Results ----


def results():
    """A digest of what each operation gives, of numbers whose sum depends on the order."""
    rank, size = joined()
    random = torch.Generator().manual_seed(rank)
    found = {}

    def note(name, *tensors):
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(bits(tensor).numpy())
        found[name] = digest.hexdigest()

    def fresh(count, dtype=torch.float32):
        return torch.randn(count, generator=random).to(dtype)

    for count in (1, 999, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
                tensor = fresh(count, dtype)
                dist.all_reduce(tensor, op=op)
                note(f"all_reduce {op} {dtype} {count}", tensor)
        tensor = fresh(count)
        dist.reduce(tensor, dst=1)
        note(f"reduce {count}", *([tensor] if rank == 1 else []))
        part, whole = torch.empty(count), torch.empty(size * count)
        dist.reduce_scatter_tensor(part, fresh(size * count))
        note(f"reduce_scatter {count}", part)
        dist.all_gather_into_tensor(whole, fresh(count))
        note(f"all_gather {count}", whole)
        dist.all_to_all_single(whole, fresh(size * count))
        note(f"all_to_all {count}", whole)
        tensor = fresh(count)
        dist.broadcast(tensor, src=2)
        note(f"broadcast {count}", tensor)
        dist.scatter(part, list(fresh(size * count).chunk(size)) if rank == 3 else None, src=3)
        note(f"scatter {count}", part)
        sent = dist.isend(fresh(count), (rank + 1) % size)
        dist.recv(part, (rank - 1) % size)
        sent.wait()
        note(f"send and recv {count}", part)
    dist.destroy_process_group()
    return found


def alone(family, *marks):
    return pytest.param((family,), id=f"IPv{family}", marks=marks)


both = pytest.mark.parametrize("network", [alone(4), alone(6)], indirect=True)
first = pytest.mark.parametrize("network", [alone(4), alone(6, pytest.mark.slow)], indirect=True)


@both
def test_results_are_those_of_one_host_bit_for_bit(network, spread, world):
    before = network.moved("ctl", 0)
    between = spread.run(results, RANKS)
    assert network.moved("ctl", 0) - before > 30 * MIB, "they met elsewhere"
    assert between == world.run(results, RANKS)


@pytest.mark.slow
def test_results_over_several_connections_are_those_over_one(spread):
    env = {"RESILIENT_SOCKET_STREAMS": "3"}
    assert spread.run(results, RANKS, env=env) == spread.run(results, RANKS)


def test_results_over_encrypted_links_are_those_over_plain_ones(spread):
    env = {"RESILIENT_LINK_TLS": "1"}
    assert spread.run(results, RANKS, env=env) == spread.run(results, RANKS)


# Told by the test to count, on stdin, a listener on every interface of its host says in how many
# packets it has seen what it looks for.
LISTENER = """
import select, socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
needle, found = sys.argv[1].encode(), 0
print("listening", flush=True)
while True:
    if select.select([tap, sys.stdin], [], [])[0] == [sys.stdin]:
        break
    found += needle in tap.recv(1 << 16)
print(found)
"""
NEEDLE = "what nobody may read"


def exchange_text():
    rank, _ = joined()
    text = torch.frombuffer(bytearray(NEEDLE.encode() * 1000), dtype=torch.uint8)
    tensor = text.clone() if rank == 0 else torch.zeros_like(text)
    dist.broadcast(tensor, 0)
    other = torch.zeros_like(text)
    if rank == 0:
        dist.send(text, 1)
    elif rank == 1:
        dist.recv(other, 0)
        assert other.equal(text)
    assert tensor.equal(text)
    dist.destroy_process_group()


@pytest.mark.parametrize("encrypted", ["0", "1"])
def test_who_listens_between_the_hosts(network, spread, encrypted):
    command = [*network.on(1), sys.executable, "-c", LISTENER, NEEDLE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as listener:
        assert listener.stdout.readline() == "listening\n"
        spread.run(exchange_text, RANKS, env={"RESILIENT_LINK_TLS": encrypted})
        found = int(listener.communicate("count\n", PATIENCE)[0])
    assert (found == 0) == (encrypted == "1"), found


@first
def test_every_form_of_every_collective(network, spread):
    names = list(test_collectives.CHECKS)
    ranks = spread.start(test_collectives.run_checks, RANKS, names, "plain")
    for name in names:
        for rank in ranks:
            assert rank.told() == name
    for rank in ranks:
        rank.value()


# ---- Interfaces ----


def reduce_once(count):
    dist.init_process_group("resilient")
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[-1].item()


@first
def test_the_interface_that_leads_to_the_others_is_chosen(network, spread):
    network.route_between_hosts(False)
    before = {link: network.moved(link, 0) for link in ("ctl", "data")}
    env = {"RESILIENT_SOCKET_IFNAME": "data"}
    assert spread.run(reduce_once, RANKS, 4 * MIB, env=env) == [RANKS] * RANKS
    moved = {link: network.moved(link, 0) - count for link, count in before.items()}
    assert moved["data"] > 16 * MIB and moved["ctl"] < MIB, moved


def test_an_interface_that_is_not_there_is_told_with_those_that_are(spread):
    env = {"RESILIENT_SOCKET_IFNAME": "eth7"}
    for number, rank in enumerate(spread.start(reduce_once, RANKS, 1, env=env)):
        error = rank.error()
        rank.wait()
        assert isinstance(error, torch_resilient.ConfigError) and error.code == "SETTING"
        host = spread.host_of(number, RANKS)
        for part in ("eth7", f"ctl (10.1.{host}.2)", f"data (10.2.0.{host + 1})"):
            assert part in str(error)


# ---- Outages ----


def keep_reducing(count):
    """Until rank 0 is told to stop; tells how many rounds there were whenever it is asked."""
    rank, size = joined()
    rounds, stop = 0, False
    tell("running")
    try:
        while not stop:
            tensor = torch.full((count,), float(rank + rounds))
            if rank == 0 and select.select([rank_server.channel], [], [], 0)[0]:
                if hear() == "stop":
                    tensor[-1] = -1e6
                else:
                    tell(rounds)
            dist.all_reduce(tensor)
            assert tensor[:-1].eq(sum(range(size)) + size * rounds).all(), rounds
            stop = tensor[-1].item() < 0
            rounds += 1
    except dist.DistBackendError as error:
        known = (torch_resilient.last_incident() or {}).get("known")
        return {
            "kind": type(error).__name__,
            "code": error.code,
            "text": str(error),
            "rank": error.rank,
            "host": error.host,
            "known": known,
            "raised": time.time(),
        }
    dist.destroy_process_group()
    return rounds


def start_reducing(spread, env=None):
    """Once data flows."""
    ranks = spread.start(keep_reducing, RANKS, MIB, env=env)
    for rank in ranks:
        assert rank.told() == "running"
    ranks[0].say("how many?")
    assert ranks[0].told() >= 0
    return ranks


def nothing_moves(ranks):
    """For a second, once what was under way has come; the last question stays open."""
    for _ in range(3):
        ranks[0].say("how many?")
        try:
            ranks[0].told(1.0)
        except AssertionError as error:
            assert "said nothing" in str(error)
            return
    pytest.fail("the rounds go on")


@pytest.mark.parametrize("link", ["ctl", pytest.param("data", marks=pytest.mark.slow)])
def test_a_link_that_is_back_before_the_lease_ends_goes_unnoticed(network, spread, link):
    ranks = start_reducing(spread, {"RESILIENT_SOCKET_IFNAME": link})
    network.down(link, 1)
    nothing_moves(ranks)
    network.up(link, 1)
    before = ranks[0].told(10)
    ranks[0].say("stop")
    rounds = [rank.value() for rank in ranks]
    assert rounds == rounds[:1] * RANKS and rounds[0] > before


def test_a_host_that_is_cut_off_is_named_and_may_change_nothing_when_it_is_back(network, spread):
    ranks = start_reducing(spread)
    before = time.time()
    network.down("ctl", 1)
    cut = time.time()
    for rank in ranks[:2]:
        error = rank.value()
        assert error["code"] == "RANK_LOST" and error["host"] == "beta", error
        assert error["rank"] in (2, 3)
        assert error["known"] - before > LEASE_SECONDS / 2
        assert error["known"] - cut < LEASE_SECONDS + 1
        assert error["raised"] - error["known"] < GRACE_SECONDS
    network.up("ctl", 1)
    for rank in ranks[2:]:
        error = rank.value()
        assert error["code"] == "STALE_GENERATION", error


def reduce_large(count):
    dist.init_process_group("resilient")
    tensor = torch.ones(count)
    dist.barrier()
    tell("entering")
    try:
        while True:  # None may have been the last one when the link goes.
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return error.code, str(error), time.time()


def test_links_that_stand_still_while_all_live_fail_the_operation(network, spread):
    env = {"RESILIENT_SOCKET_IFNAME": "data", "RESILIENT_OP_DEADLINE": "2s"}
    ranks = spread.start(reduce_large, RANKS, 32 * MIB, env=env)
    for rank in ranks:
        assert rank.told() == "entering"
    before = network.moved("data", 1)
    # Of 256: by then all have entered.
    until(lambda: network.moved("data", 1) - before > 48 * MIB, "the operation runs")
    begun = time.time()
    network.down("data", 1)
    cut = time.time()
    for rank in ranks:
        code, text, raised = rank.value()
        assert code == "COMM_STALLED", text
        assert "RESILIENT_OP_DEADLINE" in text
        assert raised - begun > 1.5
        assert raised - cut < 2 + 1 + GRACE_SECONDS


# ---- Links that are silent while all ranks live ----

SILENT = {"RESILIENT_SOCKET_IFNAME": "data", "RESILIENT_WAIT_LOG": "1s"}
OVER_THE_LINK = r"has (entered it|left); nothing comes from it over the link between host "


def named_again_and_again(rank, times, line=OVER_THE_LINK):
    """Each line comes a second after the last one: longer than a circle takes to be one."""
    bound = time.monotonic() + PATIENCE + times
    while (
        len(found := [said for said in rank.stderr().splitlines() if re.search(line, said)]) < times
    ):
        assert time.monotonic() < bound and rank.alive(), rank.stderr()
        with pytest.raises(AssertionError, match="said nothing"):
            rank.told(0.2)
    return found


def use_when_told(name):
    """An operation that all ranks enter when they are told to; tells how it ended."""
    rank, size = joined()
    alone = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier()
    tell("ready")
    hear()
    tensor = torch.full((4,), float(rank))
    try:
        if name == "all_reduce":
            dist.all_reduce(tensor)
        elif name == "barrier":
            dist.barrier()
        elif name == "new_group":
            dist.barrier(dist.new_group())
        elif name == "recv":
            # Around the ranks: the others of this host are not late either.
            work = dist.isend(tensor, (rank + 1) % size)
            dist.recv(tensor, (rank - 1) % size)
            work.wait()
        dist.all_reduce(tensor, group=alone)  # The rank itself is well.
    except dist.DistBackendError as error:
        return error.code, str(error)
    return "done", tensor.tolist()


def all_done(ranks):
    for rank in ranks:
        outcome, value = rank.value()
        assert outcome == "done", value


SHORT = "all_reduce", "new_group"
LONG = "barrier", "recv"


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_silent_link_is_named_and_waited_for(network, spread, name):
    ranks = spread.start(use_when_told, RANKS, name, env=SILENT)
    for rank in ranks:
        assert rank.told() == "ready"
    network.down("data", 1)
    for rank in ranks:
        rank.say("go")
    # Neither a circle, nor a lost rank, nor a broken link.
    waits = ranks[2 if name == "recv" else 0]
    assert "10.2.0.1:" in named_again_and_again(waits, 4)[-1]
    network.up("data", 1)
    all_done(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 15])
def test_a_link_that_is_silent_in_a_stream_of_operations_is_waited_for(network, spread, seconds):
    ranks = start_reducing(spread, SILENT)
    network.down("data", 1)
    # In the midst of an operation all have heard that the others are in it.
    named_again_and_again(ranks[0], seconds)
    network.up("data", 1)
    ranks[0].say("how many?")
    ranks[0].told(PATIENCE)
    ranks[0].say("stop")
    rounds = [rank.value() for rank in ranks]
    assert rounds == rounds[:1] * RANKS


def silence(network, rank, seconds):
    """Of the link between the hosts, in which nothing happens to that rank."""
    network.down("data", 1)
    with pytest.raises(AssertionError, match="said nothing"):
        rank.told(seconds)
    network.up("data", 1)


def reduce_when_told(count):
    """Half of the ranks enter at once and fill their links, the others when they are told to."""
    rank, size = joined()
    dist.barrier()
    tell("ready")
    if rank >= size // 2:
        hear()
    tensor = torch.full((count,), float(rank))
    try:
        dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return error.code, str(error)
    return "done", tensor[-1].item()


@pytest.mark.slow
@pytest.mark.parametrize("network", [(4,)], indirect=True)
def test_a_full_link_that_is_silent_before_its_reader_comes_is_waited_for(network, spread):
    before = network.moved("data", 0)
    ranks = spread.start(reduce_when_told, RANKS, 32 * MIB, env=SILENT)
    for rank in ranks:
        assert rank.told() == "ready"
    sent = before
    while network.moved("data", 0) > sent:  # Until the reader's buffers are full.
        sent = network.moved("data", 0)
        with pytest.raises(AssertionError, match="said nothing"):
            ranks[0].told(1)
    silence(network, ranks[0], 60)
    for rank in ranks[RANKS // 2 :]:
        rank.say("go")
    all_done(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("network", [(4,)], indirect=True)
def test_a_link_that_is_silent_while_nobody_uses_it_goes_unnoticed(network, spread):
    ranks = spread.start(use_when_told, RANKS, "all_reduce", env=SILENT)
    for rank in ranks:
        assert rank.told() == "ready"
    # For longer than a system's keep-alive of a service would bear.
    silence(network, ranks[0], 45)
    for rank in ranks:
        rank.say("go")
    all_done(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("network", [(4,)], indirect=True)
def test_a_link_that_is_silent_in_one_direction_is_waited_for(network, spread):
    ranks = spread.start(use_when_told, RANKS, "all_reduce", env=SILENT)
    for rank in ranks:
        assert rank.told() == "ready"
    network.deafen(1, 0)
    for rank in ranks:
        rank.say("go")
    named_again_and_again(ranks[0], 5)
    network.undeafen(1, 0)
    all_done(ranks)


@pytest.mark.parametrize("name", ["all_reduce", pytest.param("recv", marks=pytest.mark.slow)])
def test_a_link_that_stays_silent_ends_in_the_deadline(network, spread, name):
    env = {**SILENT, "RESILIENT_OP_DEADLINE": "3s"}
    ranks = spread.start(use_when_told, RANKS, name, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    network.down("data", 1)
    begun = time.time()
    for rank in ranks:
        rank.say("go")
    for rank in ranks:
        code, text = rank.value()
        assert code == "COMM_STALLED", text
        assert "10.2.0.1:" in text and "10.2.0.2:" in text, text
    assert 3 < time.time() - begun < 3 + 2 + 1 + 3 * GRACE_SECONDS  # Told after 1 s, asked by 2.


@pytest.mark.parametrize("silently", [False, True], ids=["killed", "without power"])
def test_a_host_that_goes_with_all_its_ranks_is_named(network, spread, silently):
    ranks = start_reducing(spread)
    if silently:
        network.down("ctl", 1)
    _, killed = network.kill(1)
    bound = LEASE_SECONDS + 1 if silently else 1.0
    for rank in ranks[:2]:
        error = rank.value()
        assert error["code"] == "RANK_LOST" and error["host"] == "beta", error
        assert error["rank"] in (2, 3)
        assert error["known"] - killed < bound
        assert error["raised"] - error["known"] < GRACE_SECONDS
