"""How programs start, train and end, with Gloo and with resilient.

Each situation of tests/frameworks/situations runs once with torch's own Gloo backend and once with
resilient, one after another. What happens is recorded, never asserted; the tests assert it for
resilient.

    python benchmarks/compatibility.py --out benchmarks/results/compatibility.json \\
        --page docs/compatibility.md

runs all of them and writes both files. With --only or --backend the rest is kept as it was; with
--page-only nothing is run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import record

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "frameworks"), str(TESTS / "torch")]

from situations import registry, runner  # noqa: E402
from situations.situation import Situation  # noqa: E402

BACKENDS = ("gloo", "resilient")
FRAMEWORKS = ("torch", "accelerate", "deepspeed", "lightning")
HEAD = """# Compatibility

Written by `make compatibility` (`benchmarks/compatibility.py`) from
`benchmarks/results/compatibility.json`; not edited by hand.

Ways in which programs are started, use `torch.distributed` and end, as programs of
`tests/frameworks/situations`, each run once with Gloo and once with resilient
({versions}; CPU, {cores} cores, load average up to {load:.0f}). Seconds are from the first process
that a user starts to the end of the last one, the imports of torch included. A run is cut off
after {cut_off:g} s in which it had a processor. Where a run ends with an error, its first line is
shown. With Gloo nothing of resilient is loaded. "taken over" in a row: the program names Gloo
itself, and resilient runs it with `RESILIENT_TAKE_OVER=gloo`.

{counts}
"""


def entry_of(situation: Situation) -> dict:
    return {
        "name": situation.name,
        "about": situation.about,
        "ranks": situation.ranks,
        "taken_over": situation.taken_over,
        "right": f"ends: {situation.ends}" if situation.ends else "trains",
        "shortfall": situation.shortfall,
    }


def run(situation: Situation, backend: str, cut_off: float) -> dict:
    load = round(os.getloadavg()[0], 1)
    outcome = runner.run(situation, backend, cut_off)
    return {
        "words": runner.words(outcome, situation, cut_off),
        "right": not runner.fault(situation, outcome),
        "fault": runner.fault(situation, outcome),
        "seconds": round(outcome.seconds, 2),
        "codes": outcome.codes,
        "trained": len(outcome.trained),
        "left": [runner.without_places(line) for line in outcome.left],
        "load": load,
    }


def counts(entries: list[dict]) -> str:
    """In how many the two do the same, and where they differ."""
    both = [entry for entry in entries if set(entry["runs"]) == set(BACKENDS)]

    def right(entry: dict, backend: str) -> bool:
        return entry["runs"][backend]["right"]

    same = sum(right(entry, "gloo") and right(entry, "resilient") for entry in both)
    ours = sum(right(entry, "resilient") and not right(entry, "gloo") for entry in both)
    theirs = [entry for entry in both if right(entry, "gloo") and not right(entry, "resilient")]
    neither = len(both) - same - ours - len(theirs)
    text = f"Of {len(entries)} situations {len(both)} were measured: both start and end as they"
    text += f" should in {same}, resilient alone in {ours}, neither in {neither}"
    text += f", Gloo alone in {len(theirs)}"
    if theirs:
        text += ": " + "; ".join(
            f"{entry['name']} ({entry['shortfall'] or entry['runs']['resilient']['fault']})"
            for entry in theirs
        )
    return text + "."


def row(entry: dict) -> str:
    taken = ", taken over" if entry["taken_over"] else ""
    about = f": {entry['about']}" if entry["about"] else ""
    cells = [entry["runs"].get(backend, {}).get("words", "not run") for backend in BACKENDS]
    cells = [f"**{entry['name']}**{about}{taken}".replace("|", "\\|"), *cells]
    return "| " + " | ".join(cells) + " |"


def page(results: dict) -> str:
    entries = results["situations"]
    loads = [run["load"] for entry in entries for run in entry["runs"].values()]
    head = HEAD.format(
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        cores=results["machine"]["cores"],
        load=max(loads, default=0),
        cut_off=results["cut_off_s"],
        counts=counts(entries),
    )
    parts = [head]
    for title in registry.CHAPTERS:
        rows = [row(entry) for entry in entries if entry["chapter"] == title and entry["runs"]]
        if rows:
            parts += [f"## {title}", "| situation | Gloo | resilient |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def asked_for(args: argparse.Namespace, entry: dict) -> bool:
    return not args.only or entry["name"] in args.only or entry["chapter"] in args.only


def measure(args: argparse.Namespace) -> dict:
    """All that is asked for; the file is written after each run, and what it has of others kept."""
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    partly = args.only or args.backend or args.page_only
    runs = {entry["name"]: entry["runs"] for entry in known.get("situations", []) if partly}
    results = {
        "machine": known["machine"] if args.page_only else record.machine(),
        "versions": {name: version(name) for name in FRAMEWORKS},
        "cut_off_s": args.cut_off,
        "situations": [],
    }
    for chapter, situations in registry.CHAPTERS.items():
        for situation in situations:
            entry = entry_of(situation) | {"chapter": chapter}
            entry["runs"] = runs.get(situation.name, {})
            results["situations"].append(entry)
    for entry in results["situations"]:
        if args.page_only or not asked_for(args, entry):
            continue
        for backend in [args.backend] if args.backend else BACKENDS:
            entry["runs"][backend] = run(registry.by_name(entry["name"]), backend, args.cut_off)
            words, fault = (entry["runs"][backend][key] for key in ("words", "fault"))
            print(f"{entry['name']:28s} {backend:10s} {words}", fault and f"({fault})", flush=True)
        record.write(args.out, results)
    record.write(args.out, results)
    return results


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--cut-off", type=float, default=runner.CUT_OFF)
    parser.add_argument("--only", nargs="+", help="names of situations or chapters")
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--page-only", action="store_true", help="from what was measured before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    results = measure(args)
    args.page.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
