"""Fixtures for tests on a GPU; without one all of them are skipped with the reason."""

import importlib.util
import json
import os
from pathlib import Path

import harness
import pytest

FOLDER = Path(__file__).resolve().parent
if "GPU_TESTS" in os.environ:  # Not for all the tests that are collected beside these.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Or a forked rank has no CUDA.

# Under a name of its own: the tests of tests/torch have a conftest too.
_spec = importlib.util.spec_from_file_location(
    "torch_fixtures", FOLDER.parent / "torch" / "conftest.py"
)
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
rank_server = _fixtures.rank_server
store = _fixtures.store
quick_store = _fixtures.quick_store

import gpu_device  # noqa: E402


def pytest_collection_modifyitems(items):
    here = [item for item in items if FOLDER in item.path.parents]
    if here and (why := gpu_device.refusal()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"tests of a GPU: {why}"))


class GpuWorld(harness.World):
    """Ranks that share the one GPU; `shared` None: without what NCCL needs for that."""

    shared = True

    def environment(self, rank, size, extra=None):
        own = gpu_device.environment(rank, self.shared)
        return super().environment(rank, size, {**own, **(extra or {})})


@pytest.fixture
def world(rank_server, store):
    yield from _world(GpuWorld(rank_server, store))


@pytest.fixture
def quick_world(rank_server, quick_store):
    """The same with leases of two seconds."""
    yield from _world(GpuWorld(rank_server, quick_store))


def _world(world):
    yield world
    left = world.close()
    if left:
        pytest.fail("still running at the end of the test:\n" + "\n".join(left))


@pytest.fixture
def figures(request):
    """Keeps what a test has measured, by name, for the report."""

    def keep(name, value):
        print(f"{name}: {json.dumps(value)}")
        if path := os.environ.get("GPU_FIGURES"):
            with open(path, "a") as file:
                file.write(json.dumps({name: value}) + "\n")

    return keep
