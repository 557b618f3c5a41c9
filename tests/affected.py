#!/usr/bin/env python3
"""Which sources a check that is as slow as a compiler has to look at again.

    tests/affected.py passed FILE...   those whose content is not the one in tests/lint_all_passed,
                                       or that include, directly or not, a header of which that
                                       is true
    tests/affected.py record           writes the content of each file there: `make lint-all` has
                                       just passed on it

All files are affected where nothing is recorded, or where something has changed that the findings
in every file depend on: the checks, the compiler's options.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from tidy import INCLUDE

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "lint_all_passed"
INCLUDE_ROOTS = ("", "runtime/include/", "store/include/", "torch_plugin/include/")
DIGITS = 16  # Of a digest: enough to tell one content from another, and no defence.
# What every finding depends on: the checks, their version, the options of the compiler.
RULES = (".clang-tidy", "CMakeLists.txt", "setup.sh", "tests/lint.sh")


def includers(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """For each header of the tree the files that name it. `texts`: path -> content."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for line in text.splitlines():
            if include := INCLUDE.match(line):
                for root in INCLUDE_ROOTS:
                    if root + include.group(2) in texts:
                        found[root + include.group(2)].add(path)
    return found


def affected(changed: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """The changed files, and all that include one of them over any number of headers."""
    named_by = includers(texts)
    found = set(changed)
    todo = deque(found)
    while todo:
        for path in named_by.get(todo.popleft(), ()):
            if path not in found:
                found.add(path)
                todo.append(path)
    return found


def changes_everything(path: str) -> bool:
    return path in RULES or path.endswith((".cmake", ".proto"))


def content_now() -> dict[str, str]:
    """path -> digest, of each file that findings depend on. Git says which files are the
    project's own, and nothing about their past: a record holds in a clone of any depth."""
    names = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--")
        + ("*.h", "*.cc", "*.cmake", "*.proto", *RULES),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:DIGITS]
        for name in sorted(set(names))
        if (ROOT / name).exists()
    }


def recorded() -> dict[str, str]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    return {name: digest for digest, name in (line.split(" ", 1) for line in lines)}


def to_check(files: list[str]) -> list[str]:
    before, now = recorded(), content_now()
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    if any(map(changes_everything, changed)):
        return files
    # A header that is gone has no text, but still those that name it.
    texts = {name: "" for name in changed if name.endswith(".h")}
    texts.update({name: (ROOT / name).read_text(errors="replace") for name in now})
    found = affected(changed, texts)
    return [name for name in files if name in found]


def main(arguments: list[str]) -> int:
    if arguments == ["record"]:
        RECORD.write_text("".join(f"{digest} {name}\n" for name, digest in content_now().items()))
        return 0
    if arguments[:1] == ["passed"]:
        print("\n".join(to_check(arguments[1:])))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
