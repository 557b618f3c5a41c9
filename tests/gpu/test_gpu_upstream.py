"""A part of torch's own tests of collectives on CUDA tensors; gpu_upstream_cases.py runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_device
import pytest

FOLDER = Path(__file__).resolve().parent
CODE = "import gpu_upstream_cases; gpu_upstream_cases.main()"
SECONDS = 110
# {case: what its failure says}. A rank sends nothing to itself.
EXPECTED_FAILURES = {
    "test_batch_isend_irecv_nccl": "is not another rank of a group",
    "test_batch_isend_irecv_self_nccl": "is not another rank of a group",
}


def is_as_expected(name, outcome, why):
    if name in EXPECTED_FAILURES:
        return outcome == "failed" and EXPECTED_FAILURES[name] in why
    return outcome == "passed"


def test_what_passes_on_a_gpu(store, tmp_path, figures):
    pytest.importorskip("expecttest", reason="torch's tests import it")
    out = tmp_path / "outcomes.json"
    paths = [str(FOLDER), str(FOLDER.parent / "torch"), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **gpu_device.environment(0), "RESILIENT_STORE": store}
    environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    cases = os.environ.get("GPU_UPSTREAM_CASES", "").split()
    result = subprocess.run(
        [sys.executable, "-c", CODE, "--out", out, *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(out.read_text())
    outcomes = [outcome for outcome, *_ in found.values()]
    figures("torch's own cases", {kind: outcomes.count(kind) for kind in sorted(set(outcomes))})
    wrong = [
        f"{name}: {outcome}\n{why[-2000:]}"
        for name, (outcome, why, _) in found.items()
        if not is_as_expected(name, outcome, why)
    ]
    assert not wrong, "\n".join(wrong)
