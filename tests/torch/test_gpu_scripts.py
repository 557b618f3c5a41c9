"""The scripts of tests/gpu work: they skip where there is no GPU, and run on the fake one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_device
import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
PARTS = ["conformance", "collectives", "sharing", "faults", "hangs", "graphs", "rebuilds"]
PARTS += ["training", "overhead"]


def run(tmp_path, *arguments, **environment):
    """(exit code, what it printed, the report or None)"""
    out = tmp_path / "gpu.json"
    result = subprocess.run(
        [TESTS / "gpu" / "run.sh", "--python", sys.executable, "--out", out]
        + ["--logs", tmp_path / "logs", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=580,
    )
    report = json.loads(out.read_text()) if out.exists() else None
    return result.returncode, result.stdout + result.stderr, report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_all_is_skipped(tmp_path):
    assert run(tmp_path) == (0, "tests/gpu: skipped: no CUDA device\n", None)


def run_on_fake(tmp_path, parts, **environment):
    if why := fake_device.refusal():
        pytest.skip(why)
    code, text, report = run(tmp_path, "--fake", *parts, **environment)
    assert code == 0, text
    assert report["gpu"] == "fake" and report["torch"] == torch.__version__
    assert list(report["parts"]) == parts
    for part in report["parts"].values():
        assert part["outcome"] == "passed" and part["seconds"] <= part["limit"], text
    return report


@pytest.mark.slow
def test_parts_of_them_run_on_the_fake(tmp_path):
    report = run_on_fake(tmp_path, ["conformance", "rebuilds"], GPU_REBUILDS="7")
    assert len(report["figures"]) == 2


def test_a_part_that_fails_is_told(tmp_path):
    """Without a build it has no program."""
    code, text, report = run(tmp_path, "--fake", "--build", tmp_path, "conformance")
    assert code == 1 and report["parts"]["conformance"]["outcome"] == "failed (127)", text


@pytest.mark.slow
def test_all_of_them_run_on_the_fake(tmp_path):
    report = run_on_fake(tmp_path, [*PARTS, "upstream"])
    assert report["figures"]["torch's own cases"] == {"failed": 2, "passed": 24}
