"""Our store against PyTorch's TCPStore (libuv backend), side by side.

Both servers run in processes of their own on this machine. A repetition measures both stores right
after each other, in turns first one and then the other first; a row's figure is the median over the
repetitions, its ratio the median of the repetitions' ratios (ours / TCPStore): what else the
machine does meanwhile meets both. Single calls are measured twice, with client and server on one
core and on two, for where the scheduler puts them decides more than what they do; in rows of many
clients the clients have one core and the server another.

    python benchmarks/store_bench.py --out benchmarks/results/store.json

prints a table and writes the JSON; --quick takes a tenth of the time. docs/benchmarks.md says what
the rows are. Exit 1 when a row with a goal misses it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import record
import store_load
import torch
import torch.distributed as dist

import torch_resilient
from torch_resilient import _server

SECONDS = store_load.SECONDS
MIB = b"v" * (1 << 20)
SMALL = b"0123456789abcdef"
CORES = sorted(os.sched_getaffinity(0))
MANY = [f"many/{i}" for i in range(1000)]
FILES = 65536
SPARE_FILES = 200  # Of a process besides the connections of a storm, of which ours makes two each.

# It looks up the name of each client's address, one after the other. With a listener of IPv4 alone
# these are 127.0.0.1, in /etc/hosts; with its own listener they are IPv6 and a matter for the DNS,
# and a storm of 1,000 clients lasts for minutes.
_TCP_SERVER = """
import socket, sys
import torch.distributed as dist
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
port = listener.getsockname()[1]
store = dist.TCPStore(
    "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
)
print(f"127.0.0.1:{port}", flush=True)
sys.stdin.read()
"""


def pin(pid, core):
    """Puts all threads of a process, and those that they will start, on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def own_core():
    return CORES[0]


def other_core():
    return CORES[-1]


class Server:
    """A store server in a process of its own, until close()."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        pin(self.process.pid, other_core())
        self.host, _, port = line.split()[0].rpartition(":")
        self.port = int(port)

    @property
    def address(self):
        return self.host, self.port

    def resident(self):
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def cpu_s(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Tcp(Server):
    name = "TCPStore"
    protocol = store_load.TcpProtocol()

    def __init__(self):
        super().__init__([sys.executable, "-c", _TCP_SERVER])

    def client(self):
        return dist.TCPStore(*self.address, None, False, timeout=timedelta(seconds=SECONDS))

    def storm(self, count):
        return store_load.storm_tcp(self.address, count)


class Ours(Server):
    name = "resilient"
    protocol = store_load.OurProtocol()
    storms = 0

    def __init__(self):
        flags = ["--listen", "127.0.0.1:0", "--print-address", "--parent-death"]
        # The load generator sends no heartbeats.
        more = ["--lease-ttl", "10min", "--log-level", "warn"]
        super().__init__([_server.binary(), "serve", *flags, *more])

    def client(self):
        return torch_resilient.Store(f"{self.host}:{self.port}", timeout=SECONDS, job="bench")

    def storm(self, count):
        self.storms += 1
        return store_load.storm_ours(self.address, count, f"storm{self.storms}")


# ---- Rows through Python ----


def times(count, call):
    """Seconds a call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def prepare(store):
    store.set("small", SMALL)
    store.set("large", MIB)
    store.multi_set(MANY, [SMALL] * len(MANY))
    store.num_keys()


def eight_threads(store, count):
    """Seconds a call, when eight threads of one client call at the same time."""

    def work(number):
        for _ in range(count):
            store.add(f"thread/{number}", 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / (8 * count)


def set_and_get(store):
    store.set("large", MIB)
    store.get("small")


# name, goal of the ratio (None: none), calls a repetition, what TCPStore does, what ours does.
CALLS = [
    ("get", 0.6, 1000, lambda s: s.get("small"), lambda s: s.get("small")),
    ("add", 1.0, 1000, lambda s: s.add("n", 1), lambda s: s.add("n", 1)),
    ("check", 1.0, 1000, lambda s: s.check(["small"]), lambda s: s.check(["small"])),
    (
        "compare_set",
        1.0,
        1000,
        lambda s: s.compare_set("small", SMALL, SMALL),
        lambda s: s.compare_set("small", SMALL, SMALL),
    ),
    ("get of 1 MiB", 1.0, 30, lambda s: s.get("large"), lambda s: s.get("large")),
    ("multi_get of 1000", 1.0, 30, lambda s: s.multi_get(MANY), lambda s: s.multi_get(MANY)),
    (
        "set, acknowledged / compare_set",
        1.0,
        1000,
        lambda s: s.compare_set("small", SMALL, SMALL),
        lambda s: s.set("small", SMALL),
    ),
    ("set of 1 MiB / set + get", 1.0, 30, set_and_get, lambda s: s.set("large", MIB)),
    ("num_keys", None, 1000, lambda s: s.num_keys(), lambda s: s.num_keys()),
]


def median_row(name, goal, unit, pairs, **more):
    theirs, ours = zip(*pairs, strict=True)
    return {
        "row": name,
        "unit": unit,
        "tcpstore": statistics.median(theirs),
        "resilient": statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in pairs),
        "goal": goal,
        "repetitions": len(pairs),
        **more,
    }


def in_turns(repetitions, theirs, ours):
    """[(theirs(), ours())], each second time the other way round."""
    pairs = []
    for i in range(repetitions):
        if i % 2:
            second = ours()
            pairs.append((theirs(), second))
        else:
            pairs.append((theirs(), ours()))
    return pairs


def all_call_rows(tcp, ours, args):
    clients = tcp.client(), ours.client()
    for client in clients:
        prepare(client)
    placements = {"one core": own_core(), "two cores": other_core()}
    if len(CORES) == 1:
        del placements["two cores"]
    for placement, core in placements.items():
        for server in (tcp, ours):
            pin(server.process.pid, core)
        for row in call_rows(clients, args):
            yield {"placement": placement, **row}


def call_rows(clients, args):
    for name, goal, count, their_call, our_call in CALLS:
        if args.only and args.only not in name:
            continue
        count = max(count // args.divisor, 3)
        pairs = in_turns(
            args.repetitions,
            lambda call=their_call, count=count: times(count, lambda: call(clients[0])),
            lambda call=our_call, count=count: times(count, lambda: call(clients[1])),
        )
        yield median_row(name, goal, "us", [(a * 1e6, b * 1e6) for a, b in pairs])
    if args.only:
        return
    pairs = in_turns(
        args.repetitions,
        lambda: eight_threads(clients[0], 500 // args.divisor),
        lambda: eight_threads(clients[1], 500 // args.divisor),
    )
    yield median_row("add, 8 threads on one client", None, "us", scaled(pairs, 1e6))


def scaled(pairs, factor):
    return [(a * factor, b * factor) for a, b in pairs]


# ---- Rows of many clients ----


def load_rows(tcp, ours, args):
    load = store_load
    pairs = in_turns(
        args.repetitions,
        lambda: load.pipelined_set(tcp.protocol, tcp.address, 6400 // args.divisor),
        lambda: load.pipelined_set(ours.protocol, ours.address, 6400 // args.divisor),
    )
    yield median_row("set, 64 at once", None, "us", scaled(pairs, 1e6))
    for count in args.waiters:
        pairs = in_turns(
            max(min(args.repetitions, 4000 // count), 3),
            lambda count=count: load.release(tcp.protocol, tcp.address, count),
            lambda count=count: load.release(ours.protocol, ours.address, count),
        )
        yield median_row(f"release of {count:,} waiters", None, "ms", scaled(pairs, 1e3))
    yield idle_row(args)
    most = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES) // 2
    for count in args.storms:
        yield from storm_rows(min(count, most), 1 if count >= 5000 else 3)


def idle_bytes(kind, count):
    """Memory of a new server for each client that is connected and does nothing."""
    with contextlib.closing(kind()) as server:
        store_load.Crowd(server.protocol, server.address, 1).close()
        before = server.resident()
        crowd = store_load.Crowd(server.protocol, server.address, count)
        # Their greetings have been read: in the same order an answer comes behind them.
        server.client().num_keys()
        grown = server.resident() - before
        crowd.close()
        return grown / count


def idle_row(args):
    count = 5000 // args.divisor
    pairs = in_turns(3, lambda: idle_bytes(Tcp, count), lambda: idle_bytes(Ours, count))
    return median_row("memory of an idle client", None, "KiB", scaled(pairs, 1 / 1024))


def storm_rows(count, repetitions):
    """A new pair of servers each time: the storm is the first that they see."""
    found = []

    def storm(kind):
        with contextlib.closing(kind()) as server:
            before = server.cpu_s()
            result = server.storm(count)
            result["server_cpu_s"] = server.cpu_s() - before
            result["server_mib"] = server.resident() / (1 << 20)
        found.append((kind, result))
        return result["total_s"]

    pairs = in_turns(repetitions, lambda: storm(Tcp), lambda: storm(Ours))
    yield median_row(f"init storm of {count:,}", None, "s", pairs, phases=phases(found))


def phases(found):
    """{store: {phase: median}}"""
    by_kind = {}
    for kind in (Tcp, Ours):
        results = [result for of, result in found if of is kind]
        by_kind[kind.name] = {
            name: statistics.median(result[name] for result in results) for name in results[0]
        }
    return by_kind


# ---- The report ----


def show(row):
    met = "" if row["goal"] is None else ("met" if row["ratio"] <= row["goal"] else "MISSED")
    goal = "" if row["goal"] is None else f"<= {row['goal']:.1f}"
    name = f"{row['row']:34} {row.get('placement', ''):9}"
    print(
        f"{name} {row['tcpstore']:10.2f} {row['resilient']:10.2f} {row['unit']:4}"
        f" {row['ratio']:6.2f} {goal:7} {met}",
        flush=True,
    )


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--only", help="rows with this in their name, of the simple ones")
    parser.add_argument("--waiters", type=int, nargs="*")
    parser.add_argument("--storms", type=int, nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.divisor = 10 if args.quick else 1
    args.repetitions = args.repetitions or (7 if args.quick else 21)
    if args.waiters is None:
        args.waiters = [200] if args.quick else [200, 2_000, 10_000]
    if args.storms is None:
        args.storms = [100] if args.quick else [1_000, 10_000]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, FILES), max(hard, FILES)))
    rows = []
    pin(os.getpid(), own_core())
    print(f"{'':44} {'TCPStore':>10} {'resilient':>10} {'':4} {'ratio':>6} goal")
    with contextlib.closing(Tcp()) as tcp, contextlib.closing(Ours()) as ours:
        for row in all_call_rows(tcp, ours, args):
            show(row)
            rows.append(row)
        for row in [] if args.only else load_rows(tcp, ours, args):
            show(row)
            rows.append(row)
    if args.out:
        machine = record.machine() | {"torch": torch.__version__}
        record.write(args.out, {"machine": machine, "rows": rows})
    missed = [row["row"] for row in rows if row["goal"] and row["ratio"] > row["goal"]]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
