"""What a job on a shared store notices of a tenant that does its worst.

A training of 8 ranks (recovery_program.py) and a client that calls all the time use one store, and
so does a tenant of another job. The tenant is idle first, and then attacks in one way after the
other, at the lowest priority, so that it takes the store's time and not the cores of the others. In
each phase one rank is killed and replaced.

    python benchmarks/neighbour_bench.py --out benchmarks/results/neighbour.json

prints a table for docs/benchmarks.md: the calls of the client (set, then get, of 100 bytes) and a
member's heartbeats in milliseconds, from the kill to the first step of the replacement in seconds,
what the server has in memory, and how many steps of its loop took more than 10 and 25 ms. Ratios
are to the mean of the quiet phases, the first and the last one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import record

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("ranks", "support", "torch")]

import protocol_client as store  # noqa: E402
from store_shell import Store  # noqa: E402
from training_run import Ranks  # noqa: E402

from torch_resilient import _server  # noqa: E402

PROGRAM = Path(__file__).with_name("recovery_program.py")
RANKS = 8
START_SECONDS = 180
MIB = 1 << 20
KEYS_PER_REQUEST = 16384
SLOW_STEPS = ("0.01", "0.025")  # As the server's histogram has them.


# ---- The tenant: each attack goes on until its process is killed ----


def quietly(attack):
    """As a tenant would: an end of its connection is the beginning of the next try."""

    def attacks(host, port):
        os.nice(19)
        while True:
            with contextlib.suppress(
                OSError, EOFError, AssertionError, store.Closed, store.Refused
            ):
                attack(host, port)

    return attacks


def client(host, port):
    return store.Client(host, port, "tenant")


def silent_connections(host, port):
    """Strangers that say nothing."""
    sockets = [socket.create_connection((host, port)) for _ in range(400)]
    time.sleep(0.2)
    for one in sockets:
        one.close()


def sessions(host, port):
    """A session after the other, each gone at once."""
    client(host, port).close()


def answers(host, port):
    """Refused compare_sets of a large value, whose answers nobody acknowledges."""
    owner = client(host, port)
    owner.call(set={"key": b"k", "value": b"v" * (8 * 1000 * 1000)})
    for _ in range(100):
        one = client(host, port)
        for _ in range(2):
            request = {"key": b"k", "expected": b"no", "desired": b""}
            one.reply(one.send(compare_set=request, _acknowledged=1))
        one.close()


def parts_of_requests(host, port):
    """Requests of 16 MiB that lack a byte."""
    frame = store.HEADER.pack(16 * MIB, store.REQUEST, 0, 0, 1) + bytes(16 * MIB - 1)
    held = []
    while True:
        one = client(host, port)
        one.connection.socket.settimeout(2)
        with contextlib.suppress(OSError):
            one.connection.socket.sendall(frame)
        held = [*held[-60:], one]


def waits(host, port):
    """Waits for as many keys as a session may name, and the end of their connection."""
    one = client(host, port)
    for part in range(2):
        one.send(wait={"keys": [b"%d %d" % (part, i) for i in range(KEYS_PER_REQUEST)]})
    one.call(check={"keys": [b"k"]})
    one.close()


def seats(host, port):
    """Worlds of 131,072 ranks with one of them, and the status of all."""
    members = []
    for _ in range(4):
        member = store.Member(host, port, "tenant")
        member.join(0, 131072)
        members.append(member)
        client(host, port).call(status={})
    for member in members:
        member.close()


def reports(host, port):
    """Reports of 15 MiB, each of which ends a generation."""
    member = store.Member(host, port, "tenant", session=store.new_id())
    generation = 0
    while True:
        member.join(0, 1, generation=generation)
        generation = member.event("view").generation
        failure = {"code": 4, "message": "x" * (15 * MIB)}
        member.call(report={"kind": 2, "generation": generation, "failure": failure})
        member.event("fence")


def watches(host, port):
    """Watches of many prefixes of keys that change all the time."""
    watcher, writer = client(host, port), client(host, port)
    for i in range(500):
        watcher.send(watch={"prefix": b"a" * (10 * i), "from_revision": 0, "wait": True})
    for i in range(2000):
        writer.call(set={"key": b"a" * 8000, "value": b"%d" % i})
    watcher.close()
    writer.close()


def unread(host, port):
    """Answers of 4 MiB that nobody reads."""
    slow, writer = client(host, port), client(host, port)
    key = store.new_id().encode()
    for _ in range(12):
        slow.send(get={"key": key, "wait": True})
    writer.call(set={"key": key, "value": b"v" * (4 * MIB)})
    time.sleep(0.3)
    writer.call(delete={"key": key})
    slow.close()
    writer.close()


def appends(host, port):
    """Appends of a byte to a value of 8 MiB, which is copied each time."""
    one = client(host, port)
    one.call(set={"key": b"k", "value": b"v" * (8 * MIB - 2000)})
    for _ in range(1000):
        one.call(append={"key": b"k", "value": b"v"})
    one.close()


def crowd(host, port):
    """Many clients, each with many appends to a large value under way."""
    clients = [client(host, port) for _ in range(64)]
    for i, one in enumerate(clients):
        one.call(set={"key": b"%d" % i, "value": b"v" * MIB})
    while True:
        sent = [
            [one.send(append={"key": b"%d" % i, "value": b"v"}) for _ in range(64)]
            for i, one in enumerate(clients)
        ]
        for one, requests in zip(clients, sent, strict=True):
            for request in requests:
                one.reply(request)


ATTACKS = (
    silent_connections,
    sessions,
    answers,
    parts_of_requests,
    waits,
    seats,
    reports,
    watches,
    unread,
    appends,
    crowd,
)


class Tenant:
    """An attack as a process of its own."""

    def __init__(self, attack, host, port):
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=quietly(attack), args=(host, port), daemon=True)
        self._process.start()

    def end(self):
        self._process.kill()
        self._process.join()


# ---- The other job ----


class Caller:
    """A client and a member of the training's job that measure their calls and heartbeats."""

    def __init__(self, host, port, job):
        self._client = store.Client(host, port, job)
        self._member = store.Member(host, port, job + "-member")
        self._member.join(0, 1)
        self._member.event("view")
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._calls, self._beats = [], []
        self._thread = threading.Thread(target=self._run, name="caller")
        self._thread.start()

    def _run(self):
        number = 0
        while not self._ends.wait(0.005):
            number += 1
            begun = time.perf_counter()
            self._client.call(set={"key": b"mine", "value": b"v" * 100})
            self._client.call(get={"key": b"mine"})
            called = time.perf_counter()
            self._member.beat(number)
            self._member.event("heartbeat_ack")
            beaten = time.perf_counter()
            with self._lock:
                self._calls.append(called - begun)
                self._beats.append(beaten - called)

    def take(self):
        """What was measured since the last time."""
        with self._lock:
            taken = self._calls, self._beats
            self._calls, self._beats = [], []
        return taken

    def end(self):
        self._ends.set()
        self._thread.join()


class Training:
    """8 ranks, of which whoever is killed is replaced."""

    def __init__(self, address, folder):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENT_LOG": "json:error"}
        env["RESILIENT_SEAT_WAIT"] = "60"  # No launcher has said that it replaces them.
        self._ranks = Ranks(address, [[]] * RANKS, replaced=True)
        self._ranks([str(PROGRAM), f"{folder}/checkpoint"], env)
        self._told = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="reader")
        self._reader.start()
        self.pids = {}

    def _read(self):
        """All the time: ranks that nobody listens to stand still."""
        for line in self._ranks.stdout:
            if '"step"' in line and line.startswith("{"):
                self._told.put(json.loads(line))

    def _next(self, deadline):
        """Messages of ranks; nothing in time is an error, as no phase may take so long."""
        while True:
            try:
                yield self._told.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(
                    f"the training stands still; its ranks are {self.pids}"
                ) from None

    def settle(self):
        """Until all train."""
        seen = {}
        for message in self._next(time.monotonic() + START_SECONDS):
            if message["size"] == RANKS:
                seen[message["rank"]] = message["pid"]
            if len(seen) == RANKS and message["step"] % 5 == 0:
                self.pids = seen
                return

    def heal(self, chance):
        """Kills one; the seconds until its replacement has made a step."""
        victim = chance.randrange(RANKS)
        killed = time.time()
        os.kill(self.pids[victim], signal.SIGKILL)
        for message in self._next(time.monotonic() + START_SECONDS):
            if message["rank"] == victim and message["pid"] != self.pids[victim]:
                self.pids[victim] = message["pid"]
                return message["time"] - killed
        return None

    def end(self):
        self._ranks.kill()
        self._reader.join()
        self._ranks.wait()


def memory_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def steps_above(server, *bounds):
    """Of the server's loop since it began, for each bound in seconds."""
    page = urllib.request.urlopen(server.metrics, timeout=START_SECONDS).read().decode()
    counts = dict(re.findall(r'loop_step_seconds_bucket\{le="([^"]+)"\} (\d+)', page))
    return [int(counts["+Inf"]) - int(counts[bound]) for bound in bounds]


def measure(caller, training, chance, server, seconds):
    before = steps_above(server, *SLOW_STEPS)
    caller.take()
    healed = training.heal(chance)
    time.sleep(seconds)  # What is measured is a rate, which needs time. tidy: allow(sleep)
    calls, beats = caller.take()
    slow = zip(steps_above(server, *SLOW_STEPS), before, strict=True)
    return {
        "calls": len(calls),
        "call_ms": round(statistics.median(calls) * 1e3, 3),
        "call_p99_ms": round(sorted(calls)[int(len(calls) * 0.99)] * 1e3, 3),
        "beat_p99_ms": round(sorted(beats)[int(len(beats) * 0.99)] * 1e3, 3),
        "healed_s": round(healed, 2),
        "memory_mib": round(memory_mib(server.process.pid)),
        "slow_steps": [now - earlier for now, earlier in slow],
    }


MEASURES = ("call_ms", "call_p99_ms", "beat_p99_ms", "healed_s")


def with_ratios(phases):
    quiet = {
        name: statistics.mean(phases[phase][name] for phase in ("quiet", "quiet again"))
        for name in MEASURES
    }
    for phase in phases.values():
        phase["ratio"] = {name: round(phase[name] / quiet[name], 2) for name in MEASURES}
    return phases


def table(phases):
    yield (
        "| tenant | call, median | call, 99 % | heartbeat, 99 % | healed | server |"
        " steps > 10 ms, > 25 ms |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, phase in phases.items():
        cells = [
            f"{phase[measure]} {'s' if measure == 'healed_s' else 'ms'} ({phase['ratio'][measure]})"
            for measure in MEASURES
        ]
        cells.append(f"{phase['memory_mib']} MiB")
        cells.append(", ".join(map(str, phase["slow_steps"])))
        yield f"| {name} | " + " | ".join(cells) + " |"


def run(args):
    chance = random.Random(args.seed)
    server = Store(_server.binary(), "--metrics", "127.0.0.1:0").listening()
    server.metrics = re.search(r"http://\S+/metrics", server.logged("serves metrics on"))[0]
    host, port = server.address.rsplit(":", 1)
    phases = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(server.end)
        training = Training(server.address, folder)
        stack.callback(training.end)
        training.settle()
        caller = Caller(host, int(port), "training-calls")
        stack.callback(caller.end)
        for attack in (None, *ATTACKS, None):
            name = (
                attack.__name__.replace("_", " ")
                if attack
                else "quiet again"
                if phases
                else "quiet"
            )
            tenant = Tenant(attack, host, int(port)) if attack else None
            try:
                phases[name] = measure(caller, training, chance, server, args.seconds)
            finally:
                if tenant:
                    tenant.end()
            print(name, phases[name], file=sys.stderr, flush=True)
    return with_ratios(phases)


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=5, help="of each phase, after the healing")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    phases = run(args)
    print("\n".join(table(phases)))
    if args.out:
        record.write(args.out, {"machine": record.machine(), "phases": phases})


if __name__ == "__main__":
    main()
