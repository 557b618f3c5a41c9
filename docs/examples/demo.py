"""Kills a rank in the middle of training, and shows that nothing is lost.

    python demo.py

Trains the handwritten digits on 4 ranks three times under resilient-run: undisturbed, with SIGKILL
for one rank in the middle, and the same with a spare, a process that has imported everything and
waits. Prints when what happened, and compares the final parameters of all runs bit for bit. Exit 1
when they differ. In a fourth, shorter run nobody replaces the rank and the others go on without.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits_elastic.py")
RUN_SECONDS = 240
PHASES = (
    ("known", "all survivors know"),
    ("aborted", "running operations ended"),
    ("joined", "{joined}"),
    ("rebuilt", "connections rebuilt"),
    ("running", "survivors go on"),
    ("committed_unix_s", "first step again"),
)


class Run:
    """One training under resilient-run; `on_step` is called with each step that rank 0 reports."""

    def __init__(self, args, folder, name, on_step=None, launcher=(), script=()):
        self.saved = folder / f"{name}.pt"
        self.events = folder / f"{name}.events"
        self.accuracy = self.digest = None
        self.recoveries = []
        self._on_step = on_step
        command = [sys.executable, "-m", "torch_resilient.run", "--nproc", str(args.nproc)]
        command += [*map(str, launcher), "--events", str(self.events), str(SCRIPT)]
        command += ["--epochs", str(args.epochs), *map(str, script)]
        command += ["--seed", str(args.seed), "--log-every", "5", "--save", str(self.saved)]
        environment = {**os.environ, "RESILIENT_LOG": "json:warn"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    def finish(self):
        """Reads the output to its end; the exit code."""
        watchdog = threading.Timer(RUN_SECONDS, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                self._read(line.rstrip())
            return self._process.wait()
        finally:
            watchdog.cancel()

    def _read(self, line):
        text = line.partition("] ")[2] if line.startswith("[") else line
        if text.startswith("{"):
            message = json.loads(text)
            if message.get("event") == "recovered":
                self.recoveries.append(message)
                return
            line = f"[{message.get('tag', '')}] {message.get('text', text)}"
        if step := re.match(r"step (\d+) ", text):
            if self._on_step:
                self._on_step(self, int(step[1]))
            return
        if found := re.match(r"test accuracy ([\d.]+)", text):
            self.accuracy = float(found[1])
        if found := re.match(r"parameters (\w+)", text):
            self.digest = found[1]
        print(f"    {line}", flush=True)

    def pid_of(self, rank):
        """The process that holds the rank now, from the launcher's events."""
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [e["pid"] for e in lines if e["event"] == "started" and e["rank"] == rank][-1]


class Killer:
    """Sends SIGKILL to one rank once rank 0 has reported the step."""

    def __init__(self, rank, step, delay):
        self.rank, self.step, self.delay = rank, step, delay
        self.killed_at = None

    def __call__(self, run, step):
        if self.killed_at is None and step >= self.step:
            pid = run.pid_of(self.rank)
            time.sleep(self.delay)
            self.killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            print(f"    -- step {step}: SIGKILL to rank {self.rank} (pid {pid})", flush=True)


def show_time_line(recoveries, killed_at, joined):
    survivors = [r for r in recoveries if r.get("known")]
    if not survivors:
        print("no survivor has reported a recovery")
        return False
    print(f"time line, in ms after the kill (the latest of {len(survivors)} survivors):")
    print(f"  {0:7.0f}  killed")
    for key, text in PHASES:
        times = [r[key] for r in survivors if r.get(key)]
        if times:
            print(f"  {(max(times) - killed_at) * 1000:7.0f}  {text.format(joined=joined)}")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--kill-rank", type=int, default=2)
    parser.add_argument("--kill-at", type=int, help="step after which to kill; default: the middle")
    parser.add_argument("--seed", type=int, default=0, help="of the training; not 0: random kill")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    last_step = args.epochs * 23
    step, delay = last_step // 2, 0.0
    if args.seed:
        step, delay = chance.randrange(5, last_step - 25), chance.uniform(0, 0.05)
    at = args.kill_at or step
    steps = (at, at, max(at // 3, 1))
    killers = [Killer(args.kill_rank, when, delay) for when in steps]

    with tempfile.TemporaryDirectory(prefix="resilient-demo-") as name:
        folder = Path(name)
        print(f"1. {args.nproc} ranks, undisturbed", flush=True)
        runs = [Run(args, folder, "calm")]
        codes = [runs[0].finish()]
        print(f"2. the same, and rank {args.kill_rank} is killed in the middle", flush=True)
        runs.append(Run(args, folder, "killed", killers[0]))
        codes.append(runs[1].finish())
        print("3. the same, and a spare waits for that", flush=True)
        runs.append(Run(args, folder, "spare", killers[1], ["--spares", 1]))
        codes.append(runs[2].finish())
        left = args.nproc - 1
        print(f"4. a shorter run, and nobody replaces the rank: {left} go on", flush=True)
        smaller = ["--restart-policy", "never", "--min-world", left]
        shorter = ["--steps", max(last_step // 3, steps[2] + 1)]
        runs.append(Run(args, folder, "smaller", killers[2], smaller, shorter))
        codes.append(runs[3].finish())

    if any(codes):
        print(f"a run failed: exit codes {', '.join(map(str, codes))}")
        return 1
    return 0 if show(runs, killers) else 1


def show(runs, killers):
    """Time lines and results; whether all is as it has to be."""
    joined = "the replacement has joined"
    whats = ("replaced", joined), ("with a spare", joined), ("smaller", "the others go on alone")
    for run, killer, (what, text) in zip(runs[1:], killers, whats, strict=True):
        print(f"{what}, ", end="")
        if killer.killed_at is None or not show_time_line(run.recoveries, killer.killed_at, text):
            return False
    whole, smaller = runs[:3], runs[3]
    for run, what in zip(whole, ("undisturbed", "with a kill", "with a spare"), strict=True):
        print(f"{what}: test accuracy {run.accuracy:.4f}, parameters {run.digest}")
    same = whole[0].digest is not None and len({run.digest for run in whole}) == 1
    print("equal, bit for bit" if same else "DIFFERENT")
    print(f"smaller, and after a third of the steps: test accuracy {smaller.accuracy:.4f}")
    return same


if __name__ == "__main__":
    sys.exit(main())
