"""The rule `static` of tests/tidy.py: what lives as long as the process is right over a fork.

Of what a forked child inherits the threads are not there, the descriptors are closed and their
numbers belong to the program, and a lock may be held for ever by a thread that is not there. So a
static is a constant, an atomic value without a pointer, or a PerProcess, which a child has one of
its own of; and a module of Python that keeps a lock, a thread or a socket says what a child does.

Out of reach of these expressions: types that are spelled over several lines, and what a class of
Python's keeps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

CPP_FOLDERS = ("runtime/", "store/", "torch_plugin/csrc/", "torch_plugin/include/")
CPP_EXEMPT = ("store/server/",)  # A process of its own, which forks nobody.
PYTHON_FOLDERS = ("torch_plugin/torch_resilient/",)
PYTHON_EXEMPT = ("torch_plugin/torch_resilient/_launch/",)  # No rank.

# `static TYPE NAME`, wherever it is, followed by what a variable is followed by.
_STATIC = re.compile(
    r"^\s*(?:inline\s+)?static\s+(?!_)(?P<type>[\w:<>,*&\s]+?[\s*&>])(?P<name>\w+)"
    r"(?:\[[^\]]*\])?\s*(?:=(?!=)|;|\{)"
)
# `TYPE NAME` at the beginning of a line, where the formatter puts what is outside of functions. All
# that is ours is in a namespace.
_GLOBAL = re.compile(
    r"^(?!(?:using|namespace|class|struct|enum|union|template|typedef|extern|friend|return|case"
    r"|default|goto|static|static_assert|concept|thread_local)\b)"
    r"(?:inline\s+)?(?P<type>[A-Za-z_][\w:<>,*&\s]*[\s*&>])(?P<name>\w+)"
    r"(?:\[[^\]]*\])?\s*(?:=(?!=)|;|\{)"
)
_OWNS = re.compile(
    r"\b(?:\w*mutex|condition_variable\w*|once_flag|j?thread|Thread|promise|future|latch"
    r"|\w*semaphore|barrier|WakeFd|FileDescriptor)\b"
)
_ATOMIC = re.compile(r"\b(?:std::atomic<[^*]*>|(?:std::)?sig_atomic_t|std::atomic_\w+)\s*$")
_PYTHON_OWNS = {
    "threading": {
        *("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"),
        *("Thread", "Timer"),
    },
    "queue": {"Queue", "SimpleQueue", "LifoQueue", "PriorityQueue"},
    "socket": {"socket", "socketpair", "create_connection", "create_server"},
}
_AT_FORK = "register_at_fork"


def in_cpp(path: str) -> bool:
    return path.startswith(CPP_FOLDERS) and not path.startswith(CPP_EXEMPT)


def in_python(path: str) -> bool:
    return path.startswith(PYTHON_FOLDERS) and not path.startswith(PYTHON_EXEMPT)


def cpp_statics(code: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) for each static of that code without comments."""
    in_namespace = False
    for number, line in enumerate(code, 1):
        in_namespace = in_namespace or line.startswith("namespace ")
        found = _STATIC.match(line)
        in_function = found is not None and line[0].isspace()
        if found is None and in_namespace:
            found = _GLOBAL.match(line)
        if found is not None and (why := _fault(found["type"], in_function)):
            yield number, f"'{found['name']}' {why}: make it a PerProcess"


def _fault(type_: str, in_function: bool) -> str:
    type_ = " ".join(type_.split())
    if "PerProcess<" in type_:
        return ""
    if _OWNS.search(type_):
        return "owns a lock, a thread or a descriptor, of no use in a forked child"
    if "constexpr" in type_ or _ATOMIC.search(type_):
        return ""
    points = "*" in type_ and not re.match(r"(?:constinit )?const [\w:<>]+ ?\* ?const$", type_)
    if points or not re.search(r"\bconst\b", type_):
        return "changes, or points to what does, and a fork may come in the midst of it"
    if in_function and "constinit" not in type_:
        return "is made under a lock of the compiler's, which a fork may leave held"
    return ""


def python_statics(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The same for a module of Python: for each lock, thread and socket that it keeps."""
    text = "\n".join(lines)
    if _AT_FORK in text:
        return
    for node in ast.parse(text).body:
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Call):
            continue
        call = value.func
        if not isinstance(call, ast.Attribute) or not isinstance(call.value, ast.Name):
            continue
        if call.attr in _PYTHON_OWNS.get(call.value.id, ()):
            what = f"{call.value.id}.{call.attr}"
            yield node.lineno, f"{what} of a module that does not say os.{_AT_FORK}"
