"""The checker itself, on histories that are known to be good or bad."""

import math
import random

import linearizability
import pytest
from linearizability import NotLinearizable, Operation, counter, queue, register, search


def history(*rows):
    """Operations from (client, name, args, called, returned, result)."""
    return [
        Operation(client, "k", name, args, called, returned, result)
        for client, name, args, called, returned, result in rows
    ]


def lost(client, name, args, called):
    return Operation(client, "k", name, args, called)


GOOD = {
    "one after the other": (
        register,
        history(("a", "set", (b"1",), 0, 1, None), ("b", "get", (), 2, 3, b"1")),
    ),
    "a read beside a write sees the old value": (
        register,
        history(("a", "set", (b"1",), 0, 5, None), ("b", "get", (), 1, 2, None)),
    ),
    "a read beside a write sees the new value": (
        register,
        history(("a", "set", (b"1",), 0, 5, None), ("b", "get", (), 1, 2, b"1")),
    ),
    "two compare_sets, one wins": (
        register,
        history(
            ("a", "compare_set", (b"", b"a"), 0, 5, b"a"),
            ("b", "compare_set", (b"", b"b"), 1, 4, b"a"),
        ),
    ),
    "compare_set of a missing key returns what was expected": (
        register,
        history(("a", "compare_set", (b"x", b"a"), 0, 1, b"x"), ("b", "get", (), 2, 3, None)),
    ),
    "a lost write that took effect late": (
        register,
        [
            lost("a", "set", (b"1",), 0),
            *history(("b", "get", (), 5, 6, None), ("b", "get", (), 7, 8, b"1")),
        ],
    ),
    "a lost write that never took effect": (
        register,
        [lost("a", "set", (b"1",), 0), *history(("b", "get", (), 5, 6, None))],
    ),
    "set, delete, append": (
        register,
        history(
            ("a", "set", (b"1",), 0, 1, None),
            ("a", "delete", (), 2, 3, True),
            ("a", "delete", (), 4, 5, False),
            ("a", "append", (b"x",), 6, 9, None),
            ("b", "append", (b"y",), 7, 8, None),
            ("b", "get", (), 10, 11, b"yx"),
        ),
    ),
    "concurrent adds in either order": (
        counter,
        history(("a", "add", (1,), 0, 5, 3), ("b", "add", (2,), 0, 5, 2)),
    ),
    "a lost add is seen": (
        counter,
        [lost("a", "add", (5,), 0), *history(("b", "add", (1,), 1, 2, 6))],
    ),
    "first in, first out": (
        queue,
        history(
            ("a", "push", (b"1",), 0, 3, None),
            ("b", "push", (b"2",), 1, 2, None),
            ("a", "pop", (), 4, 5, b"2"),
            ("b", "pop", (), 6, 7, b"1"),
            ("b", "pop", (), 8, 9, None),
        ),
    ),
}

BAD = {
    "a stale read": (
        register,
        history(
            ("a", "set", (b"1",), 0, 1, None),
            ("a", "set", (b"2",), 2, 3, None),
            ("b", "get", (), 4, 5, b"1"),
        ),
    ),
    "a value goes back": (
        register,
        history(
            ("a", "set", (b"1",), 0, 9, None),
            ("b", "get", (), 1, 2, b"1"),
            ("c", "get", (), 3, 4, None),
        ),
    ),
    "both compare_sets win": (
        register,
        history(
            ("a", "compare_set", (b"", b"a"), 0, 5, b"a"),
            ("b", "compare_set", (b"", b"b"), 1, 4, b"b"),
        ),
    ),
    "an acknowledged write is lost": (
        register,
        history(("a", "set", (b"1",), 0, 1, None), ("b", "get", (), 2, 3, None)),
    ),
    "a lost write is applied before its call": (
        register,
        [lost("a", "set", (b"1",), 5), *history(("b", "get", (), 0, 1, b"1"))],
    ),
    "an add was applied twice": (
        counter,
        history(("a", "add", (1,), 0, 1, 1), ("b", "get", (), 2, 3, b"2")),
    ),
    "a lost add is seen twice": (
        counter,
        [
            lost("a", "add", (5,), 0),
            *history(("b", "add", (1,), 1, 2, 6), ("b", "add", (1,), 3, 4, 12)),
        ],
    ),
    "two clients got the same sum": (
        counter,
        history(("a", "add", (1,), 0, 5, 1), ("b", "add", (1,), 0, 5, 1)),
    ),
    "an item came out twice": (
        queue,
        history(
            ("a", "push", (b"1",), 0, 1, None),
            ("a", "pop", (), 2, 5, b"1"),
            ("b", "pop", (), 2, 5, b"1"),
        ),
    ),
    "items in the wrong order": (
        queue,
        history(
            ("a", "push", (b"1",), 0, 1, None),
            ("a", "push", (b"2",), 2, 3, None),
            ("b", "pop", (), 4, 5, b"2"),
        ),
    ),
    "an item was lost": (
        queue,
        history(("a", "push", (b"1",), 0, 1, None), ("b", "pop", (), 2, 3, None)),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_are_explained(name):
    model, operations = GOOD[name]
    order = search(operations, model)
    known = [operation for operation in operations if operation.result != "unknown"]
    assert set(known) <= set(order) <= set(operations)


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_refused(name):
    model, operations = BAD[name]
    with pytest.raises(NotLinearizable, match="not linearizable"):
        search(operations, model)


def test_keys_are_checked_by_themselves():
    operations = [
        Operation("a", "x", "set", (b"1",), 0, 1, None),
        Operation("a", "n", "add", (2,), 0, 1, 2),
        Operation("b", "x", "get", (), 2, 3, b"1"),
    ]
    models = {"x": register, "n": counter}
    assert linearizability.check(operations, models.__getitem__) == 3
    operations.append(Operation("b", "n", "get", (), 2, 3, b"3"))
    with pytest.raises(NotLinearizable, match="'n'"):
        linearizability.check(operations, models.__getitem__)


def simulated(seed, clients, count, model, choose):
    """A history of an object that is right: each operation takes effect at a random time inside its
    interval, and some answers are lost."""
    rng = random.Random(seed)
    pending = []
    free_at = dict.fromkeys(range(clients), 0.0)
    for _ in range(count):
        client = min(free_at, key=free_at.get)
        called = free_at[client] + rng.random()
        returned = called + rng.random() * 3
        free_at[client] = returned
        name, args = choose(rng)
        pending.append((rng.uniform(called, returned), client, name, args, called, returned))
    value, operations = None, []
    for _, client, name, args, called, returned in sorted(pending, key=lambda row: row[0]):
        operation = Operation(client, "k", name, args, called, returned)
        value, result = model(value, operation)
        if rng.random() < 0.1:
            operations.append(Operation(client, "k", name, args, called, math.inf))
        else:
            operations.append(Operation(client, "k", name, args, called, returned, result))
    return operations


def choose_register(rng):
    item = b"%d" % rng.randrange(4)
    return rng.choice(
        [("set", (item,)), ("get", ()), ("delete", ()), ("compare_set", (b"%d" % 1, item))]
    )


def choose_counter(rng):
    return rng.choice([("add", (rng.randrange(1, 4),)), ("get", ())])


def choose_queue(rng):
    return rng.choice([("push", (rng.randrange(10**6),)), ("pop", ()), ("length", ())])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("model", "choose", "count"),
    [(register, choose_register, 300), (counter, choose_counter, 300), (queue, choose_queue, 120)],
)
def test_random_histories_of_a_right_object(seed, model, choose, count):
    search(simulated(seed, 6, count, model, choose), model)


@pytest.mark.parametrize("seed", range(5))
def test_one_wrong_result_in_a_long_history_is_found(seed):
    operations = simulated(seed, 4, 150, counter, choose_counter)
    known = [i for i, o in enumerate(operations) if o.result != "unknown" and o.name == "add"]
    spoilt = operations[random.Random(seed).choice(known)]
    operations[operations.index(spoilt)] = Operation(
        *(spoilt.client, "k", "add", spoilt.args, spoilt.called, spoilt.returned),
        result=spoilt.result + 1000,
    )
    with pytest.raises(NotLinearizable):
        search(operations, counter)
