"""torch's TCPStore client on our server (`resilient-store serve --tcpstore`) and on torch's own.

The same client, the same calls, the servers in processes of their own and measured in turns, as in
store_bench.py, which has the method: a row's figure is the median over the repetitions, its ratio
the median of the repetitions' ratios (ours / torch's).

    python benchmarks/tcpstore_bench.py --out benchmarks/results/tcpstore.json

prints a table and writes the JSON; --quick takes a tenth of the time. Exit 1 when a row with a goal
misses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import record
import store_bench
import store_load
import torch

from torch_resilient import _server


class Front(store_bench.Server):
    """Our server, for torch's client."""

    name = "resilient"
    protocol = store_load.TcpProtocol()

    def __init__(self):
        flags = ["--listen", "127.0.0.1:0", "--print-address", "--parent-death", "--tcpstore"]
        super().__init__([_server.binary(), "serve", *flags, "--log-level", "warn"])

    client = store_bench.Tcp.client
    storm = store_bench.Tcp.storm


def sets(store):
    """A hundred sets, which are not acknowledged, and an answer behind the last one."""
    for _ in range(100):
        store.set("small", store_bench.SMALL)
    store.num_keys()


def queue(store):
    store.queue_push("q", store_bench.SMALL)
    store.queue_pop("q")


def set_and_get(store):
    store.set("large", store_bench.MIB)
    store.get("large")


BRIEFLY = timedelta(seconds=store_bench.SECONDS)

# name, goal of the ratio, calls a repetition, what is called.
CALLS = [
    ("get", 1.0, 1000, lambda s: s.get("small")),
    ("add", 1.0, 1000, lambda s: s.add("n", 1)),
    ("check", 1.0, 1000, lambda s: s.check(["small"])),
    ("wait for a key that is there", 1.0, 1000, lambda s: s.wait(["small"], BRIEFLY)),
    ("compare_set", 1.0, 1000, lambda s: s.compare_set("small", store_bench.SMALL, b"x")),
    ("100 sets and an answer", 1.2, 20, sets),
    ("queue_push and queue_pop", 1.0, 500, queue),
    ("set and get of 1 MiB", 1.2, 30, set_and_get),
    ("multi_get of 1000", 1.0, 30, lambda s: s.multi_get(store_bench.MANY)),
]


def call_rows(servers, args):
    clients = [server.client() for server in servers]
    for client in clients:
        store_bench.prepare(client)
    placements = {"one core": store_bench.own_core(), "two cores": store_bench.other_core()}
    for placement, core in placements.items():
        for server in servers:
            store_bench.pin(server.process.pid, core)
        for name, goal, count, call in CALLS:
            count = max(count // args.divisor, 3)
            pairs = store_bench.in_turns(
                args.repetitions,
                lambda call=call, n=count: store_bench.times(n, lambda: call(clients[0])),
                lambda call=call, n=count: store_bench.times(n, lambda: call(clients[1])),
            )
            pairs = store_bench.scaled(pairs, 1e6)
            yield {"placement": placement, **store_bench.median_row(name, goal, "us", pairs)}


def load_rows(servers, args):
    for count in args.waiters:
        pairs = store_bench.in_turns(
            max(min(args.repetitions, 4000 // count), 3),
            lambda n=count: store_load.release(servers[0].protocol, servers[0].address, n),
            lambda n=count: store_load.release(servers[1].protocol, servers[1].address, n),
        )
        pairs = store_bench.scaled(pairs, 1e3)
        yield store_bench.median_row(f"release of {count:,} waiters", 1.0, "ms", pairs)
    for count in args.storms:
        pairs = store_bench.in_turns(
            3, lambda n=count: storm(store_bench.Tcp, n), lambda n=count: storm(Front, n)
        )
        yield store_bench.median_row(f"init storm of {count:,}", 1.0, "s", pairs)


def storm(kind, count):
    with contextlib.closing(kind()) as server:
        return server.storm(count)["total_s"]


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.divisor = 10 if args.quick else 1
    args.repetitions = 7 if args.quick else 21
    args.waiters = [200] if args.quick else [200, 2_000]
    args.storms = [100] if args.quick else [1_000]
    store_bench.pin(os.getpid(), store_bench.own_core())
    rows = []
    print(f"{'':44} {'torch':>10} {'resilient':>10} {'':4} {'ratio':>6} goal")
    with contextlib.closing(store_bench.Tcp()) as tcp, contextlib.closing(Front()) as front:
        for make in (call_rows, load_rows):
            for row in make((tcp, front), args):
                store_bench.show(row)
                rows.append(row)
    if args.out:
        machine = record.machine() | {"torch": torch.__version__}
        record.write(args.out, {"machine": machine, "rows": rows})
    return 1 if any(row["goal"] and row["ratio"] > row["goal"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
