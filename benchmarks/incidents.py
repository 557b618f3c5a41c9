"""What users of frameworks met, with Gloo and with resilient.

Each incident is a program of tests/frameworks: the situation of a report, on the CPU. It runs once
with torch's own Gloo backend and once with resilient. What happens is recorded, never asserted:
seconds from the moment that is named until each rank had its exception, the text of it, or that
all trained, or that a rank still ran at the cut-off.

    python benchmarks/incidents.py --out benchmarks/results/incidents.json --page docs/incidents.md

runs all of them and writes both files. With --only or --backend the rest is kept as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from subprocess import TimeoutExpired

import record

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "frameworks"), str(TESTS / "torch")]

import launch  # noqa: E402
import texts  # noqa: E402

BACKENDS = ("gloo", "resilient")
FRAMEWORKS = ("torch", "accelerate", "deepspeed", "lightning")
START_SECONDS = 180  # To import everything, on a busy machine.


@dataclass
class Incident:
    """A situation: the program and what is done to its ranks.

    `since` is the word behind which a rank prints the time from which seconds count; the earliest
    one does. With `act` it is the moment of the signal that rank 0 gets once it printed that word.
    """

    name: str
    title: str
    program: str
    ranks: int
    arguments: list
    since: str
    moment: str
    act: int | None = None
    missing: tuple = ()
    backend_flag: bool = True  # False: the program takes Gloo where no name is given.
    torchrun: list = field(default_factory=list)


def incidents(late: float, timeout: float) -> list[Incident]:
    clock = ["--timeout", timeout]
    waits = "the others wait"
    caching = ["--busy", late, *clock]
    accelerate = ("accelerate_program.py", 3)
    deepspeed = ("deepspeed_program.py", 3)
    found = [
        Incident(
            "1 caching", f"accelerate: the main process caches for {late:g} s, the others are in"
            " wait_for_everyone()", *accelerate, caching, "waiting", waits, backend_flag=False,
        ),
        Incident(
            "1 lazy group", f"the same for {late:g} s, the others are where a group is made",
            *accelerate, [*caching, "--lazy"], "waiting", waits, backend_flag=False,
        ),
        Incident(
            "1 killed", "accelerate: the main process is killed while it caches", *accelerate,
            ["--busy", 600, "--timeout", 600], "caching", "the kill", signal.SIGKILL,
            backend_flag=False,
        ),
        Incident(
            "2 rank 0 late", f"DeepSpeed: rank 0 calls init {late:g} s late", *deepspeed,
            [*clock, "--late", late, "--late-rank", 0], "init", "the others call init",
        ),
        Incident(
            "2 rank 1 late", f"DeepSpeed: rank 1 calls init {late:g} s late", *deepspeed,
            [*clock, "--late", late, "--late-rank", 1], "init", "the others call init",
        ),
        Incident(
            "2 missing", "DeepSpeed: rank 1 is never started", *deepspeed, clock, "init",
            "the first call of init", missing=(1,),
        ),
    ]  # fmt: skip
    for kind in ("fabric", "trainer"):
        found += [
            Incident(
                f"3 {kind} late", f"Lightning {kind.capitalize()}: rank 0 skips batches for"
                f" {late:g} s", "lightning_program.py", 2, [kind, *clock, "--late", late],
                "training", waits, backend_flag=False,
            ),
            Incident(
                f"3 {kind} stopped", f"Lightning {kind.capitalize()}: rank 0 is stopped (SIGSTOP)",
                "lightning_program.py", 2, [kind, "--timeout", 600, "--late", 600], "training",
                "the stop", signal.SIGSTOP, backend_flag=False,
            ),
        ]  # fmt: skip
    found += [
        Incident(
            f"5 buckets of {ranks}", f"accelerate: multi-scale buckets on {ranks} ranks, one has"
            " fewer batches", "buckets_program.py", ranks, clock, "epoch",
            "the first rank has no more batches", backend_flag=False,
        )
        for ranks in (2, 4)
    ]  # fmt: skip
    found += [
        Incident(
            f"restart after {victim}", f"torchrun --max-restarts 3: rank {victim} of 4 is killed",
            "restart_program.py", 4, [*clock, "--victim", victim], "killed", "the kill",
            torchrun=["--max-restarts=3", "--monitor-interval=0.1"],
        )
        for victim in (1, 0)
    ]  # fmt: skip
    return found


def start(launcher, incident: Incident, backend: str, environment: dict) -> list:
    arguments = list(incident.arguments)
    if backend == "resilient" or incident.backend_flag:
        arguments += ["--backend", backend]
    environment = {"NODE_RANK": "0", **environment}
    if backend != "resilient":
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # Nothing of ours is loaded.
    if incident.torchrun:
        return [
            launcher.torchrun(
                incident.program,
                incident.ranks,
                *arguments,
                options=incident.torchrun,
                **environment,
            )
        ]
    return launcher.plain(
        incident.program, incident.ranks, *arguments, missing=incident.missing, **environment
    )


def times_of(process, word: str) -> list[float]:
    """The numbers at the ends of its lines that begin with `word`."""
    lines = process.stdout().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"{word} ")]


def moment(incident: Incident, processes: list) -> float | None:
    """Waits for the moment from which seconds count, or makes it; None: all ended before it."""
    if incident.act is not None:
        try:
            for process in processes if incident.act == signal.SIGSTOP else processes[:1]:
                process.await_line(incident.since, START_SECONDS)
        except AssertionError:
            return None
        # The others are where they wait by then, or come there without rank 0.
        now = time.time()
        processes[0].signal(incident.act)
        return now
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = [when for process in processes for when in times_of(process, incident.since)]
        if found:
            return min(found)
        if all(ended(process, 0.05) for process in processes):
            return None
    return None


def ended(process, seconds: float) -> bool:
    try:
        process.wait(max(seconds, 0.001))
    except TimeoutExpired:
        return False
    return True


def describe(process, since: float, now: float) -> dict:
    """How one process ended."""
    exit_code = process.wait(1) if ended(process, 0) else None
    failed = times_of(process, "failed")
    lines = process.stderr().splitlines()
    found = [match[1] for line in lines if (match := texts.EXCEPTION.match(line))]
    return {
        "exit_code": exit_code,
        "failed_s": round(failed[0] - since, 2) if failed else None,
        "ended_s": round(now - since, 2) if exit_code is not None else None,
        "text": texts.shown(found[-1]) if found else "",
        "trained": "result " in process.stdout(),
    }


def run(incident: Incident, backend: str, cutoff: float, environment: dict) -> dict:
    launcher = launch.Launcher()
    try:
        processes = start(launcher, incident, backend, environment)
        numbers = [rank for rank in range(incident.ranks) if rank not in incident.missing]
        since = moment(incident, processes)
        if since is None:
            return {"outcome": "never came so far", "ranks": []}
        ends, waiting = {}, dict(enumerate(processes))
        while waiting and time.time() < since + cutoff:
            for index, process in list(waiting.items()):
                if ended(process, 0.05):
                    ends[index] = describe(process, since, time.time())
                    del waiting[index]
        for index, process in waiting.items():
            ends[index] = describe(process, since, time.time())
        ranks = [{"rank": numbers[index], **ends[index]} for index in sorted(ends)]
        return {"outcome": outcome(incident, ranks), "ranks": ranks}
    finally:
        launcher.end()


def outcome(incident: Incident, ranks: list[dict]) -> str:
    if incident.act is not None:
        ranks = ranks[1:]
    if any(rank["exit_code"] is None for rank in ranks):
        return "hangs"
    return "trains" if all(rank["exit_code"] == 0 for rank in ranks) else "fails"


def deepspeed_environment(folder: str) -> dict:
    """What DeepSpeed compiles at its first init is compiled before anything is measured."""
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": folder}
    launcher = launch.Launcher()
    try:
        compiling = launcher.alone("deepspeed_program.py", "--compile-only", **environment)
        if compiling.wait(600) != 0:
            raise RuntimeError(compiling.stderr())
    finally:
        launcher.end()
    return environment


def cell(incident: dict, backend: str, cutoff: float) -> str:
    """One outcome as text: ranks with the same exception together."""
    result = incident["runs"].get(backend)
    if result is None:
        return "not run"
    ranks = [rank for rank in result["ranks"] if not (incident["acted"] and rank["rank"] == 0)]
    if result["outcome"] == "trains":
        return f"trains, done {max(rank['ended_s'] for rank in ranks):.1f} s after"
    if incident["torchrun"]:
        if result["outcome"] == "hangs":
            return f"neither trained nor ended {cutoff:g} s after"
        return f"gives up {ranks[0]['ended_s']:.1f} s after"
    parts = {}
    for rank in ranks:
        parts.setdefault(rank["text"], []).append(rank)
    return "; ".join(_part(text, of, cutoff) for text, of in parts.items()) or result["outcome"]


def _part(text: str, ranks: list[dict], cutoff: float) -> str:
    names = ", ".join(str(rank["rank"]) for rank in ranks)
    who = f"rank{'s' * (len(ranks) > 1)} {names}"
    if any(rank["exit_code"] is None for rank in ranks):
        return f"{who} still waiting {cutoff:g} s after"
    if all(rank["exit_code"] == 0 for rank in ranks):
        return f"{who} ended"
    seconds = [rank["ended_s"] if rank["failed_s"] is None else rank["failed_s"] for rank in ranks]
    low, high = (f"{seconds:.1f}" for seconds in (min(seconds), max(seconds)))
    after = low if low == high else f"{low} to {high}"
    text = text.replace("|", "\\|").replace("`", "'")
    return f"{who} after {after} s: `{text or 'no exception'}`"


def page(results: dict) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    rows = [
        f"| {incident['title']}; seconds from: {incident['moment']} | "
        + " | ".join(cell(incident, backend, results["cutoff_s"]) for backend in BACKENDS)
        + " |"
        for incident in results["incidents"]
    ]
    load = max(
        run["load"] for incident in results["incidents"] for run in incident["runs"].values()
    )
    return "\n".join(
        [
            "# Incidents",
            "",
            "Written by `make incidents` (`benchmarks/incidents.py`) from"
            " `benchmarks/results/incidents.json`; not edited by hand.",
            "",
            "Situations that users reported, as programs of `tests/frameworks`, each run once with"
            " Gloo and once with resilient",
            f"({versions}; CPU, {results['machine']['cores']} cores, load average up to"
            f" {load:.0f}). The timeout of the group is {results['timeout_s']:g} s unless the row",
            "says killed or stopped (600 s); a run is cut off"
            f" {results['cutoff_s']:g} s after the moment that the row names. Texts are the last"
            " exception of each rank.",
            "",
            "| incident | Gloo | resilient |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def measure(args: argparse.Namespace) -> dict:
    """All that is asked for; the file is written after each run, and what it has of others kept."""
    partly = args.only or args.backend
    results = json.loads(args.out.read_text()) if partly and args.out.exists() else {}
    results |= {
        "machine": record.machine(),
        "versions": {name: version(name) for name in FRAMEWORKS},
        "late_s": args.late,
        "timeout_s": args.timeout,
        "cutoff_s": args.cutoff,
    }
    known = {entry["name"]: entry for entry in results.get("incidents", [])}
    results["incidents"] = []
    table = incidents(args.late, args.timeout)
    wanted = [incident for incident in table if args.only in (None, incident.name)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {}
        if any(incident.program == "deepspeed_program.py" for incident in wanted):
            environment = deepspeed_environment(folder)
        for incident in table:
            entry = known.get(incident.name, {"runs": {}}) | {
                "name": incident.name,
                "title": incident.title,
                "moment": incident.moment,
                "acted": incident.act is not None,
                "torchrun": bool(incident.torchrun),
            }
            results["incidents"].append(entry)
            if incident not in wanted:
                continue
            for backend in [args.backend] if args.backend else BACKENDS:
                load = round(os.getloadavg()[0], 1)
                entry["runs"][backend] = run(incident, backend, args.cutoff, environment)
                entry["runs"][backend]["load"] = load
                text = cell(entry, backend, args.cutoff)
                print(f"{incident.name:16s} {backend:10s} {text}", flush=True)
            record.write(args.out, results)
    record.write(args.out, results)
    return results


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--late", type=float, default=15)
    parser.add_argument("--timeout", type=float, default=5)
    parser.add_argument("--cutoff", type=float, default=60)
    parser.add_argument("--only", help="the name of one incident, as it is printed")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    args.page.write_text(page(measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
