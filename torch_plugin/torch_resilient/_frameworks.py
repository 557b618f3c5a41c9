"""Frameworks that look at a backend's name, made to know ours when they are imported."""

import importlib.abc
import importlib.machinery
import sys

from torch_resilient import _names


def install():
    """Patches what is imported already, and the rest as it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to patch as Python does, and patches them behind their own code."""

    def find_spec(self, name, path=None, target=None):
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        self._inner.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._inner
        _PATCHES[module.__name__](module)


def _patch_accelerate(module):
    """On the CPU Accelerator takes gloo and refuses every other name that was asked for."""
    original = getattr(module.PartialState, "_prepare_backend", None)
    if original is None:
        return

    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        chosen, kind = original(self, cpu, sagemaker_dp, backend)
        return (backend if _names.names_us(backend) else chosen), kind

    module.PartialState._prepare_backend = _prepare_backend


_PATCHES = {"accelerate.state": _patch_accelerate}
