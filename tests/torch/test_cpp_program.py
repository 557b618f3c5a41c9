"""A libtorch C++ program without Python: built from the install tree, run, killed and healed.

Goal: find_package(Resilient) is enough to build docs/examples/cpp_train, and a run of it that loses
a rank to SIGKILL ends with the parameters of an undisturbed one, bit for bit. Method: cmake
--install of the build that this package comes from, into a temporary folder, and real processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import harness
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "cpp_train"
# Of `make build`; tests/compat.sh names that of its version of torch.
BUILD = Path(os.environ.get("CPP_BUILD", ROOT / "build"))
SIZE = 4
STEPS = 1500
BUILD_SECONDS = 400  # One source that includes all of torch, on a loaded machine; 25 s when idle.
RUN_SECONDS = 90


def environment(**extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENT_", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s", **extra}


def check(*command, seconds=60):
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip(f"{BUILD} is not there: the package was built elsewhere")
    prefix = tmp_path_factory.mktemp("prefix")
    check("cmake", "--install", BUILD, "--prefix", prefix)
    return prefix


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory):
    build = tmp_path_factory.mktemp("cpp_train")
    configure = ["cmake", "-S", EXAMPLE, "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_PREFIX_PATH={installed}", f"-DPython_EXECUTABLE={sys.executable}"]
    # Nothing to gain from optimising it; the compiler has enough to do with torch's headers.
    configure += ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
    if shutil.which("ccache"):
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    check(*configure)
    check("cmake", "--build", build, seconds=BUILD_SECONDS)
    return build / "cpp_train"


@pytest.fixture(scope="module")
def undisturbed(program, tmp_path_factory):
    process = launch(program, tmp_path_factory.mktemp("undisturbed") / "events")
    return digest(finish(process))


def launch(program, events):
    command = [sys.executable, "-m", "torch_resilient.run", "--nproc", SIZE, "--events", events]
    command += ["--no-python", program, STEPS]
    return start(list(map(str, command)), environment())


def start(command, variables):
    """A process that is ended when it takes too long."""
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.timer = threading.Timer(RUN_SECONDS, process.terminate)
    process.timer.start()
    return process


def finish(process):
    stdout, stderr = process.communicate()
    process.timer.cancel()
    assert process.returncode == 0, stderr
    return stdout


def digest(stdout):
    """The parameters at the end, which all ranks have."""
    found = re.findall(r"parameters (\w+)", stdout)
    assert len(found) == SIZE and len(set(found)) == 1, stdout
    return found[0]


def pids(events, rank):
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [e["pid"] for e in lines if e["event"] == "started" and e["rank"] == rank]


def test_what_is_installed(installed):
    for name in ("torch.h", "torch_errors.h", "session.h", "store/client.h"):
        assert (installed / "include" / "resilient" / name).is_file()
    assert not (installed / "torch_resilient").exists()  # The wheel's, on request only.


def test_the_static_libraries_link_without_torch(installed, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(plain LANGUAGES CXX)\n"
        "find_package(Resilient REQUIRED)\nadd_executable(plain main.cc)\n"
        "target_link_libraries(plain PRIVATE Resilient::runtime Resilient::store)\n"
    )
    (tmp_path / "main.cc").write_text(
        "#include <resilient/session.h>\n#include <resilient/store/locate.h>\n"
        "int main() { return resilient::SessionStateName(resilient::SessionState::kInit).empty() ||"
        ' resilient::store::AddressTowards("127.0.0.1:1") != "127.0.0.1"; }\n'
    )
    build = tmp_path / "build"
    nowhere = "-DRESILIENT_TORCH_DIR=/nonexistent"
    check("cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", nowhere)
    check("cmake", "--build", build, seconds=BUILD_SECONDS)
    assert "torch" not in subprocess.check_output(["ldd", build / "plain"], text=True)
    check(build / "plain")


def test_the_program_has_no_python(program):
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    names = [Path(line.split()[0]).name for line in listed.splitlines()]
    assert "libresilient_torch.so" in names and "libtorch_cpu.so" in names
    assert not [name for name in names if "python" in name]


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_replaced_and_nothing_is_lost(program, undisturbed, victim, tmp_path):
    events = tmp_path / "events"
    process = launch(program, events)
    head = []
    for line in process.stdout:
        head.append(line)
        if "step 200 " in line:
            break
    os.kill(pids(events, victim)[0], signal.SIGKILL)
    tail = finish(process)
    assert digest("".join(head) + tail) == undisturbed
    assert len(pids(events, victim)) == 2
    entries = [int(step) for step in re.findall(r"goes on at step (\d+)", tail)]
    # What rank 0 has told of step 200 came before all had committed it.
    assert len(entries) == SIZE and len(set(entries)) == 1 and 199 <= entries[0] < STEPS, tail


@pytest.mark.slow
def test_plain_variables_start_the_store_and_give_the_same(program, undisturbed, tmp_path):
    """And each says of how many ranks its world is, as a launcher may ask it to."""
    port = str(harness.free_port())
    processes = []
    for rank in range(SIZE):
        plain = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        plain.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
        plain["RESILIENT_SEATED"] = str(tmp_path / f"{rank}")
        processes.append(start([program, str(STEPS)], plain))
    assert digest("".join(finish(process) for process in processes)) == undisturbed
    assert {(tmp_path / f"{rank}").read_text() for rank in range(SIZE)} == {str(SIZE)}


def test_what_is_missing_is_named(program):
    plain = {k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([program], env=plain, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("[resilient:SETTING] RANK is not set: "), done.stderr
