"""For run.sh: what there is to test on, and the report of a run.

report.py facts       JSON of the GPU and the libraries; or why nothing can run, and exit code 3
report.py libraries   variables that name the libraries to the C++ tests, for a shell
report.py write       the report, and a table of it; exit code 1 when a part failed
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = (124, 137)
SKIPPED = 3


def facts():
    try:
        import gpu_device
    except ImportError as error:
        print(f"torch cannot be used: {error}")
        return SKIPPED
    if why := gpu_device.refusal():
        print(why)
        return SKIPPED
    import torch_resilient  # noqa: F401

    print(json.dumps(gpu_device.facts()))
    return 0


def libraries():
    import gpu_device

    if gpu_device.FAKE:
        nccl = cuda = str(gpu_device.fake_device.LIBRARY)
    else:
        nccl, cuda = _loaded("libnccl.so"), _loaded("libcudart.so")
    names = {"RESILIENT_TEST_NCCL": nccl, "RESILIENT_TEST_CUDART": cuda}
    print("\n".join(f"{name}={path}" for name, path in names.items()))
    return 0


def _loaded(name):
    """The copy that torch has loaded, which is the one that the plugin takes."""
    import torch  # noqa: F401

    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if f"/{name}" in line), "")


def tests_of(path):
    """Counts of a JUnit file, and the names of what did not pass with the reasons."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    reasons = {}
    if not path.exists():
        return counts, reasons
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        failure = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        if failure is not None:
            counts["failed"] += 1
            reasons[name] = _text(failure)
        elif skipped is not None or case.get("status") == "notrun":
            counts["skipped"] += 1
            reasons[name] = "" if skipped is None else _text(skipped)
        else:
            counts["passed"] += 1
    return counts, reasons


def _text(element):
    """Files by where they are in the sources."""
    return (element.get("message") or "").replace(f"{ROOT}/", "")[:500]


def parts_of(logs):
    parts = {}
    for line in (logs / "parts").read_text().splitlines():
        name, seconds, limit, code = line.split()
        counts, reasons = tests_of(logs / f"{name}.xml")
        if code == "no-time":
            outcome = "not run: no time was left"
        elif int(code) in TIMED_OUT:
            outcome = "timed out"
        elif code == "0":
            outcome = "passed" if counts["passed"] else "skipped"
        else:
            outcome = f"failed ({code})"
        parts[name] = {"outcome": outcome, "seconds": int(seconds), "limit": int(limit), **counts}
        if reasons:
            parts[name]["reasons"] = reasons
    return parts


def commit():
    file = ROOT / "COMMIT"  # Of a bundle.
    if file.exists():
        return file.read_text().strip()
    result = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def write(args):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import record

    parts = parts_of(args.logs)
    file = args.logs / "figures.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    figures = {}
    for line in lines:
        figures |= json.loads(line)
    now = datetime.datetime.now(datetime.timezone.utc)
    results = {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        **json.loads(args.facts),
        **record.machine(),
        "parts": parts,
        "figures": figures,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record.write(args.out, results)
    for name, part in parts.items():
        counts = ", ".join(f"{part[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"{name:12} {part['outcome']:12} {part['seconds']:4} s  {counts}")
    print(f"tests/gpu: {args.out}")
    return 0 if all(part["outcome"] in ("passed", "skipped") for part in parts.values()) else 1


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("facts")
    commands.add_parser("libraries")
    writer = commands.add_parser("write")
    writer.add_argument("--facts", required=True)
    writer.add_argument("--logs", type=Path, required=True)
    writer.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "write":
        sys.exit(write(args))
    sys.exit({"facts": facts, "libraries": libraries}[args.command]())


if __name__ == "__main__":
    main()
