"""Checks of the source tree that compilers do not make: layers, confinement, budgets, words.

Run as `python3 tests/tidy.py [ROOT]`; prints one line per finding and exits with 1 if there is any.
A line that must break a rule says so with `tidy: allow(RULE)` and the reason in the same comment.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tidy_names
import tidy_statics

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
TEST_LINES_MAX = 1000
PUBLIC_HEADER_LINES_MAX = 250

CPP_SUFFIXES = {".h", ".cc"}
PYTHON_SUFFIXES = {".py"}
PUBLIC_HEADERS = ("runtime/include/", "store/include/", "torch_plugin/include/")

# Who may include whom: the modules of the tree, and for each the modules that it may name.
MODULES = {
    "public": ("runtime/include/",),
    "store_public": ("store/include/",),
    "base": ("runtime/base/",),
    "net": ("runtime/net/",),
    "tls": ("runtime/tls/",),
    "comm": ("runtime/comm/",),
    "recovery": ("runtime/recovery/",),
    "store_core": ("store/core/",),
    "store_tls": ("store/tls/",),
    "store_tcpstore": ("store/tcpstore/",),
    "store_client": ("store/client/",),
    "store_server": ("store/server/",),
    "plugin": ("torch_plugin/",),
    "tests": ("tests/", "benchmarks/", "docs/"),
}
# What both sides of the store may name.
STORE_SIDES = ("public", "store_public", "base", "net", "tls", "store_core", "store_tls")
MAY_INCLUDE = {
    "public": {"public"},
    "store_public": {"public", "store_public"},
    "base": {"public", "base"},
    "net": {"public", "base", "net"},
    "tls": {"public", "base", "tls"},
    "comm": {"public", "base", "net", "tls", "comm"},
    "recovery": {"public", "base", "net", "comm", "recovery"},
    "store_core": {"public", "store_public", "base", "net", "store_core"},
    "store_tls": {"public", "base", "tls", "store_tls"},
    "store_tcpstore": {"public", "store_public", "base", "net", "store_core", "store_tcpstore"},
    "store_client": {*STORE_SIDES, "store_client"},
    "store_server": {*STORE_SIDES, "store_client", "store_tcpstore", "store_server"},
    "plugin": {"public", "store_public", "plugin"},
    "tests": set(MODULES),
}

# Third parties, each with the only places that may include it.
CONFINED = (
    (re.compile(r"^uv(\.h|/)"), ("store/server/",)),
    (re.compile(r"^sqlite3"), ("store/server/",)),
    # Never linked into a user's process: what both sides share goes by a table of functions.
    (re.compile(r"^mbedtls/"), ("runtime/base/hmac.",)),
    (re.compile(r"^openssl/"), ("runtime/tls/functions.h",)),
    (re.compile(r"^microhttpd"), ("store/server/http_endpoint.cc",)),
    (
        re.compile(r"\.pb\.h$"),
        (
            "store/core/codec.cc",
            "store/core/codec_join.cc",
            "store/core/codec_waiting.cc",
            "store/core/codec_watch.cc",
        ),
    ),
    (re.compile(r"^google/protobuf/"), ("store/core/codec.cc",)),
    (re.compile(r"^xxh"), ("runtime/comm/checksum.cc",)),
    # reduce.cc alone calls the kernels: in a FloatEnvironment, so that all ranks get the same bits.
    (re.compile(r"^runtime/comm/reduce_(kernels|templates|types)\.h$"), ("runtime/comm/reduce",)),
    (re.compile(r"^pybind11/"), ("torch_plugin/csrc/",)),
    (re.compile(r"^(torch|ATen|c10|c10d)/"), ("torch_plugin/csrc/", "torch_plugin/include/")),
    (re.compile(r"^Python\.h$"), ("torch_plugin/csrc/",)),
    # Declared by ourselves, as neither is there where the library is built; only a test sees both.
    (re.compile(r"^(nccl\.h|cuda)"), ()),
    (
        re.compile(r"^runtime/comm/nccl_(?!communicator\.h)"),
        ("runtime/comm/nccl_", "runtime/comm/staged_", "runtime/comm/cuda_fabric"),
    ),
)
CONFINED_EXEMPT = ("tests/", "benchmarks/", "docs/")

# Factories of torch, with the arguments for which the program may have set a default.
PLUGIN_PYTHON = "torch_plugin/torch_resilient/"
_DEVICE_AND_DTYPE = frozenset({"device", "dtype"})
FACTORIES = {
    "Generator": frozenset({"device"}),
    **dict.fromkeys(
        (
            *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"),
            *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"),
            *("scalar_tensor", "tensor", "zeros"),
        ),
        _DEVICE_AND_DTYPE,
    ),
}

# Calls that read the world. `places`: where the library does so on purpose.
WORLD_CALLS = (
    ("now", re.compile(r"::now\s*\("), ("runtime/base/",)),
    ("clock", re.compile(r"\b(?:clock_gettime|gettimeofday)\s*\("), ("runtime/base/",)),
    (
        "sleep",
        re.compile(r"\b(?:sleep_for|sleep_until|usleep|nanosleep)\s*\(|(?<![\w.>])sleep\s*\("),
        ("tests/support/schedule_perturbation.cc",),  # To delay threads is what it is for.
    ),
    ("getenv", re.compile(r"\bgetenv\s*\(|\benviron\b"), ("runtime/base/",)),
    (
        "rand",
        re.compile(r"(?<![\w.>:])s?rand\s*\(|std::(?:rand|mt19937|random_device)"),
        ("runtime/base/",),
    ),
    (  # One number of it gives all that follow: for jitter, and never for a secret.
        "weak-random",
        re.compile(r"\bRandom\b\s*(?:[&({>]|\w+)"),
        ("runtime/base/random.", "runtime/comm/connector.", "store/client/client_core."),
    ),
)
# What blocks for as long as nobody reads it. Threads that beat, fence, decide or replace wait for
# nobody, so the library writes through the log, and the launcher through its backlogs.
BLOCKING_WRITES = (
    (
        ".cc",
        ("runtime/", "store/", "torch_plugin/"),
        re.compile(
            r"\bwritev?\s*\(\s*STD(?:ERR|OUT)_FILENO\b|\bstd::(?:cerr|clog|cout)\b|\bperror\s*\("
            r"|\bf(?:printf|puts|write|flush)\s*\((?:[^;]*,\s*)?std(?:err|out)\b"
            r"|(?<![\w.>])(?:printf|puts)\s*\("
        ),
        (
            "runtime/base/check.cc",
            # What a command prints for its caller, who may take his time.
            *("store/server/client_commands.cc", "store/server/key_commands.cc"),
            *("store/server/member_commands.cc", "store/server/main.cc"),
        ),
    ),
    (
        ".py",
        ("torch_plugin/torch_resilient/_launch/", "torch_plugin/torch_resilient/run.py"),
        re.compile(r"\bprint\s*\(|\bsys\.std(?:out|err)\b|\bos\.write\s*\("),
        ("torch_plugin/torch_resilient/_launch/output.py",),
    ),
)
# What asks the system's resolver, for as long as a name server is silent. Of a number it asks
# nobody: NUMERIC in the call, or an allowance that says so.
BLOCKING_LOOKUPS = (
    (
        ".cc",
        ("runtime/", "store/", "torch_plugin/"),
        re.compile(
            r"\b(?:getaddrinfo(?:_a)?|gethostby\w+|getnameinfo|res_n?(?:query|search))\s*\("
        ),
        ("runtime/net/resolver.cc",),
    ),
    (
        ".py",
        (PLUGIN_PYTHON,),
        re.compile(
            r"\b(?:getaddrinfo|gethostby\w+|getnameinfo|getfqdn|create_connection)\s*\("
            r"|\burlopen\s*\("
        ),
        (PLUGIN_PYTHON + "_resolver.py",),
    ),
)
NUMERIC = re.compile(r"\b(?:AI|NI)_NUMERICHOST\b")
# What waits for a file system, which may be one of a network: where it is done, on no thread that
# beats, fences, decides, reaps or serves.
BLOCKING_READS = re.compile(
    r"\bReadSmallFile\s*\(|\bstd::[io]?fstream\b|\bfopen\s*\("
    r"|(?:^|[=(,!&|]|\breturn\b)\s*(?:::)?open(?:at)?\s*\((?!\))"
    r"|\bSSL_CTX_(?:load_verify_file|use_\w+_file)\s*\("
)
READS_FOLDERS = ("runtime/", "store/", "torch_plugin/csrc/")
READS_PLACES = (
    "runtime/base/file.",  # What the others call.
    # Kernel's own: /proc, /dev/shm, the terminal or pipe of stderr.
    *("runtime/base/process.cc", "runtime/base/robust_token.cc", "runtime/base/try_write.cc"),
    *("runtime/recovery/thread_census.cc", "runtime/comm/shm_segment.cc"),
    "store/server/metrics.cc",
    # On a thread of their own, but for a server that starts.
    *("store/server/access.cc", "store/client/token_source.cc", "store/tls/context.cc"),
    # While a server starts, and on the thread that persists.
    *("store/server/data_directory.cc", "store/server/sqlite_engine.cc"),
    "store/server/serve_command.cc",
    # On the thread of init, which starts a server.
    *("store/client/server_process.cc", "torch_plugin/csrc/world.cc"),
)
# Waits on a clock of the standard library: only where a thread shell waits for its own queue.
SHELLS = (
    "runtime/base/",
    "runtime/comm/cpu_fabric",
    "runtime/comm/launch_mark",
    "runtime/recovery/observer",
    "runtime/recovery/replay_heal",
    "runtime/recovery/replay_session",
    "runtime/recovery/session",
    "store/client/",
    "store/server/",
    "torch_plugin/csrc/",
)

# torch's timeouts are milliseconds: those above 292 years overflow where they become nanoseconds.
UNBOUNDED_TIMEOUT = re.compile(
    r"\b(?:Deadline::After|Duration)\s*\((?!.*(?:Saturated|FromSeconds)).*timeout"
)

TIMED_WAIT = re.compile(r"\bwait_(?:for|until)\s*\(")

# Pure modules: functions of their arguments, so that the simulator runs them.
PURE = (
    "runtime/net/frame.",
    "runtime/comm/schedule.",
    "runtime/comm/reduce",
    "runtime/comm/wire.",
    "runtime/recovery/replay_log.",
    "runtime/recovery/state_machine.",
    "runtime/recovery/incident.",
    "runtime/recovery/progress_meter.",
    "store/core/",
    "runtime/tls/stream.",
    "runtime/tls/failure.",
    "store/tcpstore/",
    "store/client/client_core.",
)
IMPURE_HEADERS = re.compile(
    r"^(thread|mutex|shared_mutex|condition_variable|future|ctime|fstream|iostream|filesystem|"
    r"unistd\.h|poll\.h|time\.h|netdb\.h|fcntl\.h|pthread\.h|signal\.h|csignal|"
    r"sys/(socket|time|epoll|eventfd|stat|wait)\.h)$"
)
IMPURE_OWN = re.compile(r"^runtime/(base/(thread|fork_guard)\.h|net/socket\.h)$")
IMPURE_USE = re.compile(
    r"\bRESILIENT_LOG\s*\(|\bLogLine\s*\(|\bRandomHexId\s*\(|\bRandomSeed\s*\(|"
    r"\bThisProcess\s*\(|\bSystemClock\b"
)

BANNED_WORDS = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
BANNED_LIBRARIES = re.compile(r"^(format|expected)$")
DEFAULT_CAPTURE = re.compile(r"\[\s*=\s*[\],]")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
ENUM_CLASS = re.compile(r"\benum\s+class\s+(\w+)\s*(?::[^{;]*)?\{")
SWITCH = re.compile(r"\bswitch\s*\(")
CASE_ENUM = re.compile(r"\bcase\s+(?:\w+::)*(\w+)::k\w+\s*:")
DEFAULT = re.compile(r"\bdefault\s*:")
ALLOW = re.compile(r"tidy: allow\(([\w-]+)\)")
NOT_A_FUNCTION = re.compile(r"\b(?:namespace|class|struct|enum|union|extern)\b")
CONTROL = re.compile(r"^\s*(?:\}\s*)?(?:if|else|for|while|do|switch|try|catch|return)\b")


@dataclass(frozen=True, order=True)
class Finding:
    """One breach of one rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.text}"


@dataclass(frozen=True)
class Source:
    """A file of the tree: its raw lines, and for C++ the same lines without comments and texts."""

    path: str
    lines: tuple[str, ...]
    code: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        return PurePosixPath(self.path).suffix in CPP_SUFFIXES

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")

    def includes(self) -> Iterator[tuple[int, str, str]]:
        # From the raw lines, because a quoted path is a text to the code view.
        for number, line in enumerate(self.lines, 1):
            if found := INCLUDE.match(line):
                yield number, found.group(1), found.group(2)


def blank_cpp(text: str) -> str:
    """Replaces comments, strings and character literals by blanks; keeps every line break."""
    token = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s\\]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
        r"|(?<![\w])'(?:\\.|[^'\\\n])+'",
        re.DOTALL,
    )

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group(0))

    return token.sub(blank, text)


def make_source(path: str, text: str) -> Source:
    is_cpp = PurePosixPath(path).suffix in CPP_SUFFIXES
    code = blank_cpp(text) if is_cpp else text
    return Source(path, tuple(text.splitlines()), tuple(code.splitlines()))


def module_of(path: str) -> str | None:
    for module, prefixes in MODULES.items():
        if path.startswith(prefixes):
            return module
    return None


def included_module(kind: str, name: str) -> str | None:
    if name.startswith("resilient/"):
        # Angle and quote alike: the public headers of the two libraries share a folder name.
        return "store_public" if name.startswith("resilient/store/") else "public"
    return module_of(name) if kind == '"' else None


def check_layers(source: Source) -> Iterator[Finding]:
    module = module_of(source.path)
    if not source.is_cpp or module is None:
        return
    for line, kind, name in source.includes():
        target = included_module(kind, name)
        if target is not None and target not in MAY_INCLUDE[module]:
            yield Finding(source.path, line, "layer", f"{module} must not include {name}")
        if kind == '"' and name.startswith(".."):
            yield Finding(source.path, line, "layer", f"write the path from the root: {name}")
        if name.startswith("tests/") and not source.is_test:
            yield Finding(source.path, line, "layer", f"nothing includes tests: {name}")


def check_confinement(source: Source) -> Iterator[Finding]:
    if not source.is_cpp:
        return
    for line, _, name in source.includes():
        if BANNED_LIBRARIES.match(name):
            yield Finding(source.path, line, "library", f"<{name}> is not there in GCC 12")
        if source.path.startswith(CONFINED_EXEMPT):
            continue
        for pattern, places in CONFINED:
            if pattern.search(name) and not source.path.startswith(places):
                where = ", ".join(places) or "tests"
                yield Finding(source.path, line, "confined", f"{name} belongs in {where} only")


def check_world(source: Source) -> Iterator[Finding]:
    if not source.is_cpp or source.path.startswith(("benchmarks/", "docs/")):
        return
    for line, text in enumerate(source.code, 1):
        for rule, pattern, places in WORLD_CALLS:
            if source.is_test and rule != "sleep":
                continue
            if pattern.search(text) and not source.path.startswith(places):
                yield Finding(source.path, line, rule, f"'{text.strip()}' outside its place")
        outside = not source.is_test and not source.path.startswith(SHELLS)
        if outside and TIMED_WAIT.search(text):
            yield Finding(source.path, line, "wait", "waits on a clock outside a thread shell")


def check_writes(source: Source) -> Iterator[Finding]:
    for suffix, folders, pattern, places in BLOCKING_WRITES:
        if not source.path.endswith(suffix) or not source.path.startswith(folders):
            continue
        if source.path.startswith(places):
            continue
        for line, text in enumerate(source.code, 1):
            if found := pattern.search(text):
                finding = f"'{found.group(0)}' may wait for a reader for ever"
                yield Finding(source.path, line, "blocking-write", finding)


def statement(source: Source, line: int) -> str:
    """From that line on to the end of its statement, which is a call in a few lines."""
    text = ""
    for more in source.code[line - 1 : line + 5]:
        text += more + "\n"
        closed = text.count("(") <= text.count(")")
        if closed and "(" in text:
            break
    return text


def check_lookups(source: Source) -> Iterator[Finding]:
    for suffix, folders, pattern, places in BLOCKING_LOOKUPS:
        if not source.path.endswith(suffix) or not source.path.startswith(folders):
            continue
        if source.path.startswith(places):
            continue
        for line, text in enumerate(source.code, 1):
            found = pattern.search(text)
            if found and not NUMERIC.search(statement(source, line)):
                finding = f"'{found.group(0)}' may wait for a name server: ask the resolver"
                yield Finding(source.path, line, "blocking-resolve", finding)


def check_reads(source: Source) -> Iterator[Finding]:
    if not source.path.endswith(".cc") or not source.path.startswith(READS_FOLDERS):
        return
    if source.path.startswith(READS_PLACES):
        return
    for line, text in enumerate(source.code, 1):
        if found := BLOCKING_READS.search(text):
            call = found.group(0).strip()
            finding = f"'{call}' may wait for a file system: read it off the thread"
            yield Finding(source.path, line, "blocking-read", finding)


def check_timeouts(source: Source) -> Iterator[Finding]:
    if not source.is_cpp or not source.path.startswith("torch_plugin/csrc/"):
        return
    for line, text in enumerate(source.code, 1):
        if UNBOUNDED_TIMEOUT.search(text):
            yield Finding(source.path, line, "timeout", "a timeout is converted by Saturated()")


def check_purity(source: Source) -> Iterator[Finding]:
    if not source.is_cpp or not source.path.startswith(PURE):
        return
    for line, _, name in source.includes():
        if IMPURE_HEADERS.match(name) or IMPURE_OWN.match(name):
            yield Finding(source.path, line, "pure", f"a pure module must not include {name}")
    for line, text in enumerate(source.code, 1):
        if found := IMPURE_USE.search(text):
            name = found.group(0).rstrip("( ")
            yield Finding(source.path, line, "pure", f"a pure module must not use {name}")


def check_text(source: Source) -> Iterator[Finding]:
    own = source.path == "tests/tidy.py" or source.path == "tests/unit/test_tidy.py"
    for line, text in enumerate(source.lines, 1):
        if len(text) > COLUMNS_MAX:
            yield Finding(source.path, line, "columns", f"{len(text)} columns, {COLUMNS_MAX} fit")
        if (found := BANNED_WORDS.search(text)) and not own:
            yield Finding(source.path, line, "word", f"{found.group(0)}: do it or leave it out")
        if "\t" in text:
            yield Finding(source.path, line, "tab", "a tab")
        if text != text.rstrip():
            yield Finding(source.path, line, "blank", "blanks at the end of the line")


def check_factories(source: Source) -> Iterator[Finding]:
    """Tensors of ours must not follow the device and dtype that the program has set for its own."""
    if not source.path.startswith(PLUGIN_PYTHON) or not source.path.endswith(".py"):
        return
    for node in ast.walk(ast.parse("\n".join(source.lines))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch" or name not in FACTORIES:
            continue
        given = {keyword.arg for keyword in node.keywords}
        for missing in sorted(FACTORIES[name] - given):
            text = f"torch.{name} without {missing}=: it follows the program's default"
            yield Finding(source.path, node.lineno, "factory", text)


def check_statics(source: Source) -> Iterator[Finding]:
    found: Iterable[tuple[int, str]] = ()
    if source.is_cpp and tidy_statics.in_cpp(source.path):
        found = tidy_statics.cpp_statics(source.code)
    elif not source.is_cpp and tidy_statics.in_python(source.path):
        found = tidy_statics.python_statics(source.lines)
    for line, text in found:
        yield Finding(source.path, line, "static", text)


def check_file_size(source: Source) -> Iterator[Finding]:
    lines = len(source.lines)
    limit = TEST_LINES_MAX if source.is_test else FILE_LINES_MAX
    if source.path.startswith(PUBLIC_HEADERS):
        limit = PUBLIC_HEADER_LINES_MAX
    if lines > limit:
        yield Finding(source.path, lines, "file-size", f"{lines} lines, the budget is {limit}")


def matching_brace(text: str, start: int) -> int:
    """The index behind the brace that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(text)


def cpp_functions(source: Source) -> Iterator[tuple[int, int, str]]:
    """(first line, lines, heading) of what looks like a function definition outside functions."""
    text = "\n".join(
        "" if line.lstrip().startswith("#") else line.removesuffix("\\") for line in source.code
    )
    index = 0
    statement = 0  # Where the text before the next brace begins.
    while index < len(text):
        character = text[index]
        if character in ";}":
            statement = index + 1
        elif character == "{":
            heading = text[statement:index].strip()
            opened = NOT_A_FUNCTION.search(heading.split("(")[0])
            if "(" in heading and not opened and not CONTROL.match(heading):
                end = matching_brace(text, index)
                first = text.count("\n", 0, index - len(text[statement:index].lstrip())) + 1
                last = text.count("\n", 0, end - 1) + 1
                yield first, last - first + 1, " ".join(heading.split())
                index = end - 1
            elif not opened:
                index = matching_brace(text, index) - 1  # An initialiser.
            statement = index + 1
        index += 1


def python_functions(source: Source) -> Iterator[tuple[int, int, str]]:
    import ast

    for node in ast.walk(ast.parse("\n".join(source.lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def check_function_size(source: Source) -> Iterator[Finding]:
    functions = cpp_functions(source) if source.is_cpp else python_functions(source)
    for first, lines, heading in functions:
        if lines > FUNCTION_LINES_MAX:
            text = f"{lines} lines, the budget is {FUNCTION_LINES_MAX}: {heading[:60]}"
            yield Finding(source.path, first, "function-size", text)


def check_captures(source: Source) -> Iterator[Finding]:
    if not source.is_cpp:
        return
    for line, text in enumerate(source.code, 1):
        if DEFAULT_CAPTURE.search(text) and "operator" not in text:
            yield Finding(source.path, line, "capture", "[=] hides what outlives its owner")


def check_switches(source: Source, enums: set[str]) -> Iterator[Finding]:
    """A `default:` over one of our enums would hide a missing case from the compiler."""
    if not source.is_cpp:
        return
    text = "\n".join(source.code)
    for switch in SWITCH.finditer(text):
        start = text.find("{", switch.end())
        if start < 0:
            continue
        body = without_inner_switches(text[start + 1 : matching_brace(text, start) - 1])
        named = {found.group(1) for found in CASE_ENUM.finditer(body)} & enums
        if named and DEFAULT.search(body):
            line = text.count("\n", 0, switch.start()) + 1
            names = ", ".join(sorted(named))
            yield Finding(source.path, line, "default", f"a default: over our enum {names}")


def without_inner_switches(body: str) -> str:
    while found := SWITCH.search(body):
        start = body.find("{", found.end())
        end = matching_brace(body, start) if start >= 0 else len(body)
        body = body[: found.start()] + body[end:]
    return body


def enum_names(sources: Iterable[Source]) -> set[str]:
    names: set[str] = set()
    for source in sources:
        names |= set(ENUM_CLASS.findall("\n".join(source.code)))
    return names


def allowed(source: Source, finding: Finding) -> bool:
    """The exception is written on the line itself or on the comment line above it."""
    for number in (finding.line, finding.line - 1):
        if 1 <= number <= len(source.lines):
            found = ALLOW.search(source.lines[number - 1])
            if found and found.group(1) == finding.rule:
                return True
    return False


def check(sources: list[Source]) -> list[Finding]:
    enums = enum_names(source for source in sources if source.is_cpp)
    simple = (
        *(check_layers, check_confinement, check_world, check_writes),
        *(check_lookups, check_reads),
        *(check_purity, check_text, check_factories, check_timeouts),
        *(check_file_size, check_function_size, check_captures, check_statics),
    )
    findings: list[Finding] = []
    for source in sources:
        found = [finding for rule in simple for finding in rule(source)]
        found += check_switches(source, enums)
        findings += [finding for finding in found if not allowed(source, finding)]
    repeated = tidy_names.repeated((source.path, source.lines) for source in sources)
    findings += [Finding(path, line, "own-name", text) for path, line, text in repeated]
    return sorted(findings)


def tree(root: Path) -> list[Source]:
    """The tracked files and those not ignored; without git, every file of the tree."""
    suffixes = CPP_SUFFIXES | PYTHON_SUFFIXES
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    return [
        make_source(name, (root / name).read_text(encoding="utf-8"))
        for name in sorted(set(names))
        if PurePosixPath(name).suffix in suffixes and (root / name).is_file()
    ]


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    sources = tree(root)
    findings = check(sources)
    for finding in findings:
        print(finding)
    print(f"tidy: {len(sources)} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
