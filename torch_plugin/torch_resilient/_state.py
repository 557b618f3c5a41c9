"""State: what a training run needs to go on after a rank was lost."""

import pickle
import random
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_resilient import _api, _buddies, _errors, _snapshot

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
    Between two commits there is something that all ranks take part in, as a step of DDP is: then
    some commit is always complete. Gradients are no part of it: a commit belongs where none are
    being accumulated. Used by one thread.

    `keep_per_rank="buddy"`, the same on all ranks, keeps the per-rank part in this rank's memory
    and in that of another one, on another host where there is one: for what is large, as shards of
    an optimizer are. Then every rank commits at the same steps, and waits in it for two others. A
    commit survives the loss of any ranks of which no two are rank and buddy.
    """

    def __init__(self, *, per_rank=None, keep_per_rank="store", **values):
        per_rank = dict(per_rank or {})
        if keep_per_rank not in ("store", "buddy"):
            raise ValueError(f'keep_per_rank={keep_per_rank!r}: it is "store" or "buddy"')
        doubled = set(values) & set(per_rank)
        if doubled:
            raise ValueError(f"both replicated and per rank: {sorted(doubled)}")
        for name in (*values, *per_rank):
            if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
                raise ValueError(f"{name!r} cannot be the name of a value of a State")
        own = self.__dict__
        own["_replicated"] = values
        own["_per_rank"] = per_rank
        own["_keep_per_rank"] = keep_per_rank
        own["_commits"] = {}  # (generation, number) -> _Commit, oldest first, at most two.
        own["_number"] = 0  # Of the newest commit.
        own["_generation"] = None  # At which commits are made: the session's epoch.
        # Per-rank parts of this seat in the store, (commit, rank), oldest first.
        own["_parts"] = []
        own["_bound"] = set()  # Names whose objects the function makes itself.
        own["_restored"] = []  # Snapshots that the last sync has gone on from,
        own["_generators"] = None  # and the generators of random numbers as of then.
        own["_begun"] = False  # Commit 1 was complete, and values may have changed since.
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

    def bind(self, **values):
        """Gives names their objects where the elastic function makes these itself, as a model is
        that fully_shard has spread over a mesh, and its optimizer: `State(per_rank={"model": None,
        "optimizer": None})`, then `state.bind(model=model, optimizer=optimizer)`. They are brought
        back to the commit that the last sync() has gone on from, if they were in it: before the
        next one is made. So are the generators of random numbers, of which the making of a model
        has drawn. Of tensors
        that are spread over ranks each rank keeps its shard, so that they belong to per_rank, and
        fit a world of the same size only: ValueError otherwise."""
        loaded = False
        for name, value in values.items():
            setattr(self, name, value)
            self._bound.add(name)
            for snapshot in self._restored:
                if name in snapshot.kinds:
                    loaded |= _snapshot.load_object(name, value, snapshot)
        if loaded:
            _load_random_state(self._generators)

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
            self.__dict__["_generation"] = world.session.epoch()
        number = self._number + 1
        self.__dict__["_restored"] = []  # Its memory may be taken over.
        reused = None
        if len(self._commits) >= _KEPT_COMMITS:
            reused = self._commits.pop(next(iter(self._commits))).snapshot
        snapshot = _snapshot.take(self._replicated, reused)
        key = (self._generation, number)
        parts = self._put_part(world, key, self._pack_per_rank())
        # What was copied may come from operations on a device that nobody has seen the end of.
        world.session.await_joined()
        _raise_failure(world)
        self._commits[key] = _Commit(snapshot, world.rank, world.world_size, parts)
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
        for name in self._bound:
            setattr(self, name, None)  # What it was is of groups that are no more.
        # The same on all ranks, also where the session gets over a link between their reads of it.
        generation = world.session.epoch()
        begun, held = self._ask_all(world)
        chosen = self._choose(world, begun, held)
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
            chosen, part = self._settle(world, held, chosen, generation, snapshot)
        # Nobody goes on before everybody has read, so that no part is dropped too early.
        dist.barrier()
        own = self.__dict__
        own["_restored"] = []
        mine = None if part is not None else _snapshot.take(self._per_rank, shards=True)
        _snapshot.load(self._replicated, snapshot)
        if part is not None:
            mine, own["_generators"] = self._unpack_per_rank(part)
            own["_restored"] = [snapshot, mine]
        else:
            _snapshot.load(self._per_rank, mine)  # It may share memory with the other part.
        own["_commits"] = {} if chosen is None else {chosen: self._commits[chosen]}
        own["_number"] = 0 if chosen is None else chosen[1]
        own["_generation"] = generation
        # What a failure made worthless goes first when parts are dropped.
        kept = (chosen, world.rank)
        worthless = [part for part in self._parts if part != kept]
        own["_parts"] = worthless if chosen is None else [*worthless, kept]

    def _ask_all(self, world):
        """Whether any rank may have changed values since commit 1, and what each rank has: its
        place in each of its commits."""
        held = [None] * world.world_size
        mine = {key: commit.place for key, commit in self._commits.items()}
        dist.all_gather_object(held, (self._keep_per_rank, self._begun, mine))
        kept = [where for where, _, _ in held]
        if len(set(kept)) > 1:
            raise _errors.ConfigError(
                f"the ranks keep their per-rank parts at different places, by"
                f" rank: {kept}; give State the same keep_per_rank on all"
            )
        return any(begun for _, begun, _ in held), [commits for *_, commits in held]

    def _settle(self, world, held, chosen, generation, snapshot):
        """Makes the commit one of the present ranks. Returns its name from now on and the per-rank
        part of this rank."""
        seats = _seats(held, chosen)
        if self._keep_per_rank == "buddy":
            part = self._fetch_part(world, held, chosen, seats)
        elif seats[world.rank] is not None:
            part = world.store.get(_part_key(chosen, seats[world.rank]))
        else:
            part = None
        if part is None:
            part = self._pack_per_rank()
        renumbered = seats != list(range(world.world_size))
        if renumbered:
            # The ranks were numbered anew, or there are more: the same commit under the present
            # numbers, for one who takes a seat later.
            chosen = (generation, chosen[1])
        # The copies of a lost rank were lost with it.
        again = renumbered or self._keep_per_rank == "buddy"
        parts = self._put_part(world, chosen, part) if again else None
        # Who comes to the next commit knows that all others have this one, which may be another
        # than the one that they were at.
        self._commits[chosen] = _Commit(snapshot, world.rank, world.world_size, parts)
        return chosen, part

    def _fetch_part(self, world, held, chosen, seats):
        """This rank's part, from whoever has it, and to others what is theirs; None for a rank
        that has none yet."""
        outgoing, sources = {}, []
        for rank, seat in enumerate(seats):
            holders = [at for at, commits in enumerate(held) if seat in _parts_at(commits, chosen)]
            if seat is None or rank in holders:
                continue
            if holders[0] == world.rank:
                outgoing[rank] = self._commits[chosen].parts[seat]
            if rank == world.rank:
                sources.append(holders[0])
        fetched = _buddies.move(outgoing, sources)
        if sources:
            return fetched[sources[0]]
        seat = seats[world.rank]
        return None if seat is None else self._commits[chosen].parts[seat]

    def _choose(self, world, begun, held):
        """The commit to go on from, decided by rank 0 for all. None when there is none yet."""
        decision = [None]
        if world.rank == 0:
            decision = [_newest(world, begun, held)]
        dist.broadcast_object_list(decision, src=0)
        chosen, why_none = decision[0]
        if why_none:
            raise _errors.CommError(why_none)
        return chosen

    def _put_part(self, world, key, part):
        """Where it outlives this rank. Returns what this rank has in memory, by rank."""
        if self._keep_per_rank == "buddy":
            hosts = [member["host"] for member in world.session.acknowledged()["members"]]
            ward, copy = _buddies.swap(part, _buddies.choose(hosts))
            return {ward: copy, world.rank: part}
        world.store.set(_part_key(key, world.rank), part)
        self._parts.append((key, world.rank))
        return None

    def _drop_old_parts(self, world):
        # One more than the commits in memory: a peer may be one commit behind.
        while len(self._parts) > _KEPT_COMMITS + 1:
            world.store.delete_key(_part_key(*self._parts.pop(0)))

    def _pack_per_rank(self):
        parts = _snapshot.take(self._per_rank, shards=True)
        packed = pickle.dumps((parts, _random_state()), protocol=pickle.HIGHEST_PROTOCOL)
        if self._keep_per_rank == "store" and len(packed) > PER_RANK_LIMIT_BYTES:
            raise ValueError(
                f"the per-rank part of the state has {len(packed)} bytes when pickled; the store"
                f' keeps at most {PER_RANK_LIMIT_BYTES}. State(..., keep_per_rank="buddy") keeps'
                " it in the memory of another rank; or keep what is large in the replicated part"
            )
        return packed

    def _unpack_per_rank(self, packed):
        # Written by a rank of this job into this job's store.
        parts, generators = pickle.loads(packed)
        _snapshot.load(self._per_rank, parts)
        _load_random_state(generators)
        return parts, generators


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
    parts: dict | None  # Rank of then -> its per-rank part; None: they are in the store.

    @property
    def place(self):
        return _Place(self.rank, self.world_size, None if self.parts is None else [*self.parts])


class _Place(NamedTuple):
    """Of a rank in a commit, as the others are told."""

    rank: int
    world_size: int
    parts: list | None  # Ranks of then whose per-rank parts it has.


def _parts_at(commits, key):
    """Whose parts of that commit a rank has."""
    return (commits[key].parts or []) if key in commits else []


def _seats(held, key):
    """Whose per-rank part each rank has: its own of then, and one that does not hold the commit,
    that of the same number; a rank beyond those of then has none, None. None for all when it is not
    known: the numbers were others then."""
    size = len(held)
    places = [commits.get(key) for commits in held]
    then = next(place.world_size for place in places if place is not None)
    kept = all(place is None or place.rank == rank for rank, place in enumerate(places))
    if kept and then <= size:
        return [rank if rank < then else None for rank in range(size)]
    return None if None in places else [place.rank for place in places]


def _newest(world, begun, held):
    """The newest commit whose per-rank parts exist for every seat, or why there is none. Neither
    before the first commit is complete: nobody has changed anything then, or `begun`."""
    known = sorted({tuple(key) for keys in held for key in keys}, key=lambda key: key[::-1])
    gaps = []
    for key in reversed(known):
        seats = _seats(held, key)
        if seats is None:
            gaps.append(f"commit {key[1]} is of another numbering of the ranks")
            continue
        missing = _missing(world, held, key, [seat for seat in seats if seat is not None])
        if not missing:
            return key, ""
        gaps.append(f"of commit {key[1]} the per-rank part of ranks {missing} is missing")
    if not begun and all(number == 1 for _, number in known):
        return None, ""
    return None, (
        f"no commit is complete: {', '.join(gaps)}; it was lost with the store, or with"
        ' keep_per_rank="buddy" with both a rank and its buddy. The run cannot go on from memory:'
        " start it from a checkpoint, and commit on every rank at the same steps"
    )


def _missing(world, held, key, seats):
    """Whose parts of that commit nobody has."""
    if all(commits[key].parts is None for commits in held if key in commits):
        if world.store.check([_part_key(key, seat) for seat in seats]):
            return []
        return [seat for seat in seats if not world.store.check([_part_key(key, seat)])]
    kept = {seat for commits in held for seat in _parts_at(commits, key)}
    return [seat for seat in seats if seat not in kept]


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
