"""State: what a training run needs to go on after a rank was lost."""

import pickle
import random
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_resilient import _api, _errors, _snapshot

# A per-rank part is one value of the store; its limit for values is 8 MiB with key and framing.
PER_RANK_LIMIT_BYTES = 8 * 1024 * 1024 - 4096
_KEPT_COMMITS = 2


class State:
    """Named values that are committed together and restored together.

    `State(model=..., optimizer=..., step=0)`: objects with state_dict and load_state_dict, tensors,
    and plain values that can be pickled. They are the same on every rank (the replicated part);
    what differs by rank goes into `per_rank={...}`, to which the random number generators always
    belong. Values are attributes: `state.step += 1`.

    commit() keeps a copy in host memory and the per-rank part in the store, each for the last two
    commits. After a failure sync() brings all ranks back to the newest commit that is complete.
    Used by one thread.
    """

    def __init__(self, *, per_rank=None, **values):
        per_rank = dict(per_rank or {})
        doubled = set(values) & set(per_rank)
        if doubled:
            raise ValueError(f"both replicated and per rank: {sorted(doubled)}")
        for name in (*values, *per_rank):
            if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"{name!r} cannot be the name of a value of a State")
        own = self.__dict__
        own["_replicated"] = values
        own["_per_rank"] = per_rank
        own["_commits"] = {}  # (generation, number) -> _Commit, oldest first, at most two.
        own["_number"] = 0  # Of the newest commit.
        own["_generation"] = None  # At which commits are made: that of the last sync.
        own[
            "_parts"
        ] = []  # Per-rank parts of this seat in the store, (commit, rank), oldest first.
        own["_observer"] = None  # Called after each commit.

    def __getattr__(self, name):
        for part in ("_replicated", "_per_rank"):
            values = self.__dict__.get(part, {})
            if name in values:
                return values[name]
        raise AttributeError(f"the state has no value {name!r}")

    def __setattr__(self, name, value):
        for part in (self._replicated, self._per_rank):
            if name in part:
                part[name] = value
                return
        raise AttributeError(
            f"the state has no value {name!r}: name it when the State is made, State({name}=...)"
        )

    @property
    def commits(self):
        """How many commits the present timeline has."""
        return self._number

    def commit(self):
        """Keeps the present values. Raises the first cause when the session has failed, and keeps
        nothing then."""
        world = _api.current_world()
        _raise_failure(world)
        if self._generation is None:
            self.__dict__["_generation"] = world.session.membership()["generation"]
        number = self._number + 1
        reused = None
        if len(self._commits) >= _KEPT_COMMITS:
            reused = self._commits.pop(next(iter(self._commits))).snapshot
        snapshot = _snapshot.take(self._replicated, reused)
        key = (self._generation, number)
        self._put_part(world, key, self._pack_per_rank())
        _raise_failure(world)
        self._commits[key] = _Commit(snapshot, world.rank, world.world_size)
        self.__dict__["_number"] = number
        self._drop_old_parts(world)
        if self._observer is not None:
            self._observer()

    def restore(self):
        """Brings the replicated part of this rank back to its newest commit. Local."""
        if not self._commits:
            raise ValueError("nothing was committed yet")
        newest = self._commits[next(reversed(self._commits))]
        _snapshot.load(self._replicated, newest.snapshot)

    def sync(self):
        """Brings all ranks to the newest commit that is complete, or, without any, to rank 0's
        values. Every rank of the world calls it; another failure in it raises and leaves the
        commits as they are."""
        world = _api.current_world()
        _raise_failure(world)
        generation = world.session.membership()["generation"]
        held = [None] * world.world_size
        dist.all_gather_object(held, {key: commit.place for key, commit in self._commits.items()})
        chosen = self._choose(world, held)
        if chosen is None:
            snapshot = _snapshot.take(self._replicated) if world.rank == 0 else None
            snapshot = _snapshot.broadcast(snapshot, 0)
        else:
            snapshot = self._commits[chosen].snapshot if chosen in self._commits else None
            holders = [rank for rank, keys in enumerate(held) if chosen in keys]
            if len(holders) < world.world_size:
                snapshot = _snapshot.broadcast(snapshot, holders[0])
        part = None
        if chosen is not None:
            seats = _seats(held, chosen)
            seat = seats[world.rank]
            if seat is None:
                part = self._pack_per_rank()
            else:
                part = world.store.get(_part_key(chosen, seat))
            if seats != list(range(world.world_size)):
                # The ranks were numbered anew, or there are more: the same commit under the present
                # numbers, for one who takes a seat later.
                chosen = (generation, chosen[1])
                self._put_part(world, chosen, part)
        # Nobody goes on before everybody has read, so that no part is dropped too early.
        dist.barrier()
        _snapshot.load(self._replicated, snapshot)
        if part is not None:
            self._unpack_per_rank(part)
        own = self.__dict__
        own["_commits"] = {}
        if chosen is not None:
            own["_commits"][chosen] = _Commit(snapshot, world.rank, world.world_size)
        own["_number"] = 0 if chosen is None else chosen[1]
        own["_generation"] = generation
        # What a failure made worthless goes first when parts are dropped.
        kept = (chosen, world.rank)
        worthless = [part for part in self._parts if part != kept]
        own["_parts"] = worthless if chosen is None else [*worthless, kept]

    def _choose(self, world, held):
        """The commit to go on from, decided by rank 0 for all."""
        decision = [None]
        if world.rank == 0:
            decision = [_newest(world, held)]
        dist.broadcast_object_list(decision, src=0)
        return decision[0]

    def _put_part(self, world, key, part):
        world.store.set(_part_key(key, world.rank), part)
        self._parts.append((key, world.rank))

    def _drop_old_parts(self, world):
        # One more than the commits in memory: a peer may be one commit behind.
        while len(self._parts) > _KEPT_COMMITS + 1:
            world.store.delete_key(_part_key(*self._parts.pop(0)))

    def _pack_per_rank(self):
        parts = _snapshot.take(self._per_rank)
        packed = pickle.dumps((parts, _random_state()), protocol=pickle.HIGHEST_PROTOCOL)
        if len(packed) > PER_RANK_LIMIT_BYTES:
            raise ValueError(
                f"the per-rank part of the state has {len(packed)} bytes when pickled; the store"
                f" keeps at most {PER_RANK_LIMIT_BYTES}. Keep what is large in the replicated part"
                " or in a checkpoint of your own"
            )
        return packed

    def _unpack_per_rank(self, packed):
        # Written by a rank of this job into this job's store.
        parts, generators = pickle.loads(packed)
        _snapshot.load(self._per_rank, parts)
        _load_random_state(generators)


def _raise_failure(world):
    cause = world.session.failure()
    if cause is not None:
        raise cause


def _part_key(key, rank):
    generation, number = key
    return f"state/{generation}.{number}/{rank}"


class _Commit(NamedTuple):
    """What this rank keeps of a commit, and under which number in how large a world."""

    snapshot: _snapshot.Snapshot
    rank: int
    world_size: int

    @property
    def place(self):
        return self.rank, self.world_size


def _seats(held, key):
    """Whose per-rank part each rank has: its own of then, and one that does not hold the commit,
    that of the same number; a rank beyond those of then has none, None. None for all when it is not
    known: the numbers were others then."""
    size = len(held)
    places = [commits.get(key) for commits in held]
    then = next(place[1] for place in places if place is not None)
    kept = all(place is None or place[0] == rank for rank, place in enumerate(places))
    if kept and then <= size:
        return [rank if rank < then else None for rank in range(size)]
    return None if None in places else [place[0] for place in places]


def _newest(world, held):
    """The newest commit whose per-rank parts exist for every seat. None when there is none yet:
    before the first commit is complete nobody has changed anything."""
    known = sorted({tuple(key) for keys in held for key in keys}, key=lambda key: key[::-1])
    for key in reversed(known):
        seats = _seats(held, key)
        if seats is None:
            continue
        parts = [_part_key(key, seat) for seat in seats if seat is not None]
        if world.store.check(parts):
            return key
    if all(number == 1 for _, number in known):
        return None
    raise _errors.CommError(
        f"no commit is complete: the ranks hold {known}, and for each of them the per-rank part of"
        " some rank is missing in the store. The run cannot go on from memory: start it from a"
        " checkpoint, and commit on every rank at the same steps"
    )


def _random_state():
    generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        generators["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return generators


def _load_random_state(generators):
    torch.set_rng_state(generators["torch"])
    random.setstate(generators["python"])
    if "numpy" in generators:
        import numpy

        numpy.random.set_state(generators["numpy"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
