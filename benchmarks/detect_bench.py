"""How long after SIGKILL of one rank do the others know, and raise?

Each try starts a world of N processes (forked from this one, which has imported torch and started
no thread), waits until all of them train, kills a random rank at a random moment, and collects
from each survivor the wall-clock time at which the fence was known to the process and at which the
exception left the call that was waiting. Survivors sit in one of: an all_reduce loop, a barrier
that the victim never enters, a wait on a store key.

    python benchmarks/detect_bench.py --tries 50 --out benchmarks/results/detect.json
    python benchmarks/detect_bench.py --memory 0.1 4 8 --out benchmarks/results/detect_memory.json

prints one line per backend with p50, p99 and max in milliseconds, and writes the JSON. Exit 1 when
the limits of docs/semantics.md (p50 0.1 s, max 0.5 s) are missed by the resilient backend. With
--memory the victim has touched so many GiB, and each size is tried with and without the watch of
its host (RESILIENT_HOST_WATCH); the limits are those of the runs with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import record
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "torch"))

from harness import free_port
from memory import touch

KNOWN_P50_LIMIT_S = 0.1
KNOWN_MAX_LIMIT_S = 0.5
SITUATIONS = ("all_reduce", "barrier", "store")
MEMORY_TRIES = 5


def wait_in(situation: str, rank: int, victim: int, report) -> None:
    """Runs until an exception ends it; the victim works beside the others until it is killed."""
    tensor = torch.ones(65536)
    dist.all_reduce(tensor)
    dist.barrier()
    report({"event": "training"})
    if situation == "all_reduce":
        while True:
            dist.all_reduce(tensor)
            tensor.fill_(1.0)
    if rank == victim:
        signal.pause()
    if situation == "barrier":
        dist.barrier()
    else:
        dist.distributed_c10d._get_default_store().get("a key that nobody sets")


def rank_main(
    args: argparse.Namespace,
    backend: str,
    situation: str,
    rank: int,
    victim: int,
    env: dict,
    pipe: int,
):
    def report(message: dict) -> None:
        os.write(pipe, (json.dumps(message | {"rank": rank}) + "\n").encode())

    os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group(backend, timeout=timeout)
    size = int(args.gib * (1 << 30))
    kept = [touch(size)] if rank == victim and size else []
    try:
        wait_in(situation, rank, victim, report)
    except Exception as error:
        raised = time.time()
        known = raised
        if backend == "resilient":
            import torch_resilient

            incident = torch_resilient.last_incident()
            known = incident["known"] if incident else raised
        text = str(error).splitlines()[0]
        report({"event": "raised", "known": known, "raised": raised, "text": text})
    finally:
        kept.clear()
        os._exit(0)


def start_store(directory: str) -> tuple[subprocess.Popen, str]:
    from torch_resilient._server import binary

    command = [binary(), "serve", "--listen", "127.0.0.1:0", "--print-address", "--parent-death"]
    with open(os.path.join(directory, "store.log"), "w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    return server, server.stdout.readline().split()[0]


def read_events(pipe: int, wanted: int, event: str, deadline: float) -> list[dict]:
    """Reads JSON lines until `wanted` of kind `event` came or the deadline passed."""
    found, rest = [], b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while len(found) < wanted:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            rest += os.read(pipe, 65536)
            *lines, rest = rest.split(b"\n")
            found += [message for message in map(json.loads, lines) if message["event"] == event]
    return found


def one_try(
    args: argparse.Namespace, backend: str, situation: str, chance: random.Random, number: int
) -> dict:
    victim = chance.randrange(args.ranks)
    with tempfile.TemporaryDirectory() as directory:
        env = {
            "WORLD_SIZE": str(args.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        server = None
        if backend == "resilient":
            server, address = start_store(directory)
            env |= {"RESILIENT_STORE": address, "RESILIENT_JOB": f"detect-{number}"}
            env["RESILIENT_HOST_WATCH"] = str(int(args.watch))
        read_end, write_end = os.pipe()
        pids = []
        for rank in range(args.ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(args, backend, situation, rank, victim, env, write_end)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            pids.append(pid)
        try:
            started = read_events(read_end, args.ranks, "training", time.monotonic() + 60)
            if len(started) < args.ranks:
                raise RuntimeError(
                    f"try {number}: only {len(started)} of {args.ranks} ranks started"
                )
            pause_until = time.monotonic() + chance.uniform(0.02, 0.2)
            while time.monotonic() < pause_until:
                os.sched_yield()
            killed = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            seen = read_events(read_end, args.ranks - 1, "raised", time.monotonic() + 60)
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                os.waitpid(pid, 0)
            if server:
                server.terminate()
                server.wait()
            os.close(read_end)
            os.close(write_end)
    return {
        "situation": situation,
        "victim": victim,
        "survivors": len(seen),
        "known_s": [message["known"] - killed for message in seen],
        "raised_s": [message["raised"] - killed for message in seen],
        "text": seen[0]["text"] if seen else "",
    }


def summarise(values: list[float]) -> dict:
    ordered = sorted(values)
    at_99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": statistics.median(ordered), "p99": at_99, "max": ordered[-1], "n": len(ordered)}


def _line(figures: dict) -> str:
    return ", ".join(f"{name} {figures[name] * 1e3:.0f}" for name in ("p50", "p99", "max"))


def run_backend(args: argparse.Namespace, backend: str, tries: int) -> dict:
    chance = random.Random(args.seed)
    situations = SITUATIONS if backend == "resilient" else SITUATIONS[:2]
    results = [
        one_try(args, backend, situations[number % len(situations)], chance, number)
        for number in range(tries)
    ]
    missing = sum(args.ranks - 1 - result["survivors"] for result in results)
    known = summarise([value for result in results for value in result["known_s"]])
    raised = summarise([value for result in results for value in result["raised_s"]])
    print(f"{backend:10s} {tries} tries, {args.ranks} ranks, in ms: known {_line(known)}; ", end="")
    print(f"raised {_line(raised)}; survivors that never raised: {missing}", flush=True)
    return {
        "backend": backend,
        "known_s": known,
        "raised_s": raised,
        "never_raised": missing,
        "tries": results,
    }


def run_memory(args: argparse.Namespace) -> list[dict]:
    runs = []
    for gib, watch in itertools.product(args.memory, (True, False)):
        args.gib, args.watch = gib, watch
        print(f"{gib:g} GiB, {'with' if watch else 'without'} the watch: ", end="")
        run = run_backend(args, "resilient", args.tries)
        runs.append({"gib": gib, "watch": watch} | run)
    return runs


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--tries", type=int, help="50; 5 of each kind with --memory")
    parser.add_argument("--memory", type=float, nargs="+", metavar="GIB")
    parser.add_argument("--gloo-tries", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.gib, args.watch = 0.0, True
    args.tries = args.tries or (MEMORY_TRIES if args.memory else 50)
    if args.memory:
        runs = run_memory(args)
    else:
        runs = [run_backend(args, "resilient", args.tries)]
    if args.gloo_tries and not args.memory:
        runs.append(run_backend(args, "gloo", args.gloo_tries))
    if args.out:
        machine = record.machine() | {"torch": torch.__version__}
        record.write(args.out, {"seed": args.seed, "machine": machine, "runs": runs})
    met = all(
        run["known_s"]["p50"] < KNOWN_P50_LIMIT_S
        and run["known_s"]["max"] < KNOWN_MAX_LIMIT_S
        and run["never_raised"] == 0
        for run in runs
        if run["backend"] == "resilient" and run.get("watch", True)
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
