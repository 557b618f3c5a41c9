"""The exception classes and their table."""

import gc
import pickle
import sys

import pytest
import torch
import torch.distributed as dist

import torch_resilient
from torch_resilient import _errors, _native

BASES = {
    "RANK_LOST": dist.DistBackendError,
    "LEFT": dist.DistBackendError,
    "STALE_GENERATION": dist.DistBackendError,
    "COMM_STALLED": dist.DistBackendError,
    "COMM_FAILED": dist.DistBackendError,
    "MISMATCH": dist.DistBackendError,
    "DEADLOCK": dist.DistBackendError,
    "STALLED": dist.DistBackendError,
    "DEVICE_LOST": dist.DistBackendError,
    "DEVICE_STALLED": dist.DistBackendError,
    "GROWTH": dist.DistBackendError,
    "DUPLICATE_RANK": dist.DistBackendError,
    "WORLD_SIZE": dist.DistBackendError,
    "JOB": dist.DistBackendError,
    "DUPLICATE_DEVICE": dist.DistBackendError,
    "SETTING": dist.DistBackendError,
    "TORCH_VERSION": dist.DistBackendError,
    "FORKED": dist.DistBackendError,
    "INVALID_ARGUMENT": dist.DistBackendError,
    "JOIN_TIMEOUT": dist.DistStoreError,
    "STORE_LOST": dist.DistStoreError,
    "TIMEOUT": dist.DistStoreError,
    "OUTCOME_UNKNOWN": dist.DistStoreError,
    "NOT_FOUND": dist.DistStoreError,
    "WRONG_TYPE": dist.DistStoreError,
    "TOO_LARGE": dist.DistStoreError,
    "QUEUE_EMPTY": dist.QueueEmptyError,
    "REFUSED": dist.DistNetworkError,
    "UNREACHABLE": dist.DistNetworkError,
    "RESOLVE": dist.DistNetworkError,
    "PROTOCOL": dist.DistNetworkError,
    "AUTH": dist.DistNetworkError,
}


@pytest.mark.parametrize(("code", "base"), BASES.items())
def test_each_code_has_its_class(code, base):
    error = _errors.make(code, "what happened", {"rank": 3, "host": "a", "pid": 7})
    assert isinstance(error, base)
    assert isinstance(error, torch_resilient.ResilientError)
    assert isinstance(error, dist.DistError)
    assert str(error) == f"[resilient:{code}] what happened"
    assert (error.code, error.rank, error.host, error.pid) == (code, 3, "a", 7)
    assert error.generation is None


def test_the_table_is_complete():
    assert set(_errors.CLASSES) == set(BASES)
    for name in _errors.PUBLIC:
        assert getattr(torch_resilient, name).__module__ == "torch_resilient"


def test_elastic_tries_again_after_what_is_no_bug():
    tried = {code for code in BASES if _native.load().retried_by_elastic(code)}
    losses = {"RANK_LOST", "LEFT", "COMM_STALLED", "COMM_FAILED", "DEVICE_LOST", "STORE_LOST"}
    assert tried == losses | {"DEVICE_STALLED", "TIMEOUT", "OUTCOME_UNKNOWN", "GROWTH"}
    assert not _native.load().retried_by_elastic("a code of a newer peer")


def test_wrong_starts_and_wrong_arguments_are_value_errors():
    assert issubclass(torch_resilient.ConfigError, ValueError)
    assert issubclass(torch_resilient.InvalidArgumentError, ValueError)


def test_unknown_values_are_none():
    attributes = {"rank": -1, "host": "", "pid": 0, "generation": 4, "group": "", "seq": 0}
    error = _errors.make("RANK_LOST", "x", attributes)
    assert error.rank is None and error.host is None and error.pid is None
    assert error.generation == 4 and error.seq is None and error.since is None
    assert _errors.make("RANK_LOST", "x", {"rank": 0}).rank == 0


def test_a_code_without_a_class_of_its_own():
    error = _errors.make("RESOURCE_EXHAUSTED", "x", {})
    assert type(error) is torch_resilient.ResilientError
    assert error.code == "RESOURCE_EXHAUSTED"


def test_the_prefix_comes_once():
    assert str(_errors.make("LEFT", "[resilient:LEFT] x", {})) == "[resilient:LEFT] x"


def test_pickling_keeps_everything():
    error = _errors.make("MISMATCH", "x", {"rank": 1, "seq": 9, "group": "world"})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert (copy.code, copy.rank, copy.seq, copy.group) == ("MISMATCH", 1, 9, "world")


def test_unknown_attributes_are_refused():
    with pytest.raises(TypeError, match="colour"):
        torch_resilient.ResilientError("x", colour="red")


def test_the_package_lists_its_names():
    for name in torch_resilient.__all__:
        assert name in dir(torch_resilient)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = torch_resilient.nothing_such


def raises_again_and_again(count):
    dist.init_process_group("resilient")
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()

    def blocks_after(times):
        for _ in range(times):
            with pytest.raises(torch_resilient.ResilientError):
                dist.barrier()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(10)
    return blocks_after(count) - before


def test_nothing_of_an_exception_is_kept(world):
    times = 500
    [kept] = world.run(raises_again_and_again, 1, times)
    assert kept < times / 2, "blocks; other threads may have some dozens more than before"
