"""The exceptions of the package, and the table from codes to them.

Every class has the torch class of the same kind as its second base, so that existing `except`
clauses work. The text begins with "[resilient:CODE]".
"""

import torch.distributed as dist

# What the library tells about a failure, as attributes of the exception. None: not known.
ATTRIBUTES = ("rank", "host", "pid", "generation", "group", "seq", "since")


class ResilientError(dist.DistError):
    """Base of all errors of the package.

    Attributes: code, and as far as they are known rank, host and pid of the process that caused it,
    the generation that it ended, group and sequence number of the operation that waited, and since
    when (unix time).
    """

    default_code = "INTERNAL"

    def __init__(self, message="", *, code=None, **attributes):
        unknown = set(attributes) - set(ATTRIBUTES)
        if unknown:
            raise TypeError(f"unknown attributes {sorted(unknown)}")
        self.code = code or self.default_code
        for name in ATTRIBUTES:
            setattr(self, name, attributes.get(name))
        prefix = f"[resilient:{self.code}]"
        super().__init__(message if message.startswith(prefix) else f"{prefix} {message}")

    def __reduce__(self):
        state = {name: getattr(self, name) for name in ATTRIBUTES}
        return _restore, (type(self), str(self), self.code, state)


class RankLostError(ResilientError, dist.DistBackendError):
    """A rank died, was lost, or left while an operation needed it."""

    default_code = "RANK_LOST"


class FencedError(ResilientError, dist.DistBackendError):
    """This process belongs to an older generation: the others have gone on without it."""

    default_code = "STALE_GENERATION"


class CommError(ResilientError, dist.DistBackendError):
    """All ranks live, but the communication between them failed or stands still."""

    default_code = "COMM_FAILED"


class MismatchError(ResilientError, dist.DistBackendError):
    """The ranks are in different operations."""

    default_code = "MISMATCH"


class DeadlockError(ResilientError, dist.DistBackendError):
    """The ranks wait for each other in a circle."""

    default_code = "DEADLOCK"


class StalledError(ResilientError, dist.DistBackendError):
    """A rank lives and makes no progress while others wait for it."""

    default_code = "STALLED"


class GrowthError(ResilientError, dist.DistBackendError):
    """No failure: the generation ended because the world takes in more ranks."""

    default_code = "GROWTH"


class DeviceError(ResilientError, dist.DistBackendError):
    """The device of a rank failed, or hangs."""

    default_code = "DEVICE_LOST"


class ConfigError(ResilientError, dist.DistBackendError, ValueError):
    """The job is started wrongly; the text has the fix."""

    default_code = "SETTING"


class InvalidArgumentError(ResilientError, dist.DistBackendError, ValueError):
    """A call that can have no effect with these arguments, and had none."""

    default_code = "INVALID_ARGUMENT"


class StoreError(ResilientError, dist.DistStoreError):
    """Base of the store's errors; itself for an answer that is a refusal, as a wrong type."""


class JoinTimeoutError(StoreError):
    """A rank never came."""

    default_code = "JOIN_TIMEOUT"


class StoreLostError(StoreError):
    """The store is gone."""

    default_code = "STORE_LOST"


class StoreTimeoutError(StoreError):
    """The timeout of one call passed, or its outcome is not known."""

    default_code = "TIMEOUT"


class QueueEmptyError(StoreError, dist.QueueEmptyError):
    """A queue without an item, asked not to wait."""

    default_code = "QUEUE_EMPTY"


class ConnectError(ResilientError, dist.DistNetworkError):
    """No store can be reached at the address."""

    default_code = "UNREACHABLE"


CLASSES = {
    "RANK_LOST": RankLostError,
    "LEFT": RankLostError,
    "STALE_GENERATION": FencedError,
    "COMM_STALLED": CommError,
    "COMM_FAILED": CommError,
    "MISMATCH": MismatchError,
    "DEADLOCK": DeadlockError,
    "STALLED": StalledError,
    "DEVICE_LOST": DeviceError,
    "DEVICE_STALLED": DeviceError,
    "GROWTH": GrowthError,
    "DUPLICATE_RANK": ConfigError,
    "WORLD_SIZE": ConfigError,
    "JOB": ConfigError,
    "DUPLICATE_DEVICE": ConfigError,
    "SETTING": ConfigError,
    "TORCH_VERSION": ConfigError,
    "FORKED": ConfigError,
    "INVALID_ARGUMENT": InvalidArgumentError,
    "JOIN_TIMEOUT": JoinTimeoutError,
    "STORE_LOST": StoreLostError,
    "TIMEOUT": StoreTimeoutError,
    "OUTCOME_UNKNOWN": StoreTimeoutError,
    "NOT_FOUND": StoreError,
    "WRONG_TYPE": StoreError,
    "TOO_LARGE": StoreError,
    "QUEUE_EMPTY": QueueEmptyError,
    "REFUSED": ConnectError,
    "UNREACHABLE": ConnectError,
    "RESOLVE": ConnectError,
    "PROTOCOL": ConnectError,
    "AUTH": ConnectError,
}


def make(code, message, attributes):
    """The exception for a failure of the library. Values that say "not known" become None."""
    known = {}
    for name in ATTRIBUTES:
        value = attributes.get(name)
        absent = value is None or value == "" or (name == "rank" and value < 0)
        if not absent and (name == "rank" or value != 0):
            known[name] = value
    return CLASSES.get(code, ResilientError)(message, code=code, **known)


def _restore(cls, message, code, attributes):
    return cls(message, code=code, **attributes)


PUBLIC = tuple(
    dict.fromkeys(["ResilientError", "StoreError", *(c.__name__ for c in CLASSES.values())])
)
for _cls in (ResilientError, StoreError, *CLASSES.values()):
    _cls.__module__ = "torch_resilient"
