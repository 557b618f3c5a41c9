"""Whole programs under the launchers: torchrun, plain variables, resilient-run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DIGITS = EXAMPLES / "digits.py"
SHORT = ["--epochs", "12"]


def environment(**extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    return {**kept, "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s", **extra}


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(harness.free_port())]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(stdout):
    accuracy = float(re.search(r"test accuracy ([\d.]+)", stdout)[1])
    return accuracy, re.search(r"parameters (\w+)", stdout)[1]


@pytest.mark.slow
def test_torchrun_runs_the_ordinary_script_with_both_backends():
    accuracies = {}
    for backend in ("gloo", "resilient"):
        process = torchrun(DIGITS, "--backend", backend, *SHORT)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        accuracies[backend] = result(stdout)[0]
    assert min(accuracies.values()) >= 0.95
    assert abs(accuracies["gloo"] - accuracies["resilient"]) < 0.02


@pytest.mark.slow
def test_plain_variables_run_the_ordinary_script():
    port = harness.free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(DIGITS), *SHORT],
            env=environment(
                RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert result(outputs[0][0])[0] >= 0.95


RESTARTED = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

def say(line):  # One write: four writers share the pipe, and parts of lines would mix.
    os.write(1, f"{line}\\n".encode())

say(f"attempt {attempt} total {int(total.item())}")
dist.barrier()  # All have printed before one dies.
if attempt == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
say(f"end of attempt {attempt}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_restarts_all_workers_after_a_kill(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(RESTARTED)
    process = torchrun("--max-restarts", "1", "--monitor-interval", "0.1", script)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == sorted(
        ["attempt 0 total 4", "attempt 1 total 4", "end of attempt 1"] * 4
    )


def resilient_run(*arguments, **extra):
    command = [sys.executable, "-m", "torch_resilient.run", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_elastic_script_heals_under_resilient_run(tmp_path):
    log = tmp_path / "events"
    script = [EXAMPLES / "digits_elastic.py", "--steps", "120", "--log-every", "5"]
    calm = resilient_run("--nproc", 3, *script)
    expected, errors = calm.communicate(timeout=120)
    assert calm.returncode == 0, errors
    process = resilient_run("--nproc", 3, "--events", log, *script)
    lines = []
    killed = False
    for line in process.stdout:
        lines.append(line)
        # The step comes once more when it was not committed before the kill.
        if not killed and line.startswith("[0] step 20"):
            killed = True
            found = re.findall(r'"started".*"rank": 2, "pid": (\d+)', log.read_text())
            os.kill(int(found[0]), signal.SIGKILL)
    errors = process.stderr.read()
    assert process.wait(120) == 0, errors
    assert killed
    assert "training goes on with commit" in errors
    assert result("".join(lines))[1] == result(expected)[1]


ALWAYS_DIES = """
import os, signal, torch, torch.distributed as dist, torch_resilient
dist.init_process_group("resilient")
def train(state):
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
torch_resilient.elastic(train)(torch_resilient.State(step=0))
"""


@pytest.mark.slow
def test_when_the_restarts_are_used_the_job_ends(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(ALWAYS_DIES)
    process = resilient_run("--nproc", 2, "--max-restarts", 1, script)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 137, stderr
    assert "all 1 restarts are used" in stderr
    assert time.monotonic() - started < 40
