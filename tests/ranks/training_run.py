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

from torch_resilient import _server
from torch_resilient._launch import family

PROGRAM = Path(__file__).with_name("training_program.py")
RANKS = 4
STEPS_PER_EPOCH = 10  # Of the program, with all ranks.
RESILIENT_RUN = [sys.executable, "-m", "torch_resilient.run"]
HERE = [*RESILIENT_RUN, "--nproc", str(RANKS)]
RESTARTS = ["--max-restarts", 1000, "--steady-after", 0]  # The kills come from outside.
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


class Arrivals:
    """Late ranks and spares: rank 0 waits behind a step, at a FIFO, until so many spares wait at
    the store for the world to grow."""

    def __init__(self, folder, launcher, step, spares, kills=None):
        self._launcher = launcher
        self._step = step
        self._spares = spares
        self._kills = kills
        self._fifo = folder / "fifo"
        os.mkfifo(self._fifo)
        # Also for reading: so it waits for nobody, and whoever comes later goes on as well.
        self._gate = None
        self.options = ("--wait-behind", step, "--wait-at", self._fifo)

    def look(self, line, pids):
        if self._kills is not None:
            self._kills.look(line, pids)
        found = STEP.search(line)
        if found and int(found[1]) == self._step and self._gate is None:
            self._launcher.begin_late()
            self._launcher.await_spares(self._spares)
            self._gate = os.open(self._fifo, os.O_RDWR)

    def close(self):
        if self._gate is not None:
            os.close(self._gate)

    @property
    def sent(self):
        return self._kills.sent if self._kills is not None else []

    @property
    def done(self):
        return self._gate is not None and (self._kills is None or self._kills.done)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Ranks:
    """The ranks of a job, started without a launcher, each behind its prefix of a command. Who is
    killed is replaced, or else the job goes on without. `late`: so many begin only when they are
    told. Like a Popen, as far as `run` asks."""

    def __init__(self, store, prefixes, replaced, late=0):
        self._job = {
            "RESILIENT_STORE": store,
            "RESILIENT_JOB": f"training-{os.getpid()}-{id(self)}",
        }
        self._job["WORLD_SIZE"] = str(len(prefixes))
        self._prefixes = prefixes
        self._replaced = replaced
        self._late = late
        self._lock = threading.Lock()
        self._processes, self._codes = {}, {}
        self._over = False

    def __call__(self, command, env):
        """Starts them."""
        self._command = [sys.executable, *command]
        self._env = {**env, **self._job}
        reader, self._writer = os.pipe()
        self.stdout = open(reader)  # noqa: SIM115
        self._keepers = [
            threading.Thread(target=self._keep, args=(rank,)) for rank in range(len(self._prefixes))
        ]
        for keeper in self._keepers[: len(self._keepers) - self._late]:
            keeper.start()
        return self

    def begin_late(self):
        for keeper in self._keepers[len(self._keepers) - self._late :]:
            keeper.start()
        self._late = 0

    def await_spares(self, count):
        """Returns once so many wait at the store, as it tells everybody."""
        command = [_server.binary(), "members", "--json", "--store", self._job["RESILIENT_STORE"]]
        command += ["--job", self._job["RESILIENT_JOB"]]
        for _ in range(10000):  # Each takes some milliseconds.
            told = subprocess.run(command, capture_output=True, check=True, timeout=10)
            if sum(member["state"] == "spare" for member in json.loads(told.stdout)) == count:
                return
        raise AssertionError(f"there are not {count} spares: {told.stdout}")

    def _keep(self, rank):
        code = self._run(rank)
        while code == -signal.SIGKILL and self._replaced:
            os.write(self._writer, f"rank {rank} was killed, replacing it\n".encode())
            code = self._run(rank, RESILIENT_REPLACES="1")
        with self._lock:
            self._codes[rank] = 0 if code == -signal.SIGKILL else code
            if len(self._codes) == len(self._prefixes):
                os.close(self._writer)

    def _run(self, rank, **env):
        with self._lock:
            if self._over:
                return signal.SIGKILL
            process = self._processes[rank] = subprocess.Popen(
                [*self._prefixes[rank], *self._command],
                stdout=self._writer,
                stderr=subprocess.STDOUT,
                env={**self._env, "RANK": str(rank), **env},
                start_new_session=True,
            )
        # Before its number is free for others: what it has left behind ends with it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        family.end_all(lambda: _left_of(process.pid))
        return process.wait()

    def kill_one(self, rank):
        with self._lock:
            self._processes[rank].kill()

    def kill(self):
        with self._lock:
            self._over = True
            for process in self._processes.values():
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def wait(self):
        """The first code that is not 0."""
        self.begin_late()  # Where it never came to that: at once over.
        for keeper in self._keepers:
            keeper.join()
        self.stdout.close()
        return next(filter(None, self._codes.values()), int(self._over))


def _left_of(session):
    everyone = family.everyone()
    return [each for each in everyone if each.session == session and each.state not in "ZX"]


def _launch(command, env):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=env, **pipes)


def run(folder, name, *options, launcher=None, kills=None, seconds=60, env=None):
    """The result that rank 0 wrote and the output, one line each. Fails when the run does.
    `launcher`: its command, or Ranks."""
    events, result = folder / f"{name}.events", folder / f"{name}.json"
    command = [PROGRAM, "--result", result, *options]
    if not isinstance(launcher, Ranks):
        command = [*(launcher or [*HERE, *RESTARTS, "--events", events]), *command]
    process = (launcher if isinstance(launcher, Ranks) else _launch)(
        list(map(str, command)),
        {**os.environ, "RESILIENT_LOG": "json:warn", "OMP_NUM_THREADS": "1", **(env or {})},
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
