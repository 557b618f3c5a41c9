"""Finds replicated values of a State that differ between ranks.

At the second and third commit each rank leaves checksums of its replicated part in the store, and
rank 0 compares those of a commit when it makes the next one: between two commits all ranks take
part in something, so that all have left theirs by then. It reads only what is there. Nothing of it
is collective, and no rank waits for another.
"""

import io
import json
import pickle
import sys
import warnings
import zlib

import torch

from torch_resilient import _snapshot

_COMMITS = (2, 3)  # The first one is made of what sync() has made the same.
_WHOLE_BYTES_MAX = 1 << 20  # Of a larger tensor so much is looked at, in evenly spread pieces.
_PIECES = 16
_RANKS_MAX = 256  # Compared with rank 0, evenly spread.
_NAMED_MAX = 5
_PLAIN_TYPES = (bool, int, float, str, bytes, type(None))


class ReplicaCheck:
    """The comparison for one State, from which it has the names of its keys. Owner: the State.
    Thread: the one that uses it."""

    def __init__(self):
        self._left = []  # Keys of this rank in the store.
        self._warned = False

    def after_commit(self, world, prefix_of, number, sums):
        """prefix_of(number): of the keys of a commit. sums(): the checksums of this one by name,
        called only where they are wanted."""
        if world.rank == 0 and number - 1 in _COMMITS:
            self._compare(world, prefix_of(number - 1), number - 1)
        if number not in _COMMITS or world.world_size < 2:
            return
        named = json.dumps(sums())
        for kind, value in (("names", named), ("sum", str(zlib.crc32(named.encode())))):
            key = f"{prefix_of(number)}/{kind}/{world.rank}"
            world.store.set(key, value)
            self._left.append(key)

    def drop(self, world):
        while self._left:
            world.store.delete_key(self._left.pop())

    def _compare(self, world, prefix, number):
        if self._warned:
            return
        step = -(-world.world_size // _RANKS_MAX)
        ranks = range(0, world.world_size, step)
        if not world.store.check([f"{prefix}/sum/{rank}" for rank in ranks]):
            return
        sums = {rank: world.store.get(f"{prefix}/sum/{rank}") for rank in ranks}
        others = [rank for rank in ranks if sums[rank] != sums[0]]
        if not others:
            return
        self._warned = True
        mine, theirs = (
            json.loads(world.store.get(f"{prefix}/names/{rank}")) for rank in (0, others[0])
        )
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        warnings.warn(_text(number, names, others), stacklevel=_depth_of_caller())


def _text(number, names, ranks):
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    listed = ", ".join(names[:_NAMED_MAX]) + more
    some = ", ".join(map(str, ranks[:_NAMED_MAX])) + (", ..." if len(ranks) > _NAMED_MAX else "")
    return (
        f"State: replicated values differ between ranks. At commit {number} rank 0 and"
        f" rank {ranks[0]} have different values of {listed} (ranks that differ from rank 0:"
        f" {some}). After a loss a rank may continue with the values of another rank. Make them"
        " equal before each commit (torch.distributed.broadcast; SyncBatchNorm for the statistics"
        " of BatchNorm), or put values that belong to one rank into State(per_rank={...})"
    )


def _depth_of_caller():
    """Of the program's commit(), for warnings.warn in the caller of this."""
    depth = 2
    while sys._getframe(depth).f_globals.get("__name__", "").startswith("torch_resilient"):
        depth += 1
    return depth


def checksums(snapshot, values, per_rank):
    """By name, of the tensors and plain values of a snapshot of `values`; not of tensors that share
    memory with a value of `per_rank`, which come back as that one's."""
    own = {tensor.data_ptr() for value in per_rank.values() for _, tensor in _tensors_of("", value)}
    excepted = {
        name
        for value_name, value in values.items()
        for name, tensor in _tensors_of(value_name, value)
        if tensor.data_ptr() in own
    }
    sums = {}
    for name, kept in snapshot.kinds.items():
        content = _References(io.BytesIO(kept.packed)).load()
        for leaf_name, leaf in _leaves(name, content):
            if leaf_name in excepted:
                continue
            if isinstance(leaf, _Reference):
                sums[leaf_name] = _sum(snapshot.tensors[leaf.number])
            else:
                sums[leaf_name] = zlib.crc32(repr(leaf).encode())
    return sums


def _tensors_of(name, value):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{key}", tensor


class _Reference:
    def __init__(self, number):
        self.number = number


class _References(pickle.Unpickler):
    """The content of a value with numbers in place of its tensors."""

    def persistent_load(self, reference):
        return _Reference(_snapshot.number_of(reference))


def _leaves(name, content):
    """What can be compared by value: sets have no order, and other objects no certain form."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _leaves(f"{name}.{key}", value)
    elif isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from _leaves(f"{name}[{index}]", value)
    elif isinstance(content, (_Reference, *_PLAIN_TYPES)):
        yield name, content


def _sum(tensor):
    if not tensor.numel():
        return 0
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    if len(flat) <= _WHOLE_BYTES_MAX:
        return zlib.crc32(flat)
    total, length = 0, _WHOLE_BYTES_MAX // _PIECES
    for piece in range(_PIECES):
        begin = (len(flat) - length) * piece // (_PIECES - 1)
        total = zlib.crc32(flat[begin : begin + length], total)
    return total
