"""Histories of a real server under faults: lost, stalled and half-open connections, a server that
is killed and comes back. Every operation is recorded with its interval and its result; the history
of each key must be one that a single correct object could have shown."""

import random
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field

import linearizability
import pytest
import torch.distributed as dist
from fault_proxy import FaultProxy
from linearizability import Operation
from store_support import ResilientServer

import torch_resilient

THREADS = 6
OPERATIONS = 200  # Of each thread.
CLIENT_SECONDS = 60
# A request on a connection that has fallen silent is answered once the client has noticed.
BOUND_SECONDS = 90
SILENT_SECONDS = 0.5
FAULT_SECONDS = 0.2  # A fault lasts no longer, if what should end it does not come.
# So many operations beyond the next fault's may end before it comes, on a busy machine; more than
# those that a fault waits for.
AHEAD = 24
MODELS = {
    "register": linearizability.register,
    "made and deleted": linearizability.register,
    "counter": linearizability.counter,
    "queue": linearizability.queue,
}


@dataclass
class Recorder:
    """What all threads did, and how much of it is done: faults are timed by that, and the threads
    wait for a fault that is late."""

    history: list = field(default_factory=list)
    allowed: int = 0  # Operations begin while fewer than these have ended.
    errors: list = field(default_factory=list)
    outcomes_unknown: int = 0
    _done: threading.Condition = field(default_factory=threading.Condition)

    def add(self, operation):
        with self._done:
            self.history.append(operation)
            self.outcomes_unknown += operation.result is linearizability.UNKNOWN
            self._done.notify_all()

    def fail(self, error):
        with self._done:
            self.errors.append(error)
            self._done.notify_all()

    def allow(self, count):
        with self._done:
            self.allowed = count
            self._done.notify_all()

    def wait_for_turn(self):
        with self._done:
            came = self._done.wait_for(
                lambda: self.errors or len(self.history) < self.allowed, BOUND_SECONDS
            )
            assert came, f"no fault came after {len(self.history)} operations"

    def wait_for(self, count):
        """Until so many operations have ended; False when one has failed."""
        came = self.wait_briefly(count, BOUND_SECONDS)
        assert came, f"{len(self.history)} operations ended, {count} were awaited"
        return not self.errors

    def wait_briefly(self, count, seconds):
        """The same, but for so long at most. Returns whether it came so far."""
        with self._done:
            return self._done.wait_for(lambda: self.errors or len(self.history) >= count, seconds)


def draw(rng, number):
    """A random (key, name, args); `number` is this call's own."""
    key = rng.choice(list(MODELS))
    item = b"%d" % number
    few = rng.choice((b"1", b"2", b""))
    choices = {
        "register": [("set", (item,)), ("get", ()), ("append", (item[:2],)), ("get", ())],
        "made and deleted": [
            ("compare_set", (few, rng.choice((b"1", b"2")))),
            ("set", (rng.choice((b"1", b"2")),)),
            ("delete", ()),
            ("check", ()),
        ],
        "counter": [("add", (rng.randint(1, 9),)), ("add", (1,)), ("get", ())],
        "queue": [("push", (item,)), ("push", (item,)), ("pop", ()), ("length", ())],
    }
    return key, *rng.choice(choices[key])


def perform(store, key, name, args):
    """The result as the models say it."""
    match name:
        case "set" | "append" | "get" | "add" | "compare_set":
            return getattr(store, name)(key, *args)
        case "check":
            return store.check([key])
        case "delete":
            return store.delete_key(key)
        case "push":
            return store.queue_push(key, *args)
        case "length":
            return store.queue_len(key)
        case "pop":
            try:
                return store.queue_pop(key, False)
            except dist.QueueEmptyError:
                return None
    raise ValueError(name)


def work(store, client, seed, recorder):
    rng = random.Random(seed)
    try:
        for number in range(OPERATIONS):
            key, name, args = draw(rng, client * OPERATIONS + number)
            recorder.wait_for_turn()
            called = time.monotonic()
            try:
                result = perform(store, key, name, args)
            except torch_resilient.StoreError as error:
                if error.code != "OUTCOME_UNKNOWN":
                    raise
                recorder.add(Operation(client, key, name, args, called))
                continue
            returned = time.monotonic()
            recorder.add(Operation(client, key, name, args, called, returned, result))
    except BaseException as error:
        recorder.fail(error)


class Scene:
    """A server behind two proxies, and clients of it; the last two threads share one client."""

    def __init__(self, seed, *flags):
        self.rng = random.Random(seed)
        self.server = ResilientServer(*flags)
        target = ("127.0.0.1", self.server.port)
        self.proxies = [FaultProxy(target) for _ in range(2)]
        self.stores = [
            self.server.client(CLIENT_SECONDS, port=self.proxies[i % 2].port)
            for i in range(THREADS - 1)
        ]
        self.recorder = Recorder()
        for key, value in (("register", b"first"), ("counter", b"0")):
            self.stores[0].set(key, value)
        # The models begin with keys that are missing.
        self.start = [
            Operation("start", "register", "set", (b"first",), 0.0, 0.0, None),
            Operation("start", "counter", "add", (0,), 0.0, 0.0, 0),
        ]
        self.threads = [
            threading.Thread(
                target=work,
                args=(self.stores[min(i, THREADS - 2)], i, f"{seed}/{i}", self.recorder),
                name=f"client-{i}",
            )
            for i in range(THREADS)
        ]

    def run(self, faults, every):
        """One of `faults` after every so many operations; returns how many there were."""
        self.recorder.allow(every + AHEAD)
        for thread in self.threads:
            thread.start()
        total, count, next_at = THREADS * OPERATIONS, 0, every
        while next_at < total and self.recorder.wait_for(next_at):
            self.rng.choice(faults)(self)
            count += 1
            next_at = max(next_at, len(self.recorder.history)) + every
            self.recorder.allow(next_at + AHEAD)
        self.recorder.allow(total)
        self.recorder.wait_for(total)
        for thread in self.threads:
            thread.join(BOUND_SECONDS)
            assert not thread.is_alive(), f"{thread.name} waits for ever"
        if self.recorder.errors:
            raise self.recorder.errors[0]
        return count

    def check(self):
        self._drain()
        history = self.start + self.recorder.history
        assert linearizability.check(history, MODELS.__getitem__) == len(history)

    def _drain(self):
        """What is left in the queue comes out in order: that leaves little to guess."""
        store = self.server.client(CLIENT_SECONDS)
        item = b""
        while item is not None:
            called = time.monotonic()
            item = perform(store, "queue", "pop", ())
            returned = time.monotonic()
            self.recorder.add(Operation("end", "queue", "pop", (), called, returned, item))
        store.close()

    def close(self):
        for proxy in self.proxies:
            proxy.resume()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(CLIENT_SECONDS)
        for store in self.stores:
            store.close()
        for proxy in self.proxies:
            proxy.close()
        self.server.close()


def some_proxy(scene):
    return scene.rng.choice(scene.proxies)


def cut(scene):
    some_proxy(scene).cut()


def cut_and_refuse(scene):
    """The next two connections fail as well."""
    proxy = some_proxy(scene)
    proxy.refuse()
    proxy.cut()
    proxy.await_accepted(proxy.accepted + 2, FAULT_SECONDS)
    proxy.refuse(False)


def stall(scene):
    """What is on its way arrives late, in one piece or not at all."""
    proxy = some_proxy(scene)
    proxy.stall()
    scene.recorder.wait_briefly(len(scene.recorder.history) + 20, FAULT_SECONDS)
    proxy.resume()


def slow(scene):
    some_proxy(scene).slow(scene.rng.choice((0, 0, 20_000)))


def kill(scene):
    scene.server.kill()
    scene.server.start()


@pytest.fixture
def scene(request):
    made = []
    folder = tempfile.mkdtemp(prefix="resilient-linearizability-")

    def make(seed, durable=False):
        flags = ["--log-level", "error"]
        if durable:
            flags += ["--data", folder]
        made.append(Scene(seed, *flags))
        return made[-1]

    yield make
    for each in made:
        each.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(3))
def test_lost_connections(scene, seed):
    scene = scene(seed)
    faults = scene.run([cut, cut, stall, slow, cut_and_refuse], every=12)
    assert faults > 20
    assert scene.recorder.outcomes_unknown == 0, "the server lived: every outcome can be known"
    scene.check()


def test_a_silent_connection_is_replaced():
    """Half-open behind something that takes the bytes (a proxy): TCP's own timers see nothing."""
    with ResilientServer() as server, FaultProxy(("127.0.0.1", server.port)) as proxy:
        store = server.client(SILENT_SECONDS, port=proxy.port)
        sums = [store.add("n", 1)]
        proxy.half_open()
        unknown = 0
        for _ in range(3):
            try:
                sums.append(store.add("n", 1))
            except torch_resilient.StoreError as error:
                assert error.code == "OUTCOME_UNKNOWN"
                unknown += 1
        store.close()
    assert len(sums) >= 3
    assert sums[-1] <= len(sums) + unknown


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_server_with_data(scene, seed):
    scene = scene(seed, durable=True)
    faults = scene.run([kill, kill, cut], every=60)
    assert faults > 10
    assert scene.recorder.outcomes_unknown == 0, "sessions are kept: every outcome can be known"
    scene.check()
