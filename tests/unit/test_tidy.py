"""The checks of tests/tidy.py find what they are for, and nothing in clean code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tidy


def rules(path: str, text: str, *others: tuple[str, str]) -> list[str]:
    sources = [tidy.make_source(path, text)]
    sources += [tidy.make_source(other, other_text) for other, other_text in others]
    return [finding.rule for finding in tidy.check(sources) if finding.path == path]


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("runtime/base/a.cc", '"runtime/net/frame.h"'),
        ("runtime/net/a.cc", '"runtime/comm/wire.h"'),
        ("runtime/comm/a.h", '"runtime/recovery/flight.h"'),
        ("runtime/comm/a.cc", '"store/core/codec.h"'),
        ("runtime/recovery/a.cc", "<resilient/store/client.h>"),
        ("runtime/include/resilient/a.h", '"runtime/base/log.h"'),
        ("store/core/a.cc", '"runtime/recovery/flight.h"'),
        ("store/core/a.cc", '"store/client/client_core.h"'),
        ("store/client/a.cc", '"store/server/server.h"'),
        ("torch_plugin/csrc/a.cc", '"runtime/base/log.h"'),
        ("torch_plugin/csrc/a.cc", '"store/client/client_core.h"'),
        ("store/server/a.cc", '"tests/support/manual_clock.h"'),
        ("store/server/a.cc", '"../core/codec.h"'),
        ("store/tls/a.cc", '"store/core/codec.h"'),
        ("store/core/a.cc", '"runtime/tls/stream.h"'),
        ("runtime/tls/a.cc", '"runtime/net/socket.h"'),
    ],
)
def test_layer_breach_is_found(path: str, include: str) -> None:
    assert "layer" in rules(path, f"#include {include}\n")


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("runtime/net/a.cc", '"runtime/base/log.h"'),
        ("runtime/recovery/a.cc", '"runtime/comm/wire.h"'),
        ("store/server/a.cc", '"store/core/codec.h"'),
        ("store/client/a.cc", "<resilient/rendezvous.h>"),
        ("torch_plugin/csrc/a.cc", "<resilient/store/client.h>"),
        ("torch_plugin/csrc/a.cc", '"torch_plugin/csrc/convert.h"'),
        ("torch_plugin/include/resilient/torch.h", "<torch/csrc/distributed/c10d/Store.hpp>"),
        ("tests/sim/a.cc", '"store/core/server_core.h"'),
        ("tests/sim/a.cc", '"store.pb.h"'),
        ("store/server/a.cc", "<uv.h>"),
        ("store/client/a.cc", '"runtime/tls/functions.h"'),
        ("store/core/codec.cc", '"store.pb.h"'),
        ("runtime/comm/nccl_group.cc", '"runtime/comm/nccl_api.h"'),
        ("runtime/recovery/session.cc", '"runtime/comm/nccl_communicator.h"'),
        ("tests/unit/comm/nccl_headers_test.cc", "<nccl.h>"),
    ],
)
def test_allowed_include_is_silent(path: str, include: str) -> None:
    assert rules(path, f"#include {include}\n") == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("store/client/a.cc", "<uv.h>"),
        ("store/client/a.cc", "<openssl/ssl.h>"),
        ("store/core/a.cc", "<sqlite3.h>"),
        ("store/core/server_core.cc", '"store.pb.h"'),
        ("runtime/comm/a.cc", "<torch/torch.h>"),
        ("torch_plugin/include/resilient/a.h", "<pybind11/pybind11.h>"),
        ("runtime/comm/cpu.cc", "<nccl.h>"),
        ("runtime/comm/nccl_group.cc", "<nccl.h>"),
        ("runtime/comm/nccl_group.cc", "<cuda_runtime_api.h>"),
        ("runtime/comm/cpu.cc", '"runtime/comm/nccl_api.h"'),
        ("runtime/recovery/session.cc", '"runtime/comm/nccl_types.h"'),
        ("runtime/comm/shm_rounds.cc", '"runtime/comm/reduce_kernels.h"'),
    ],
)
def test_third_parties_are_confined(path: str, include: str) -> None:
    assert rules(path, f"#include {include}\n") == ["confined"]


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("now", "auto t = std::chrono::steady_clock::now();"),
        ("clock", "clock_gettime(CLOCK_BOOTTIME, &t);"),
        ("sleep", "std::this_thread::sleep_for(1s);"),
        ("sleep", "sleep(1);"),
        ("sleep", "::usleep(1);"),
        ("getenv", 'const char* x = std::getenv("X");'),
        ("rand", "int x = rand() % 6;"),
        ("rand", "std::mt19937 generator;"),
        ("weak-random", "Random random_;"),
        ("weak-random", "std::string Secret(Random& random);"),
        ("wait", "condition.wait_for(lock, Millis(5));"),
        ("capture", "auto f = [=] { return x; };"),
        ("capture", "auto f = [=, this] { return x; };"),
    ],
)
def test_forbidden_call_is_found(rule: str, line: str) -> None:
    assert rules("runtime/comm/a.cc", f"void F() {{\n  {line}\n}}\n") == [rule]
    assert rules("runtime/comm/a.cc", f"// {line}\n") == [], "a comment is not code"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("Deadline::After(now, timeout)", ["timeout"]),
        ("Duration(options.timeout) + kDelay", ["timeout"]),
        ("Deadline::After(now, Saturated(timeout))", []),
        ("Deadline::After(clock.Now(), FromSeconds(timeout))", []),
    ],
)
def test_timeouts_of_torch_are_saturated(call: str, expected: list[str]) -> None:
    assert rules("torch_plugin/csrc/a.cc", f"auto x = {call};\n") == expected
    assert rules("runtime/comm/a.cc", f"auto x = {call};\n") == []


def test_world_is_allowed_in_its_places() -> None:
    assert rules("runtime/base/clock.cc", "clock_gettime(CLOCK_BOOTTIME, &t);\n") == []
    assert rules("store/client/link.cc", "condition.wait_for(lock, Millis(5));\n") == []
    assert rules("tests/unit/net/a.cc", "auto t = Clock::now();\n") == []
    assert rules("tests/unit/net/a.cc", "sleep(1);\n") == ["sleep"], "no sleeps in tests"
    assert rules("runtime/comm/a.cc", "peer.sleep(1); Now(); operand(2);\n") == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/comm/a.cc", "(void)write(STDERR_FILENO, text, size);"),
        ("store/client/a.cc", 'std::fprintf(stderr, "%s", text);'),
        ("runtime/recovery/a.cc", "std::cerr << text;"),
        ("torch_plugin/csrc/a.cc", 'perror("connect");'),
        ("store/server/a.cc", "std::fwrite(text.data(), 1, text.size(), stdout);"),
        ("torch_plugin/torch_resilient/_launch/a.py", "print(text, file=sys.stderr)"),
        ("torch_plugin/torch_resilient/_launch/a.py", "os.write(2, text)"),
    ],
)
def test_write_that_may_block_is_found(path: str, line: str) -> None:
    body = f"void F() {{\n  {line}\n}}\n" if path.endswith(".cc") else f"{line}\n"
    assert "blocking-write" in rules(path, body)


def test_writes_are_allowed_in_their_places() -> None:
    line = "std::fwrite(text.data(), 1, text.size(), stdout);"
    assert rules("store/server/key_commands.cc", f"void F() {{\n  {line}\n}}\n") == []
    spawn = "posix_spawn_file_actions_adddup2(&actions, log_fd, STDERR_FILENO);"
    assert rules("store/client/a.cc", f"void F() {{\n  {spawn}\n}}\n") == []
    assert rules("torch_plugin/torch_resilient/_launch/output.py", "os.write(2, text)\n") == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("runtime/net/socket.cc", "const int error = getaddrinfo(host, port, &hints, &found);"),
        ("store/server/a.cc", "hostent* const found = ::gethostbyname(name);"),
        ("store/client/a.cc", "getnameinfo(address, size, host, sizeof host, nullptr, 0, 0);"),
        ("torch_plugin/torch_resilient/a.py", "socket.getaddrinfo(host, 0)"),
        ("torch_plugin/torch_resilient/_launch/a.py", "socket.create_connection((host, 1))"),
        ("torch_plugin/torch_resilient/a.py", "socket.getfqdn()"),
    ],
)
def test_lookup_that_may_block_is_found(path: str, line: str) -> None:
    body = f"void F() {{\n  {line}\n}}\n" if path.endswith(".cc") else f"{line}\n"
    assert rules(path, body) == ["blocking-resolve"]


def test_lookups_are_allowed_in_their_places_and_of_numbers() -> None:
    line = "getaddrinfo(host, nullptr, &hints, &found);"
    assert rules("runtime/net/resolver.cc", f"void F() {{\n  {line}\n}}\n") == []
    numeric = "getnameinfo(address, size, host, n, nullptr, 0,\n      NI_NUMERICHOST);"
    assert rules("runtime/net/a.cc", f"void F() {{\n  {numeric}\n}}\n") == []
    call = "socket.getaddrinfo(\n    host, 0, flags=socket.AI_NUMERICHOST\n)\n"
    assert rules("torch_plugin/torch_resilient/a.py", call) == []
    assert rules("torch_plugin/torch_resilient/_resolver.py", "socket.getaddrinfo(host, 0)\n") == []
    assert rules("torch_plugin/torch_resilient/a.py", "socket.gethostname()\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "const auto file = ReadSmallFile(path, 10);",
        "std::ifstream file(path);",
        "const int fd = open(path.c_str(), O_RDONLY);",
        "const int fd = ::openat(folder, path.c_str(), O_RDONLY);",
        'FILE* file = std::fopen(path, "r");',
        "call.SSL_CTX_load_verify_file(context, path);",
    ],
)
def test_read_that_may_block_is_found(line: str) -> None:
    for path in ("store/client/link.cc", "store/server/server.cc", "runtime/recovery/a.cc"):
        assert rules(path, f"void F() {{\n  {line}\n}}\n") == ["blocking-read"]
    assert rules("store/client/token_source.cc", f"void F() {{\n  {line}\n}}\n") == []


def test_what_is_called_open_is_no_read() -> None:
    for line in ("if (link_.open()) return;", "RESILIENT_CHECK(open());", "context->Open(files);"):
        assert rules("store/client/link.cc", f"void F() {{\n  {line}\n}}\n") == []


def test_pure_modules_stay_pure() -> None:
    assert rules("store/core/a.cc", "#include <thread>\n") == ["pure"]
    assert rules("store/core/a.h", '#include "runtime/net/socket.h"\n') == ["pure"]
    assert rules("runtime/net/frame.cc", 'RESILIENT_LOG(kInfo, "x");\n') == ["pure"]
    assert rules("store/client/client_core.cc", "auto id = RandomHexId();\n") == ["pure"]
    assert rules("store/client/link.cc", "#include <thread>\n") == []


def test_text_rules() -> None:
    path = "runtime/comm/a.cc"
    assert rules(path, "x" * 100 + "\n") == []
    assert rules(path, "x" * 101 + "\n") == ["columns"]
    assert rules("tests/torch/a.py", "x = 1  # " + "y" * 100 + "\n") == ["columns"]
    assert rules(path, "// TODO: later\n") == ["word"]
    assert rules(path, "int x;  // FIXME\n") == ["word"]
    assert rules(path, "\tint x;\n") == ["tab"]
    assert rules(path, "int x; \n") == ["blank"]


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("runtime/comm/a.cc", 600),
        ("tests/unit/a.cc", 1000),
        ("runtime/include/resilient/a.h", 250),
        ("torch_plugin/torch_resilient/a.py", 600),
    ],
)
def test_file_budget(path: str, limit: int) -> None:
    assert rules(path, "\n" * limit) == []
    assert rules(path, "\n" * (limit + 1)) == ["file-size"]


FUNCTIONS = {
    "free": "int F(int x) {{\n{body}}}\n",
    "method": "void A::F() const {{\n{body}}}\n",
    "in a namespace": "namespace a {{\nnamespace {{\nint F() {{\n{body}}}\n}}\n}}\n",
    "in a class": "class A final : public B {{\n public:\n  int F() {{\n{body}}}\n}};\n",
    "constructor": "A::A(int x) : x_(x), y_(x) {{\n{body}}}\n",
    "test": "TEST(A, B) {{\n{body}}}\n",
    "template": "template <typename T>\nT F(T x) {{\n{body}}}\n",
}


@pytest.mark.parametrize("form", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_function_budget(form: str) -> None:
    fits = form.format(body='  if (x) { y("{"); }\n' * (tidy.FUNCTION_LINES_MAX - 3))
    above = form.format(body="  for (;;) { y(); }\n" * (tidy.FUNCTION_LINES_MAX - 1))
    assert rules("runtime/comm/a.cc", fits) == []
    assert rules("runtime/comm/a.cc", above) == ["function-size"]


def test_function_budget_of_python() -> None:
    assert rules("tests/torch/a.py", "def f():\n" + "    x = 1\n" * 69) == []
    assert rules("tests/torch/a.py", "def f():\n" + "    x = 1\n" * 70) == ["function-size"]


def test_long_tables_are_not_functions() -> None:
    table = "constexpr Entry kTable[] = {\n" + "    {1, F(2)},\n" * 100 + "};\n"
    assert rules("runtime/comm/a.cc", table) == []


ENUM = ("runtime/comm/a.h", "enum class Kind : std::uint8_t { kOne, kTwo };\n")


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("switch (kind) { case Kind::kOne: return 1; default: return 2; }", ["default"]),
        ("switch (kind) { case resilient::Kind::kOne: break; default: break; }", ["default"]),
        ("switch (kind) { case Kind::kOne: return 1; case Kind::kTwo: return 2; }", []),
        ("switch (errno) { case EBADF: return 1; default: return 2; }", []),
        ("switch (x.op_case()) { case pb::Request::kSet: break; default: break; }", []),
        (
            "switch (kind) { case Kind::kOne: switch (n) { case 1: break; default: break; } }",
            [],
        ),
    ],
)
def test_default_over_our_enum(switch: str, expected: list[str]) -> None:
    assert rules("runtime/comm/a.cc", f"int F() {{ {switch} }}\n", ENUM) == expected


def test_exception_names_its_rule() -> None:
    path = "runtime/comm/a.cc"
    assert rules(path, "sleep(1);  // tidy: allow(sleep): why\n") == []
    assert rules(path, "// tidy: allow(sleep): why\nsleep(1);\n") == []
    assert rules(path, "sleep(1);  // tidy: allow(rand): why\n") == ["sleep"]


def test_texts_and_comments_are_not_code() -> None:
    text = 'auto x = "sleep(1) [=]"; /* rand()\n getenv() */ auto y = R"(::now())";\n'
    assert rules("runtime/comm/a.cc", text) == []
    assert rules("runtime/comm/a.cc", "int x = 1'000'000; sleep(1); int y = 1'000;\n") == ["sleep"]


def test_main_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runtime" / "comm" / "a.cc"
    file.parent.mkdir(parents=True)
    file.write_text("int x;\nauto f = [=] { return x; };\n")
    assert tidy.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("runtime/comm/a.cc:2: [capture] ")
    file.write_text("int x;\n")
    assert tidy.main([str(tmp_path)]) == 0


def test_factory_that_follows_the_programs_defaults_is_found() -> None:
    path = "torch_plugin/torch_resilient/_a.py"
    assert rules(path, 'torch.zeros(1, dtype=torch.int64)\ntorch.empty(1, device="cpu")\n') == [
        "factory",
        "factory",
    ]
    assert rules(path, 'torch.zeros(1, dtype=torch.int64, device="cpu")\n') == []
    assert rules("tests/torch/a.py", "torch.zeros(1)\n") == []


def in_namespace(declaration: str) -> str:
    return f"namespace resilient {{\nnamespace {{\n\n{declaration}\n\n}}  // namespace\n}}\n"


@pytest.mark.parametrize(
    "declaration",
    [
        "std::mutex mutex;",
        "const WakeFd wake;",
        "std::atomic<const WakeFd*> wake{nullptr};",
        "std::atomic<Writer*> writer{nullptr};",
        "Children children;",
        "std::map<std::string, Page> pages;",
        "PyObject* factory = nullptr;",
        "const Clock* clock = nullptr;",
        "std::thread threads[2];",
        "constinit std::mutex mutex;",
    ],
)
def test_a_static_that_is_not_right_over_a_fork_is_found(declaration: str) -> None:
    assert rules("runtime/base/a.cc", in_namespace(declaration)) == ["static"]
    function = f"void F() {{\n  static {declaration}\n}}\n"
    assert rules("torch_plugin/csrc/a.cc", function) == ["static"]
    assert rules("runtime/base/a.h", f"class A {{\n  static {declaration}\n}};\n") == ["static"]
    assert rules("tests/unit/base/a_test.cc", in_namespace(declaration)) == []
    assert rules("store/server/a.cc", in_namespace(declaration)) == [], "it forks nobody"


@pytest.mark.parametrize(
    "declaration",
    [
        "constinit PerProcess<Children> children;",
        "std::atomic<std::uint64_t> last{0};",
        "std::atomic<std::uint64_t> bits[kWords / kBits];",
        "volatile std::sig_atomic_t stopped = 0;",
        "constexpr std::array kNames = {1, 2};",
        'constexpr char kName[] = "name";',
        "constinit const SystemClock clock;",
    ],
)
def test_a_static_that_is_right_over_a_fork_is_silent(declaration: str) -> None:
    assert rules("runtime/base/a.cc", in_namespace(declaration)) == []
    assert rules("runtime/base/a.cc", f"void F() {{\n  static {declaration}\n}}\n") == []


def test_a_constant_of_a_function_is_made_under_a_lock() -> None:
    assert rules("runtime/base/a.cc", in_namespace("const std::string kEmpty;")) == []
    function = "void F() {\n  static const std::string empty;\n}\n"
    assert rules("runtime/base/a.cc", function) == ["static"]


def test_functions_and_threads_own_variables_are_no_statics() -> None:
    text = (
        "static Deadline Never() { return Deadline(kNever); }\n"
        "  static std::size_t BytesOf(const Entry& entry);\n"
        "thread_local const Session* inside = nullptr;\n"
        "static_assert(std::atomic<int>::is_always_lock_free);\n"
        "using Lock = std::unique_lock<std::mutex>;\n"
        "extern const std::mutex* other;\n"
        "enum class Kind : int { kA };\n"
    )
    assert rules("runtime/base/a.h", in_namespace(text)) == []


OWN = "namespace resilient {{\nnamespace {{\n{}\n}}  // namespace\n}}  // namespace resilient\n"


THEIRS = """constexpr long kMost = 5;
class Taker {
};
void Take(const std::string& text) { Put(text); }"""


@pytest.mark.parametrize(
    "line",
    [
        "constexpr int kMost = 3;",
        "constexpr char kMost[] = {};",
        "const Status kMost(1);\nconstexpr std::array kMost = {1};",
        "class Taker {\n};",
        "struct Taker : Base {\n};",
        "class Taker final : public Base {\n};",
        "int Take(const std::string& text) {\n  return 1;\n}",
    ],
)
def test_a_name_of_two_sources_of_a_module_is_found(line: str) -> None:
    other = ("store/core/a.cc", OWN.format(THEIRS))
    assert "own-name" in rules("store/core/b.cc", OWN.format(line), other)


def test_names_of_other_modules_of_functions_and_within_functions_are_free() -> None:
    text = OWN.format("constexpr int kMost = 3;\nint Most(int a) {\n  constexpr int kIn = 1;\n}")
    others = [
        ("store/client/a.cc", text),
        ("store/core/a.h", text),
        ("store/core/c.cc", OWN.format("int Most(long a) {\n  constexpr int kIn = 2;\n}")),
    ]
    assert "own-name" not in rules("store/core/b.cc", text, *others)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("_lock = threading.Lock()\n", ["static"]),
        ("_changed: threading.Condition = threading.Condition()\n", ["static"]),
        ("_kept = socket.socket()\n", ["static"]),
        ("_lock = threading.Lock()\nos.register_at_fork(after_in_child=_forget)\n", []),
        ("def f():\n    lock = threading.Lock()\n", []),
    ],
)
def test_a_lock_of_a_python_module_says_what_a_child_does(text: str, expected: list[str]) -> None:
    assert rules("torch_plugin/torch_resilient/_a.py", text) == expected
    assert rules("torch_plugin/torch_resilient/_launch/a.py", text) == [], "it is no rank"
