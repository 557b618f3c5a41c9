"""The rule `own-name` of tests/tidy.py: names of two sources of a module are told apart.

What a source has for itself stands in a namespace without a name. Trees of the sanitizers compile
several sources of a module as one, where a name that two of them have is an error; and for a reader
a name that means two things in one folder is one too many.

Looked at are constants, classes, and functions that have the same parameters too, as far as these
stand on one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

FOLDERS = ("runtime/", "store/")

_OPENS = re.compile(r"^namespace \{")
_CLOSES = re.compile(r"^\}  // namespace$")
_NAMED = re.compile(
    r"^(?:(?:inline )?(?:constexpr|const)\b[^=(]*?\b(k[A-Z]\w*)(?:\[[^\]]*\])*\s*(?:=|\{|;)"
    r"|(?:class|struct|enum class|enum) (\w+)(?: final)?(?: :[^:].*)?\s*\{)"
)
_FUNCTION = re.compile(r"^[A-Za-z_][\w:<>,&* ]*[ &*](\w+)(\([^()]*\)) \{")


def own_names(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of what a source has in its namespace without a name."""
    within = False
    for number, line in enumerate(lines, 1):
        if _OPENS.match(line):
            within = True
        elif within and _CLOSES.match(line):
            within = False
        elif within and (found := _NAMED.match(line)):
            yield number, found.group(1) or found.group(2)
        elif within and (found := _FUNCTION.match(line)):
            yield number, found.group(1) + found.group(2)


def repeated(sources: Iterable[tuple[str, Iterable[str]]]) -> Iterator[tuple[str, int, str]]:
    """(path, line, text) of names that a source of the folder has, too. `sources`: path and
    lines."""
    first: dict[tuple[str, str], str] = {}
    for path, lines in sorted(sources):
        if not path.startswith(FOLDERS) or not path.endswith(".cc"):
            continue
        folder = str(PurePosixPath(path).parent)
        for line, name in own_names(lines):
            other = first.setdefault((folder, name), path)
            if other != path:
                yield path, line, f"{name} is another one in {other}: give each its own name"
