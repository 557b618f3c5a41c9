"""Finds the module fake_cuda of the build tree: CUDA devices of torch's without a GPU.

Its devices take the place of the real ones in the whole process and for good, so only ranks load
it. See tests/support/fake_torch_module.cc for what it has.
"""

import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests" / "support"
LIBRARY = FOLDER / "libresilient_fake_nccl.so"  # In the place of NCCL and of the CUDA runtime.


def refusal():
    """Why it cannot be used here; None when it can."""
    if not list(FOLDER.glob("fake_cuda*.so")):
        return f"no module fake_cuda in {FOLDER}: build with RESILIENT_BUILD_TESTS"
    built = (FOLDER / "torch_minor.txt").read_text().strip()
    if not torch.__version__.startswith(built + "."):
        return f"fake_cuda was built for torch {built}, this is {torch.__version__}"
    return None


def load():
    """In a rank: the module, installed."""
    sys.path.insert(1, str(FOLDER))
    import fake_cuda

    fake_cuda.install()
    return fake_cuda
