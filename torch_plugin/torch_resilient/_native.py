"""Loads the extension, once it is known to fit the torch of this process."""

import functools

import torch

from torch_resilient import _errors, _futures

_FIX = (
    "rebuild it against this torch: pip install --no-build-isolation --force-reinstall --no-deps"
    " torch-resilient (or `make setup` in a checkout)"
)


def minor(version):
    """2.15 for 2.15.0+cu130."""
    return ".".join(version.split("+")[0].split(".")[:2])


@functools.cache
def load():
    """The extension module `_C` with our exceptions installed."""
    try:
        from torch_resilient import _C
    except ImportError as error:
        raise _errors.ConfigError(
            f"torch_resilient's extension does not load under torch {torch.__version__}: {error}."
            f" It is missing or was built for another torch; {_FIX}",
            code="TORCH_VERSION",
        ) from error
    if minor(_C.TORCH_VERSION) != minor(torch.__version__):
        raise _errors.ConfigError(
            f"torch_resilient was built for torch {_C.TORCH_VERSION}, this process runs torch"
            f" {torch.__version__}, and their C++ interfaces differ; {_FIX}",
            code="TORCH_VERSION",
        )
    _C.install_error_factory(_errors.make)
    _C.ResilientWork.get_future = _futures.get_future
    return _C
