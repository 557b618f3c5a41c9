"""How long after SIGKILL of one rank does a training make its next step, and what takes the time?

Each kill has a job of its own: 4 ranks of recovery_program.py, of which a random one is killed once
all have made some steps. It is over with the first step of whoever has the lost seat, or of the
smaller world, and the job is ended. Forms:

    replacement  resilient-run, which starts the lost rank again
    spare        resilient-run --spares 1, whose spare has imported torch and waits
    shrink       ranks without a launcher that go on with three
    torchrun     torchrun --standalone --max-restarts with gloo: all begin anew from the checkpoint
    torchrun-own-store
                 the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without, torch 2.15 serves all
                 attempts from one store without a prefix: a rank that is there first finds the
                 addresses of processes that are gone, and is refused or waits
    torchft      only if asked for: four replica groups of one rank and a lighthouse, with the
                 settings of its README and its example; who is lost is started again at once
    torchft-quick
                 the same with a lighthouse that waits 1 s instead of 5 for heartbeats and 0.1 s for
                 stragglers. Our choice: we found no settings for this in its documentation

    python benchmarks/recovery_bench.py --out benchmarks/results/recovery.json

prints a table for docs/benchmarks.md, in milliseconds: phases of the survivors, as elastic logs
them, and from the kill to the step. A job that makes no step again within --bound seconds is
counted, and ended with all that it has started. A form is begun with no further kill once it has
taken --form-seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("ranks", "support", "torch")]

import harness  # noqa: E402
from detect_bench import summarise  # noqa: E402
from store_shell import Store  # noqa: E402
from training_run import Ranks  # noqa: E402

from torch_resilient import _server  # noqa: E402

TORCHFT_PROGRAM = Path(__file__).with_name("recovery_torchft.py")
PROGRAM = Path(__file__).with_name("recovery_program.py")
RANKS = 4
STEPS_BEFORE = 5
START_SECONDS = 90
END_SECONDS = 10
RESILIENT_RUN = [sys.executable, "-m", "torch_resilient.run", "--nproc", str(RANKS)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval"]
TORCHRUN += ["0.1", "--max-restarts", "3", "--nproc-per-node", str(RANKS)]
LAUNCHERS = {
    "replacement": RESILIENT_RUN,
    "spare": [*RESILIENT_RUN, "--spares", "1"],
    "shrink": None,
    "torchrun": TORCHRUN,
    "torchrun-own-store": TORCHRUN,
}
TORCHFT = {
    "torchft": {
        "join_timeout_ms": 10000,
        "quorum_tick_ms": 100,
        "heartbeat_timeout_ms": 5000,
        "gloo_s": 5,
    },
    "torchft-quick": {
        "join_timeout_ms": 100,
        "quorum_tick_ms": 100,
        "heartbeat_timeout_ms": 1000,
        "gloo_s": 5,
    },
}
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TIMES = ("known", "aborted", "joined", "rebuilt", "running", "committed_unix_s")
WHOLE = "kill to whole"
PHASES = ("detect", "abort", "agree", "build", "acknowledge", "first step")


class Job:
    """One training with its launcher, and what its ranks say."""

    def __init__(self, form: str, folder: str):
        self.form = form
        self.over = False  # Ended by itself.
        self._store = None
        self._lighthouse = None
        command = [str(PROGRAM), f"{folder}/checkpoint"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIENT_LOG": "json:warn"}
        if self.all_anew:
            command += ["--backend", "gloo"]
        if form == "torchrun-own-store":
            env |= OWN_STORE
        if form in TORCHFT:
            self._process = self._replica_groups(TORCHFT[form], env)
        elif form == "shrink":
            self._store = Store(_server.binary()).listening()
            command += ["--min-world", str(RANKS - 1)]
            self._process = Ranks(self._store.address, [[]] * RANKS, replaced=False)(command, env)
        else:
            self._process = subprocess.Popen(
                [*LAUNCHERS[form], *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self._rest = b""
        self._said: list[dict] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def _replica_groups(self, settings: dict, env: dict) -> Ranks:
        lighthouse = Path(sys.executable).with_name("torchft_lighthouse")
        address = f"127.0.0.1:{harness.free_port()}"
        command = [lighthouse, "--bind", address, "--min_replicas", "1"]
        for name in ("join_timeout_ms", "quorum_tick_ms", "heartbeat_timeout_ms"):
            command += [f"--{name}", str(settings[name])]
        self._lighthouse = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        env = {**env, "TORCHFT_LIGHTHOUSE": f"http://{address}", "RUST_LOG": "warn"}
        program = [str(TORCHFT_PROGRAM), "--gloo-seconds", str(settings["gloo_s"])]
        return Ranks("", [[]] * RANKS, replaced=True)(program, env)

    @property
    def all_anew(self) -> bool:
        return LAUNCHERS.get(self.form) is TORCHRUN

    def next(self, deadline: float) -> dict | None:
        """The next thing that a rank has told; None: nothing more in time."""
        while not self._said:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                self.over = True
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            # Launchers put a prefix before the lines of ranks.
            parts = (line[line.find(b'{"') :] for line in lines if b'"event"' in line)
            self._said += [m for m in map(_message, parts) if m is not None]
        return self._said.pop(0)

    def end(self) -> None:
        """Whatever state it is in: by its group, then what has left the group and is ours now."""
        self._selector.close()
        if isinstance(self._process, Ranks):
            self._process.kill()
            self._process.wait()
        else:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()
        if self._store is not None:
            self._store.end()
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()


def _message(line: bytes) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def seated(job: Job) -> dict[int, int]:
    """The pid of each rank, once all train and the spare, if one is wanted, waits."""
    pids: dict[int, int] = {}
    begun: set[int] = set()
    steps = 0
    wanted = RANKS + (job.form == "spare")
    deadline = time.monotonic() + START_SECONDS
    while len(pids) < RANKS or len(begun) < wanted or steps < STEPS_BEFORE:
        message = job.next(deadline)
        if message is None:
            raise RuntimeError(f"{job.form}: only {pids} train after {START_SECONDS} s")
        if message.get("event") == "begins":
            begun.add(message["seat"])
        elif message.get("event") == "step" and message["size"] == RANKS:
            pids[message["rank"]] = message["pid"]
            # Counted from when everybody was there.
            steps += len(begun) == wanted and message["rank"] == 0
    return pids


def one_kill(form: str, chance: random.Random, bound: float) -> dict:
    known = set(harness.children())
    with tempfile.TemporaryDirectory() as folder:
        job = Job(form, folder)
        try:
            pids = seated(job)
            victim = chance.randrange(RANKS)
            killed = time.time()
            os.kill(pids[victim], signal.SIGKILL)
            look = watch_groups if form in TORCHFT else watch
            result = look(job, killed, pids, victim, bound)
        finally:
            job.end()
            left = harness.collect_orphans(known)
    return {"victim": victim, "left_behind": len(left), **result}


def watch(job: Job, killed: float, pids: dict, victim: int, bound: float) -> dict:
    """The seconds from the kill to the step, or None, and the survivors' phases."""
    survivors = 0 if job.all_anew else RANKS - 1
    step = None
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    lines = 0
    deadline = time.monotonic() + bound
    while step is None or lines < survivors:
        message = job.next(deadline)
        if message is None:
            break
        if message.get("event") == "recovered":
            lines += 1
            times = [killed, *(message[name] for name in TIMES)]
            for name, begin, end in zip(PHASES, times, times[1:], strict=False):
                phases[name].append(end - begin)
        elif message.get("event") == "step" and step is None:
            seat_again = message["rank"] == victim and message["pid"] not in pids.values()
            if seat_again or message["size"] < RANKS:
                step = message["time"] - killed
    return {"step_s": step, "ended_without": step is None and job.over, "phases_s": phases}


def watch_groups(job: Job, killed: float, pids: dict, victim: int, bound: float) -> dict:
    """The seconds until survivors commit a step without the lost one, and until the replacement
    has a part in one of all again: its first is without a part, while it takes the state over."""
    step = whole = None
    deadline = time.monotonic() + bound
    while whole is None:
        message = job.next(deadline)
        if message is None:
            break
        if message.get("event") == "step":
            replacement = message["rank"] == victim and message["pid"] != pids[victim]
            if replacement and message["size"] == RANKS:
                whole = message["time"] - killed
            elif not replacement and step is None and message["size"] < RANKS:
                step = message["time"] - killed
    step = whole if step is None else step
    phases = {name: [] for name in PHASES}
    ended = whole is None and job.over
    return {"step_s": step, "whole_s": whole, "ended_without": ended, "phases_s": phases}


def run_form(form: str, args: argparse.Namespace) -> dict:
    chance = random.Random(args.seed)
    began = time.monotonic()
    kills = []
    while len(kills) < args.kills and time.monotonic() - began < args.form_seconds:
        load = os.getloadavg()[0]
        kills.append({"load": load, **one_kill(form, chance, args.bound)})
    steps = [kill["step_s"] for kill in kills if kill["step_s"] is not None]
    summary = {}
    for phase in PHASES:
        if values := [value for kill in kills for value in kill["phases_s"][phase]]:
            summary[phase] = summarise(values)
    if steps:
        summary["kill to step"] = summarise(steps)
    if whole := [kill["whole_s"] for kill in kills if kill.get("whole_s") is not None]:
        summary[WHOLE] = summarise(whole)
    not_back = len(kills) - len(steps)
    print(f"{form}: {len(kills)} kills, {not_back} did not come back", file=sys.stderr, flush=True)
    result = {"form": form, "did_not_come_back": not_back, "summary_s": summary, "kills": kills}
    return result | ({"settings": TORCHFT[form]} if form in TORCHFT else {})


def table(runs: list[dict], bound: float) -> str:
    columns = (*PHASES, "kill to step")
    if any(WHOLE in run["summary_s"] for run in runs):
        columns += (WHOLE,)
    lines = [
        f"| | {' | '.join(columns)} | no step within {bound:g} s |",
        f"|---{'|---' * (len(columns) + 1)}|",
    ]
    for run in runs:
        cells = []
        for phase in columns:
            found = run["summary_s"].get(phase)
            values = (found[name] for name in ("p50", "p99", "max")) if found else ()
            cells.append(" / ".join(f"{value * 1e3:.0f}" for value in values) or "-")
        not_back = f"{run['did_not_come_back']} of {len(run['kills'])}"
        if ended := sum(kill["ended_without"] for kill in run["kills"]):
            not_back += f" ({ended} had ended)"
        lines.append(f"| {run['form']} | {' | '.join(cells)} | {not_back} |")
    return "\n".join(lines)


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each form")
    parser.add_argument("--bound", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--form-seconds", type=float, default=100.0)
    parser.add_argument(
        "--form", action="append", choices=[*LAUNCHERS, *TORCHFT], help="all, without torchft's"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    forms = args.form or list(LAUNCHERS)
    installed = importlib.util.find_spec("torchft") is not None
    if not installed and not TORCHFT.keys().isdisjoint(forms):
        print("torchft is not installed: its forms are left out", file=sys.stderr)
        forms = [form for form in forms if form not in TORCHFT]
    if not forms:
        return 0
    harness.become_subreaper()
    machine = record.machine() | {"torch": torch.__version__}
    if not TORCHFT.keys().isdisjoint(forms):
        machine["torchft"] = importlib.metadata.version("torchft")
    runs = [run_form(form, args) for form in forms]
    print(table(runs, args.bound))
    if args.out:
        options = {"seed": args.seed, "bound_s": args.bound, "kills": args.kills}
        record.write(args.out, {**options, "machine": machine, "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
