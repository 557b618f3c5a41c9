"""The Store as what torch makes of it: every operation of c10d's Store, alone and under a prefix,
with real servers, threads, lost connections and a server that stands still."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import store_support
import torch.distributed as dist
from fault_proxy import FaultProxy

import torch_resilient
from torch_resilient import _server

PATIENCE = timedelta(seconds=20)
VALUE_BYTES_MAX = 8 << 20
KEY_BYTES_MAX = 8 << 10
_jobs = itertools.count(1)


def ms(milliseconds):
    return timedelta(milliseconds=milliseconds)


def new_job():
    return f"test-store-{os.getpid()}-{next(_jobs)}"


@pytest.fixture
def connect(store):
    """Makes stores of one job; those are closed at the end."""
    job, made = new_job(), []

    def make(timeout=PATIENCE, address=store):
        made.append(torch_resilient.Store(address, timeout=timeout, job=job))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wrapped(kind, plain):
    for prefix in {"plain": [], "prefix": ["p"], "nested": ["outer", "inner/"]}[kind]:
        plain = dist.PrefixStore(prefix, plain)
    return plain


@pytest.fixture(params=["plain", "prefix", "nested"])
def kv(request, connect):
    return wrapped(request.param, connect())


@pytest.fixture
def threads():
    """Runs functions on threads; all have to end."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


@contextlib.contextmanager
def strict(milliseconds):
    """What is inside raises the store's timeout after this time, no sooner and not much later."""
    begun = time.monotonic()
    with pytest.raises(torch_resilient.StoreTimeoutError) as caught:
        yield caught
    took = time.monotonic() - begun
    assert milliseconds / 1000 <= took < milliseconds / 1000 + 3, took
    assert caught.value.code == "TIMEOUT"
    assert "timeout" in str(caught.value)


def await_waits(kv, count):
    """Until so many requests wait at the server for others."""
    deadline = time.monotonic() + 20
    command = [_server.binary(), "status", "--store", kv.addresses[0], "--json", "--job", kv.job]
    while True:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if json.loads(said)["jobs"][0]["waits"] == count:
            return
        assert time.monotonic() < deadline, f"there are not {count} waits in {said}"


# ---- one store


def test_set_and_get(kv):
    kv.set("text", "value")
    assert kv.get("text") == b"value"
    kv.set("text", "another")
    assert kv.get("text") == b"another"
    kv.set("empty", "")
    assert kv.get("empty") == b""
    kv.set("bytes", bytes(range(256)))
    assert kv.get("bytes") == bytes(range(256))
    kv.set("ünïcode \n", "value")
    assert kv.get("ünïcode \n") == b"value"


def test_check(kv):
    assert kv.check([])
    assert not kv.check(["a"])
    kv.set("a", "1")
    assert kv.check(["a"])
    assert not kv.check(["a", "b"])
    kv.set("b", "")
    assert kv.check(["a", "b"])
    assert kv.check(["b", "b"])


def test_add(kv):
    assert kv.add("n", 1) == 1
    assert kv.add("n", 41) == 42
    assert kv.add("n", -43) == -1
    assert kv.add("n", 0) == -1
    assert kv.get("n") == b"-1"
    kv.set("n", "100")
    assert kv.add("n", 1) == 101
    assert kv.add("fresh", 0) == 0
    assert kv.check(["fresh"])


def test_compare_set(kv):
    assert kv.compare_set("k", "not there", "new") == b"not there"
    assert not kv.check(["k"])
    assert kv.compare_set("k", "", "first") == b"first"
    assert kv.compare_set("k", "", "second") == b"first"
    assert kv.compare_set("k", "wrong", "second") == b"first"
    assert kv.compare_set("k", "first", "second") == b"second"
    assert kv.get("k") == b"second"


def test_append(kv):
    kv.append("k", "a")
    kv.append("k", "bc")
    kv.append("k", "")
    assert kv.get("k") == b"abc"
    kv.set("n", "1")
    kv.append("n", "2")
    assert kv.add("n", 1) == 13


def test_multi_set_and_get(kv):
    assert kv.has_extended_api()
    kv.multi_set(["a", "b", "c"], ["1", "", "3"])
    assert kv.multi_get(["c", "a", "b", "a"]) == [b"3", b"1", b"", b"1"]
    assert kv.multi_get([]) == []
    kv.multi_set([], [])
    keys = [f"many/{i}" for i in range(3000)]
    kv.multi_set(keys, [str(i) for i in range(3000)])
    assert kv.multi_get(keys) == [str(i).encode() for i in range(3000)]
    with pytest.raises(RuntimeError, match="multi_set of 2 keys got 1 values"):
        kv.multi_set(["a", "b"], ["1"])


def test_delete(kv):
    assert not kv.delete_key("k")
    kv.set("k", "v")
    assert kv.delete_key("k")
    assert not kv.check(["k"])
    assert not kv.delete_key("k")
    kv.queue_push("q", "item")
    assert kv.delete_key("q")
    assert kv.queue_len("q") == 0


def test_num_keys_and_list_keys(connect):
    kv = connect()
    assert (kv.num_keys(), kv.list_keys()) == (0, [])
    kv.multi_set(["b", "a", "p/c"], ["1", "2", "3"])
    assert kv.num_keys() == 3
    assert sorted(kv.list_keys()) == ["a", "b", "p/c"]
    # torch's prefix counts all and lists its own.
    under = dist.PrefixStore("p", kv)
    assert under.num_keys() == 3
    assert under.list_keys() == ["c"]
    kv.delete_key("a")
    assert kv.num_keys() == 2
    assert sorted(kv.list_keys()) == ["b", "p/c"]


def test_list_keys_of_several_pages(connect):
    kv = connect()
    keys = [f"{i:05}" for i in range(10000)]
    for begin in range(0, len(keys), 5000):
        kv.multi_set(keys[begin : begin + 5000], ["v"] * 5000)
    assert kv.num_keys() == len(keys)
    assert sorted(kv.list_keys()) == keys


def test_queue_is_first_in_first_out(kv):
    assert kv.queue_len("q") == 0
    for item in ("a", "", "c"):
        kv.queue_push("q", item)
    assert kv.queue_len("q") == 3
    assert [kv.queue_pop("q") for _ in range(3)] == [b"a", b"", b"c"]
    assert kv.queue_len("q") == 0


def test_empty_queue(kv):
    with pytest.raises(dist.QueueEmptyError) as caught:
        kv.queue_pop("q", block=False)
    assert isinstance(caught.value, torch_resilient.QueueEmptyError)
    assert isinstance(caught.value, dist.DistStoreError)
    assert str(caught.value).startswith("[resilient:QUEUE_EMPTY]")
    kv.queue_push("q", "item")
    assert kv.queue_pop("q", block=False) == b"item"


def test_a_queue_can_be_waited_for(kv, threads):
    waiting = threads.submit(kv.wait, ["q"])
    assert not kv.check(["q"])
    kv.queue_push("q", "item")
    waiting.result(20)
    assert kv.check(["q"])
    assert kv.queue_pop("q") == b"item"
    assert not kv.check(["q"])


# ---- waiting


def test_waits_end_when_the_keys_come(kv, threads):
    waits = [
        threads.submit(kv.get, "late"),
        threads.submit(kv.wait, ["late", "later"]),
        threads.submit(kv.multi_get, ["late", "later"]),
        threads.submit(kv.wait, ["later"], PATIENCE),
    ]
    kv.set("late", "1")
    assert waits[0].result(20) == b"1"
    kv.append("later", "2")
    assert waits[1].result(20) is None
    assert waits[2].result(20) == [b"1", b"2"]
    assert waits[3].result(20) is None


def test_timeouts_are_strict_and_name_the_keys(kv):
    kv.set("there", "1")
    with strict(80) as caught:
        kv.wait(["there", "absent"], ms(80))
    assert "absent" in str(caught.value)
    kv.set_timeout(ms(120))
    assert kv.timeout == ms(120)
    for call in (
        lambda: kv.get("absent"),
        lambda: kv.wait(["absent"]),
        lambda: kv.multi_get(["there", "absent"]),
        lambda: kv.queue_pop("absent"),
    ):
        with strict(120) as caught:
            call()
        assert "absent" in str(caught.value)
        assert isinstance(caught.value, dist.DistStoreError)
    # What was given up is forgotten.
    kv.set_timeout(PATIENCE)
    kv.queue_push("absent", "item")
    assert kv.queue_pop("absent") == b"item"
    assert kv.get("there") == b"1"


def test_items_go_to_the_callers_in_their_order(connect, threads):
    kv = connect()
    pops = []
    for i in range(4):
        pops.append(threads.submit(connect().queue_pop, "q"))
        await_waits(kv, i + 1)
    for i in range(4):
        kv.queue_push("q", str(i))
    assert [pop.result(20) for pop in pops] == [b"0", b"1", b"2", b"3"]


# ---- barriers


def test_barrier_releases_all_and_is_free_again(connect, threads):
    stores = [connect() for _ in range(4)]
    for _ in range(3):
        meetings = [threads.submit(each.barrier, "b", 4) for each in stores[:3]]
        await_waits(stores[3], 3)
        assert not any(meeting.done() for meeting in meetings)
        stores[3].barrier("b", 4)
        for meeting in meetings:
            meeting.result(20)
    stores[0].barrier("alone", 1)


def test_barrier_of_threads_on_one_store(connect, threads):
    kv = connect()
    for meeting in [threads.submit(kv.barrier, "b", 8) for _ in range(8)]:
        meeting.result(20)


def test_barrier_timeout_says_how_many_are_late(connect, threads):
    one, other = connect(), connect()
    waiting = threads.submit(other.barrier, "init/3", 3)
    await_waits(one, 1)
    with strict(100) as caught:
        one.barrier("init/3", 3, ms(100))
    assert "init/3" in str(caught.value)
    assert "2 of 3 arrived" in str(caught.value)
    # An arrival that was given up does not count.
    last = [threads.submit(connect().barrier, "init/3", 3)]
    await_waits(one, 2)
    assert not waiting.done()
    one.barrier("init/3", 3)
    for each in [waiting, *last]:
        each.result(20)


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="torch < 2.12 has none")
def test_barrier_under_a_prefix(connect, threads):
    stores = [dist.PrefixStore("p", connect()) for _ in range(3)]
    meetings = [threads.submit(each.barrier, "b", 3) for each in stores[:2]]
    stores[2].barrier("b", 3)
    for meeting in meetings:
        meeting.result(20)
    with strict(100) as caught:
        stores[0].barrier("never", 2, ms(100))
    assert "never" in str(caught.value)


def test_barrier_of_nobody_is_refused(connect):
    kv = connect()
    with pytest.raises(torch_resilient.ResilientError, match="at least 1"):
        kv.barrier("b", 0)
    assert kv.add("n", 1) == 1


def test_exchange(connect, threads):
    kv = connect()
    for _ in range(2):
        meetings = [
            threads.submit(kv.exchange, "cards", rank, 5, bytes([rank, 0])) for rank in range(5)
        ]
        expected = [bytes([rank, 0]) for rank in range(5)]
        assert all(meeting.result(20) == expected for meeting in meetings)
    with strict(100) as caught:
        kv.exchange("cards", 1, 3, b"mine", ms(100))
    assert "1 of 3 arrived" in str(caught.value)
    with pytest.raises(torch_resilient.ResilientError, match="from 0 to size - 1"):
        kv.exchange("cards", 3, 3, b"")


# ---- refusals are answers


def test_wrong_type_is_an_answer(kv):
    kv.set("text", "abc")
    with pytest.raises(torch_resilient.StoreError) as caught:
        kv.add("text", 1)
    assert caught.value.code == "WRONG_TYPE"
    assert "text" in str(caught.value)
    assert kv.get("text") == b"abc"


def test_too_large_is_refused(connect):
    kv = connect()
    largest = b"v" * VALUE_BYTES_MAX
    kv.set("k", largest)
    assert kv.get("k") == largest
    long_key = "k" * (KEY_BYTES_MAX + 1)
    for call in (
        lambda: kv.set("k", largest + b"v"),
        lambda: kv.append("k", "v"),
        lambda: kv.append("fresh", largest + b"v"),
        lambda: kv.queue_push("q", largest + b"v"),
        lambda: kv.exchange("e", 0, 1, largest + b"v"),
        lambda: kv.compare_set("k", largest, largest),
        lambda: kv.multi_set(["a", "b"], [largest, largest]),
        lambda: kv.multi_set(["k" + str(i) for i in range(20000)], ["v"] * 20000),
        lambda: kv.multi_get([long_key]),
        lambda: kv.queue_push(long_key, "v"),
    ):
        with pytest.raises(torch_resilient.StoreError) as caught:
            call()
        assert caught.value.code == "TOO_LARGE"
        assert "limit" in str(caught.value) or "larger than" in str(caught.value)
    assert kv.get("k") == largest
    assert kv.queue_len("q") == 0
    assert not kv.check(["a"])


# ---- threads and clones


def test_a_waiting_thread_holds_up_no_other(connect, threads):
    kv = connect()
    kv.set("n", "0")
    waiting = [threads.submit(kv.get, "never"), threads.submit(kv.queue_pop, "q")]
    waiting.append(threads.submit(kv.barrier, "b", 2))

    def work(name):
        for _ in range(200):
            kv.add("n", 1)
        kv.set(name, name)
        return kv.get(name)

    names = [f"thread{i}" for i in range(8)]
    assert [done.result(20) for done in [threads.submit(work, name) for name in names]] == [
        name.encode() for name in names
    ]
    assert kv.get("n") == b"1600"
    assert not any(each.done() for each in waiting)
    kv.set("never", "after all")
    kv.queue_push("q", "item")
    kv.barrier("b", 2)
    assert [each.result(20) for each in waiting] == [b"after all", b"item", None]


@pytest.mark.parametrize("kind", ["plain", "prefix"])
def test_clone_is_the_same_store_with_its_own_connection(connect, kind):
    original = connect()
    kv = wrapped(kind, original)
    copy = kv.clone()
    assert copy.timeout == PATIENCE
    kv.set("k", "v")
    assert copy.get("k") == b"v"
    original.close()
    with pytest.raises(torch_resilient.ResilientError, match="closed"):
        kv.get("k")
    copy.queue_push("q", "item")
    assert copy.clone().queue_pop("q") == b"item"


def test_clone_is_of_the_same_class(connect):
    kv = connect()
    copy = kv.clone()
    assert type(copy) is torch_resilient.Store
    assert (copy.addresses, copy.job, copy.session) == (kv.addresses, kv.job, None)
    copy.close()
    assert kv.add("n", 1) == 1


# ---- lost connections and a server that stands still


@pytest.fixture
def cutting(store):
    host, _, port = store.rpartition(":")
    with FaultProxy((host, int(port))) as proxy:
        yield proxy


def test_cut_connections_lose_and_double_nothing(connect, cutting, threads):
    kv, direct = connect(address=cutting.address), connect()

    def work(number):
        for i in range(150):
            if i % 30 == number:
                cutting.cut()  # Wherever the other threads are now.
            kv.add("n", 1)
            kv.append("text", "x")
            kv.queue_push("q", f"{number}.{i}")

    def take():
        items = []
        while (item := kv.queue_pop("q")) != b"end":
            items.append(item.decode())
        return items

    takers = [threads.submit(take) for _ in range(2)]
    for done in [threads.submit(work, number) for number in range(4)]:
        done.result(60)
    for _ in takers:
        kv.queue_push("q", "end")
    taken = [taker.result(60) for taker in takers]
    assert cutting.accepted > 10
    assert direct.get("n") == b"600"
    assert direct.get("text") == b"x" * 600
    pushed = [f"{number}.{i}" for number in range(4) for i in range(150)]
    assert sorted([*taken[0], *taken[1]]) == sorted(pushed)
    # Each taker sees the items of one pusher in their order.
    for items in taken:
        for number in range(4):
            order = [int(item.split(".")[1]) for item in items if item.startswith(f"{number}.")]
            assert order == sorted(order)


def test_waits_survive_a_cut_connection(connect, cutting, threads):
    kv, direct = connect(address=cutting.address), connect()
    waits = {
        "get": threads.submit(kv.get, "late"),
        "pop": threads.submit(kv.queue_pop, "q"),
        "barrier": threads.submit(kv.barrier, "b", 2),
        "exchange": threads.submit(kv.exchange, "e", 0, 2, b"mine"),
    }
    await_waits(direct, 4)
    # Far more answers than a store keeps for a session: the waits are the oldest requests by far.
    for _ in range(700):
        kv.add("n", 1)
    cutting.cut()
    assert kv.add("n", 1) == 701
    await_waits(direct, 4)
    direct.set("late", "now")
    direct.queue_push("q", "item")
    direct.barrier("b", 2)
    assert direct.exchange("e", 1, 2, b"yours") == [b"mine", b"yours"]
    assert waits["get"].result(20) == b"now"
    assert waits["pop"].result(20) == b"item"
    assert waits["barrier"].result(20) is None
    assert waits["exchange"].result(20) == [b"mine", b"yours"]
    assert direct.queue_len("q") == 0


@pytest.fixture
def own_server():
    """A server process of the test's own."""
    with store_support.ResilientServer() as server:
        yield server


def test_a_stopped_server_loses_nothing(connect, own_server, threads):
    kv = connect(address=own_server.address)
    kv.queue_push("q", "item")
    own_server.signal(signal.SIGSTOP)
    adds = [threads.submit(kv.add, "n", 1) for _ in range(8)]
    pop = threads.submit(kv.queue_pop, "q")
    with pytest.raises(torch_resilient.StoreTimeoutError) as caught:
        kv.wait(["absent"], ms(100))
    assert caught.value.code == "TIMEOUT"
    own_server.signal(signal.SIGCONT)
    assert sorted(each.result(20) for each in adds) == list(range(1, 9))
    assert pop.result(20) == b"item"
    assert kv.add("n", 0) == 8


def test_a_mutation_without_answer_has_an_unknown_outcome(connect, own_server):
    kv = connect(address=own_server.address)
    kv.set_timeout(ms(150))
    own_server.signal(signal.SIGSTOP)
    with pytest.raises(torch_resilient.StoreTimeoutError) as caught:
        kv.add("n", 1)
    assert caught.value.code == "OUTCOME_UNKNOWN"
    assert "may or may not have been applied" in str(caught.value)
    own_server.signal(signal.SIGCONT)
    kv.set_timeout(PATIENCE)
    # It was cancelled before the server saw it, or was applied once; never twice.
    assert kv.add("n", 1) in (1, 2)


def test_a_dead_server(connect, own_server):
    kv = connect(address=own_server.address)
    own_server.kill()
    with pytest.raises(torch_resilient.StoreError) as caught:
        kv.wait(["absent"], ms(2000))  # Time to see that nothing listens there any more.
    assert caught.value.code == "STORE_LOST"
    assert "is the store started?" in str(caught.value)
    kv.set_timeout(ms(100))
    with pytest.raises(torch_resilient.StoreLostError, match="it was not sent"):
        kv.queue_push("q", "item")
