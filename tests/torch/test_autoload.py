"""What `import torch` does in every process of the environment."""

import subprocess
import sys

import torch
import torch.distributed as dist

from torch_resilient import _autoload, _names


def run(code, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_name_is_known_after_import_torch():
    code = (
        "import sys, torch, torch.distributed as d;"
        "assert d.is_backend_available('resilient'); assert d.Backend.RESILIENT == 'resilient';"
        "assert d.init_process_group is d.distributed_c10d.init_process_group;"
        "assert d.device_mesh.init_process_group is d.init_process_group;"
        "assert d.Backend.default_device_backend_map['cpu'] == 'gloo';"
        "print(sorted(m for m in sys.modules if m.startswith('torch_resilient')))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    names = ("_autoload", "_frameworks", "_names", "_wrapping")
    ours = [f"torch_resilient.{name}" for name in names]
    assert done.stdout.strip() == str(["torch_resilient", *ours])


def test_it_is_cheap():
    """Measured here, where torch is loaded: the install alone, undone and done again."""
    import time

    c10d = dist.distributed_c10d
    wrapped = c10d.init_process_group
    assert wrapped.__wrapped__ is not wrapped
    started = time.perf_counter()
    for _ in range(100):
        _autoload.autoload()
    assert (time.perf_counter() - started) / 100 < 0.002
    assert c10d.init_process_group is wrapped


def test_switched_off_it_comes_with_an_explicit_import():
    code = (
        "import torch, torch.distributed as d;"
        "assert not hasattr(d.init_process_group, '__wrapped__') or"
        " not hasattr(d.init_process_group, '_resilient_wrapped');"
        "import torch_resilient; assert d.init_process_group._resilient_wrapped"
    )
    done = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_it_never_breaks_import_torch(monkeypatch, capsys):
    monkeypatch.setattr(_autoload, "_install", lambda: 1 / 0)
    _autoload.autoload()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_names():
    for ours in ("resilient", "RESILIENT", "cpu:resilient", "cpu:gloo,cuda:resilient"):
        assert _names.names_us(ours)
    for other in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl", "resilient2", torch.device("cpu")):
        assert not _names.names_us(other)
