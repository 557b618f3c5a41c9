"""Starts training_program.py, kills its ranks as they come, and says what came out."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

PROGRAM = Path(__file__).with_name("training_program.py")
RANKS = 4
STEPS_PER_EPOCH = 10  # Of the program.
HERE = [sys.executable, "-m", "torch_resilient.run", "--nproc", str(RANKS)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc-per-node", str(RANKS), "--monitor-interval", "0.1"]
STEP = re.compile(r"\bstep (\d+) at ([\d.]+)")
STARTED = re.compile(r"\brank (\d+) is process (\d+)")


class Kills:
    """When which rank is killed: at steps drawn from a seed, evenly over the run, and, where only
    who is lost is replaced, every second time another one as soon as the launcher has seen that
    end, in the midst of the recovery."""

    def __init__(self, count, steps, seed, replaced=True):
        self._chance = random.Random(seed)
        self._in_recovery = count // 2 if replaced else 0
        pairs = count - self._in_recovery
        span = (steps - 4) // pairs
        assert span >= 1, "a step for each"
        self._steps = [2 + span * k + self._chance.randrange(span) for k in range(pairs)]
        self._steps.reverse()
        self._follows = False
        self.sent = []

    def look(self, line, pids):
        """Kills if it is time, with this line of the output."""
        if found := STEP.search(line):
            if self._steps and int(found[1]) >= self._steps[-1]:
                self._steps.pop()
                self._kill(pids(), "at step " + found[1])
                self._follows = self._in_recovery > 0
        elif self._follows and "replacing it" in line:
            self._follows = False
            self._in_recovery -= 1
            self._kill(pids(), "in the recovery")

    def _kill(self, pids, when):
        rank = self._chance.randrange(RANKS)
        # Of one that has ended and is not started anew yet, the next.
        rank = next(r % RANKS for r in range(rank, rank + RANKS) if _alive(pids[r % RANKS]))
        os.kill(pids[rank], signal.SIGKILL)
        self.sent.append((rank, when))

    @property
    def done(self):
        return not self._steps and self._in_recovery == 0


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(folder, name, *options, launcher=None, kills=None, seconds=60, env=None):
    """The result that rank 0 wrote and the output, one line each. Fails when the run does."""
    events, result = folder / f"{name}.events", folder / f"{name}.json"
    if launcher is None:
        launcher = [*HERE, "--max-restarts", "1000", "--events", events]
    command = [*launcher, PROGRAM, "--result", result, *options]
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RESILIENT_LOG": "json:warn", "OMP_NUM_THREADS": "1", **(env or {})},
    )

    def pids():
        if not events.exists():  # Of another launcher.
            said = map(STARTED.search, lines)
            return {int(found[1]): int(found[2]) for found in said if found}
        told = map(json.loads, events.read_text().splitlines())
        return {e["rank"]: e["pid"] for e in told if e["event"] == "started"}

    lines = []
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if kills is not None:
                kills.look(line, pids)
        code = process.wait()
    finally:
        watchdog.cancel()
    text = "\n".join(lines[-200:])
    assert code == 0, f"{name}: the launcher's code is {code} (within {seconds} s)\n{text}"
    assert kills is None or kills.done, f"{name}: only {kills.sent} were killed\n{text}"
    return json.loads(result.read_text()), lines
