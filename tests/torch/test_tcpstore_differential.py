"""Random sequences of operations by torch's TCPStore client on torch's own server and on ours: the
same results, the same classes of exceptions, except for what DIFFERENCES lists (docs/operations.md
has the same list)."""

import random
from datetime import timedelta

import pytest
import test_store_differential as differential
import torch.distributed as dist
from store_support import TcpFrontServer, TcpServer

SEEDS = range(4)


def lost(outcome):
    return isinstance(outcome.error, dist.DistNetworkError)


DIFFERENCES = {
    "add to a text that begins with a number": (
        "torch's server reads the number at the beginning and drops the rest; ours closes the"
        " connection, as torch's does for any other text",
        lambda call, theirs, ours: call.name == "add" and theirs.error is None and lost(ours),
        differential.restore_text,
    ),
    differential.DELETED_QUEUE: differential.DIFFERENCES[differential.DELETED_QUEUE],
}


class FrontPair(differential.Pair):
    """The same client of both servers."""

    differences = DIFFERENCES

    def __init__(self, tcp, front):
        self._front = front
        clean = front.client(differential.CLIENT_SECONDS)
        for key in clean.list_keys():
            clean.delete_key(key)
        for key in differential.QUEUES:
            differential.drain(clean, key)
        super().__init__(tcp, front.client)

    def run(self, call):
        super().run(call)
        if call.name in differential.UNACKNOWLEDGED:
            differential.settle(self.ours[call.client])
            self._replace_dead(call.client)

    def _replace_dead(self, client):
        super()._replace_dead(client)
        try:
            self.ours[client].check(["x"])
        except dist.DistNetworkError:
            self.ours[client] = self._front.client(differential.CLIENT_SECONDS)

    def close(self):
        pass


@pytest.fixture(scope="module")
def servers(subreaper):
    with TcpServer() as tcp, TcpFrontServer() as front:
        yield tcp, front


@pytest.fixture
def pair(servers):
    return FrontPair(*servers)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_give_the_same(pair, seed):
    generator = differential.Generator(seed)
    for _ in range(differential.OPERATIONS):
        pair.run(generator.call())


EDGES = (
    ("set", "k", b"text"),
    ("add", "k", 1),
    ("get", "k"),
    ("set", "n", b"12 apples"),
    ("add", "n", 1),
    ("compare_set", "missing", b"expected", b"x"),
    ("check", ["missing"]),
    ("compare_set", "made", b"", b""),
    ("get", "made"),
    ("check", []),
    ("wait", [], timedelta(seconds=differential.WAIT_SECONDS)),
    ("multi_get", ["k", "k"]),
    ("multi_set", [], []),
    ("set", "k" * 8000, b"long"),
    ("get", "k" * 8000),
    ("check", ["k" * 8193]),
    ("set", "big", b"v" * (8 << 20)),
    ("get", "big"),
    ("num_keys",),
    ("queue_push", "q", b"2"),
    ("get", "q"),
    ("set", "q", b"value beside the queue"),
    ("queue_pop", "q", True),
    ("queue_pop", "q", True),
    ("queue_pop", "q", False),
    ("delete_key", "q"),
    ("list_keys",),
)


def test_edges_give_the_same(pair):
    for name, *args in EDGES:
        pair.run(differential.Call(0, name, tuple(args)))
    wanted = {"add to a text that begins with a number"}
    assert wanted <= pair.met, f"no longer different: {wanted - pair.met}; take it off the table"


@pytest.mark.parametrize("seed", SEEDS)
def test_interleaved_writers_end_at_the_same_values(pair, seed):
    """Operations that commute, in one order on torch's server and in another on ours."""
    rng = random.Random(seed)
    calls = [
        differential.Call(rng.randrange(differential.CLIENTS), "add", (f"n{i % 5}", i))
        for i in range(100)
    ]
    for clients in (pair.theirs, pair.ours):
        rng.shuffle(calls)
        for call in calls:
            assert differential.perform(clients[call.client], call).error is None
    for i in range(5):
        assert pair.theirs[0].get(f"n{i}") == pair.ours[0].get(f"n{i}")
