"""Fixtures for whole programs of frameworks."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import launch

COMPILE_SECONDS = 300


@pytest.fixture
def launcher():
    launcher = launch.Launcher()
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def deepspeed_environment(tmp_path_factory):
    """On the CPU, with what DeepSpeed compiles at its first init compiled already."""
    environment = {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions")),
    }
    launcher = launch.Launcher()
    try:
        compiling = launcher.alone("deepspeed_program.py", "--compile-only", **environment)
        assert compiling.wait(COMPILE_SECONDS) == 0, compiling.stderr()
    finally:
        launcher.end()
    return environment
