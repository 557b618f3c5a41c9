#!/usr/bin/env python3
"""Puts faults that were mended back, one at a time, and shows what finds them.

    python tests/planted/run.py [NAME...]

Each NAME.patch here is one of them: a line that says what it is, `Found by: ...`, and the change to
the sources, which are put back as they were afterwards. The tree has to be clean, and
`make build-san` done: what is built here is built in its trees. What may find them:

    tidy                  tests/tidy.py
    PROGRAM [FILTER]      a test program under AddressSanitizer, all of it or what the filter names

Prints a line of a table for each: what finds it, and after how many seconds. Exit code 1: one was
not found within BOUND seconds, or a patch does not apply any more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PATCHES = Path(__file__).resolve().parent
BOUND = 300
JOBS = str(os.cpu_count())


def call(*command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def read(patch):
    """(what it is, what finds it)"""
    what, finder = patch.read_text().splitlines()[:2]
    return what.rstrip("."), re.fullmatch(r"Found by: (.+)", finder)[1]


def build(*targets):
    built = call("cmake", "--build", "--preset", "asan", "-j", JOBS, "--target", *targets)
    if built.returncode:
        raise SystemExit(f"{targets} do not build:\n{built.stdout[-2000:]}{built.stderr[-2000:]}")


def made(finder):
    """The command, built."""
    program, *arguments = finder.split()
    if program == "tidy":
        return [sys.executable, "tests/tidy.py"]
    build(program, "resilient-store")
    filters = [f"--gtest_filter={name}" for name in arguments]
    return [f"build-asan/bin/{program}", "--gtest_fail_fast", *filters]


def found(finder):
    """Seconds until it was, or None. What it takes to build is not among them."""
    command = made(finder)
    env = {**os.environ, "RESILIENT_HOSTILE_SECONDS": "30"}
    begun = time.monotonic()
    try:
        ended = call(*command, env=env, timeout=BOUND + 30)
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - begun if ended.returncode else None


def plant(patch):
    what, finder = read(patch)
    if call("git", "apply", "--whitespace=nowarn", patch).returncode:
        print(f"| {patch.stem} | {what} | the patch does not apply any more | |", flush=True)
        return False
    try:
        seconds = found(finder)
    finally:
        call("git", "apply", "-R", "--whitespace=nowarn", patch, check=True)
    shown = "**not found**" if seconds is None else f"{seconds:.1f} s"
    print(f"| {patch.stem} | {what} | `{finder}` | {shown} |", flush=True)
    return seconds is not None


def main(names):
    patches = [PATCHES / f"{name}.patch" for name in names] or sorted(PATCHES.glob("*.patch"))
    if call("git", "diff", "--quiet", "HEAD").returncode:
        raise SystemExit("there are changes that are not committed: they might be lost")
    print("| planted | what it is | found by | after |\n|---|---|---|---|")
    return 0 if all([plant(patch) for patch in patches]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
