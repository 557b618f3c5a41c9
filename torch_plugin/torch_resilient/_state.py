"""State: what a training run needs to go on after a rank was lost."""

import contextlib
import io
import os
import pickle
import random
import sys
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_resilient import (
    _api,
    _buddies,
    _errors,
    _places,
    _replicas,
    _restore,
    _sealed,
    _snapshot,
    _worlds,
)

# A per-rank part is one value of the store; its limit for values is 8 MiB, with key, seal
# and framing.
PER_RANK_LIMIT_BYTES = 8 * 1024 * 1024 - 4096
_KEPT_COMMITS = 2
_MISFIT_CHARACTERS = 2000  # Of the text of each rank.
# The world, and what a State is called there.
_NO_IDENTITY = (lambda: None), None


class State:
    """Named values that are committed together and restored together.

    `State(model=..., optimizer=..., step=0)`: objects with state_dict and load_state_dict, tensors,
    and plain values that can be pickled. They are the same on every rank (the replicated part);
    what differs by rank goes into `per_rank={...}`, to which the random number generators always
    belong. Values are attributes: `state.step += 1`.

    commit() keeps a copy in host memory and the per-rank part in the store, each for the last two
    commits; a rank keeps a copy of its own per-rank part, for the next store. After a
    failure sync() brings all ranks back to the newest commit that is complete.
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
        for value in (*values.values(), *per_rank.values()):
            _snapshot.note(value)
        own = self.__dict__
        own["_replicated"] = values
        own["_per_rank"] = per_rank
        own["_keep_per_rank"] = keep_per_rank
        own["_commits"] = {}  # (generation, number) -> _Commit, oldest first, at most two.
        own["_number"] = 0  # Of the newest commit.
        own["_made_at"] = _caller()
        own["_identity"] = _NO_IDENTITY
        own["_replica_check"] = _replicas.ReplicaCheck()
        own["_over"] = False  # The elastic run that used it has ended.
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
                _snapshot.note(value)
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
                kept = snapshot.kinds.get(name)
                # A plain value is what was there before the object was made.
                if kept is not None and kept.kind != _snapshot.PLAIN:
                    part = self._replicated if name in self._replicated else self._per_rank
                    _refuse_misfits(_restore.load(part, snapshot, (name,)))
                    loaded = True
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
        self._drop_what_is_over()
        self._identify(world)
        number = self._number + 1
        self.__dict__["_restored"] = []  # Its memory may be taken over.
        reused = None
        if len(self._commits) >= _KEPT_COMMITS:
            reused = self._commits.pop(next(iter(self._commits))).snapshot
        snapshot = _snapshot.take(self._replicated, reused, bound=self._bound)
        key = (self._generation, number)
        part = self._pack_per_rank(key)
        parts = self._put_part(world, key, part)
        self._check_wards(key, parts)
        # What was copied may come from operations on a device that nobody has seen the end of.
        world.session.await_joined()
        _raise_failure(world)
        self._commits[key] = _Commit(snapshot, world.rank, world.world_size, parts, part)
        self.__dict__["_number"] = number
        self._drop_old_parts(world)
        self._check_replicas(world, snapshot)
        _worlds.note_commit(number)
        if self._observer is not None:
            self._observer()

    def restore(self):
        """Brings the replicated part of this rank back to its newest commit. Local."""
        if not self._commits:
            raise ValueError("nothing was committed yet")
        newest = self._commits[next(reversed(self._commits))]
        _refuse_misfits(_restore.load(self._replicated, newest.snapshot))

    def sync(self):
        """Brings all ranks to the newest commit that is complete, or, without any, to rank 0's
        values. Every rank of the world calls it; another failure in it raises and leaves the
        commits as they are.

        Of the commit is also the form of a value: where the program has replaced a tensor by one of
        another dtype or shape, or has added parameter groups to an optimizer, each rank has what
        was committed. ConfigError on all ranks, and nothing loaded, where they are not at the same
        place: in different elastic runs, or with different States. ConfigError on all ranks where
        an object of one of them does not take its state."""
        world = _api.current_world()
        _raise_failure(world)
        self._drop_what_is_over()
        self._identify(world)
        for name in self._bound:
            setattr(self, name, None)  # What it was is of groups that are no more.
        # The same on all ranks, also where the session gets over a link between their reads of it.
        generation = world.session.epoch()
        begun, held = self._ask_all(world)
        chosen = self._choose(world, begun, held)
        if chosen is None:
            bound = self._bound
            snapshot = _snapshot.take(self._replicated, bound=bound) if world.rank == 0 else None
            snapshot = _snapshot.broadcast(snapshot, 0)
        else:
            snapshot = self._commits[chosen].snapshot if chosen in self._commits else None
            holders = [rank for rank, keys in enumerate(held) if chosen in keys]
            if len(holders) < world.world_size:
                snapshot = _snapshot.broadcast(snapshot, holders[0])
        part, misfits = None, []
        if chosen is not None:
            try:
                chosen, part = self._settle(world, held, chosen, generation, snapshot)
            except _sealed.ForgedError as forged:
                misfits = [_forged_text(forged)]
        misfits = misfits or self._load(snapshot, part)
        # Nobody goes on before everybody has read, so that no part is dropped too early.
        _refuse_misfits_of_any(world, misfits)
        own = self.__dict__
        own["_commits"] = {} if chosen is None else {chosen: self._commits[chosen]}
        own["_number"] = 0 if chosen is None else chosen[1]
        if chosen is not None:
            _worlds.note_commit(chosen[1])  # From here on this rank alone could hand it on.
        own["_generation"] = generation
        # What a failure made worthless goes first when parts are dropped.
        kept = (chosen, world.rank)
        worthless = [part for part in self._parts if part != kept]
        own["_parts"] = worthless if chosen is None else [*worthless, kept]

    def _load(self, snapshot, part):
        """Brings this rank's values back; without a part its own values stay. Returns misfits."""
        own = self.__dict__
        own["_restored"] = []
        if part is None:
            mine = _snapshot.take(self._per_rank, shards=True, bound=self._bound)
            misfits = _restore.load(self._replicated, snapshot)
            # It may share memory with the other part.
            return misfits + _restore.load(self._per_rank, mine)
        misfits = _restore.load(self._replicated, snapshot)
        # From the memory of a member, or under a member's seal.
        mine, own["_generators"] = pickle.loads(memoryview(part)[part.index(b"\n") + 1 :])
        misfits += _restore.load(self._per_rank, mine)
        _load_random_state(own["_generators"])
        own["_restored"] = [snapshot, mine]
        return misfits

    def _identify(self, world):
        """Gives the State its name in this world when it is used there for the first time."""
        known_in, name = self._identity
        if known_in() is not world:
            name = world.whereabouts.identify_state()
            # Its parts in the store of another world went with that world.
            self.__dict__.update(_identity=(weakref.ref(world), name), _parts=[])
            self._bring_parts(world)
        return name

    def _bring_parts(self, world):
        """To a store that has none of the commits that this rank holds."""
        for key, commit in self._commits.items():
            if commit.parts is None:
                self._store_part(world, self._part_key(key, commit.rank), commit.part)
                self._parts.append((key, commit.rank))

    def _check_replicas(self, world, snapshot):
        def prefix_of(number):
            return self._commit_key((self._generation, number))

        def sums():
            return _replicas.checksums(snapshot, self._replicated, self._per_rank)

        self._replica_check.after_commit(world, prefix_of, self._number, sums)

    def _end_run(self):
        """For elastic: a run with this State has ended on all ranks. What uses the State next
        begins with its values as they are then, so that nobody needs its parts in the store."""
        world = _api.current_world()
        self.__dict__["_over"] = True
        # That the run has ended is decided: a failure from here on is one of what comes next.
        with contextlib.suppress(_errors.ResilientError):
            for part in self._parts:
                world.store.delete_key(self._part_key(*part))
            self._replica_check.drop(world)

    def _drop_what_is_over(self):
        if self._over:
            own = self.__dict__
            own.update(_over=False, _begun=False, _number=0, _commits={}, _parts=[], _restored=[])
            own["_identity"] = _NO_IDENTITY

    def _part_key(self, key, rank):
        return f"{self._commit_key(key)}/{rank}"

    def _commit_key(self, key):
        """Unique in the world: of this State, and of this commit of it."""
        (run, state), (generation, number) = self._identity[1], key
        return f"state/{run}.{state}/{generation}.{number}"

    def _ask_all(self, world):
        """Whether any rank may have changed values since commit 1, and what each rank has: its
        place in each of its commits. Only where all are at the same place of the program."""
        names = tuple(self._replicated)
        place = _places.Place(*world.whereabouts.present(), self._identity[1], names, self._made_at)
        held = [None] * world.world_size
        mine = {key: commit.place for key, commit in self._commits.items()}
        dist.all_gather_object(held, (place, self._keep_per_rank, self._begun, mine))
        _raise_on_all(_places.difference([place for place, *_ in held]))
        kept = [where for _, where, _, _ in held]
        if len(set(kept)) > 1:
            _raise_on_all(
                f"the ranks keep their per-rank parts at different places, by"
                f" rank: {kept}; give State the same keep_per_rank on all"
            )
        return any(begun for _, _, begun, _ in held), [commits for *_, commits in held]

    def _settle(self, world, held, chosen, generation, snapshot):
        """Makes the commit one of the present ranks. Returns its name from now on and the per-rank
        part of this rank."""
        seats = _seats(held, chosen)
        if self._keep_per_rank == "buddy":
            part = self._fetch_part(world, held, chosen, seats)
        elif seats[world.rank] is not None:
            part_key = self._part_key(chosen, seats[world.rank])
            kept = world.store.get(part_key)
            part = _sealed.open_sealed(world.session.world_secret(), part_key, kept)
        else:
            part = None
        if part is None:
            part = self._pack_per_rank(chosen)
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
        self._commits[chosen] = _Commit(snapshot, world.rank, world.world_size, parts, part)
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
            decision = [_newest(self._missing, begun, held)]
        dist.broadcast_object_list(decision, src=0)
        chosen, why_none = decision[0]
        if why_none:
            _raise_on_all(why_none, _errors.CommError)
        return chosen

    def _put_part(self, world, key, part):
        """Where it outlives this rank. Returns what this rank has in memory, by rank."""
        if self._keep_per_rank == "buddy":
            hosts = [member["host"] for member in world.session.acknowledged()["members"]]
            ward, copy = _buddies.swap(part, _buddies.choose(hosts))
            return {ward: copy, world.rank: part}
        self._store_part(world, self._part_key(key, world.rank), part)
        self._parts.append((key, world.rank))
        return None

    def _store_part(self, world, part_key, part):
        world.store.set(part_key, _sealed.seal(world.session.world_secret(), part_key, part))

    def _drop_old_parts(self, world):
        # One more than the commits in memory: a peer may be one commit behind.
        while len(self._parts) > _KEPT_COMMITS + 1:
            world.store.delete_key(self._part_key(*self._parts.pop(0)))

    def _check_wards(self, key, parts):
        """What others have given this rank to keep is of the commit that it makes itself."""
        for rank, part in (parts or {}).items():
            if not part.startswith(self._mark(key)):
                theirs = part[: part.index(b"\n")].decode()
                raise _errors.ConfigError(
                    f"rank {rank} makes commit {theirs} of a State while this rank makes"
                    f' {self._commit_key(key)}: with keep_per_rank="buddy" every rank commits the'
                    " same States at the same steps"
                )

    def _mark(self, key):
        """What a per-rank part begins with."""
        return f"{self._commit_key(key)}\n".encode()

    def _pack_per_rank(self, key):
        parts = _snapshot.take(self._per_rank, shards=True, bound=self._bound)
        buffer = io.BytesIO()
        buffer.write(self._mark(key))
        pickle.dump((parts, _random_state()), buffer, protocol=pickle.HIGHEST_PROTOCOL)
        packed = buffer.getvalue()
        if self._keep_per_rank == "store" and len(packed) > PER_RANK_LIMIT_BYTES:
            raise ValueError(
                f"the per-rank part of the state has {len(packed)} bytes when pickled; the store"
                f' keeps at most {PER_RANK_LIMIT_BYTES}. State(..., keep_per_rank="buddy") keeps'
                " it in the memory of another rank; or keep what is large in the replicated part"
            )
        return packed

    def _missing(self, held, key, seats):
        """Whose parts of that commit nobody has."""
        if any(commits[key].parts is not None for commits in held if key in commits):
            kept = {seat for commits in held for seat in _parts_at(commits, key)}
            return [seat for seat in seats if seat not in kept]
        store = _api.current_world().store
        if store.check([self._part_key(key, seat) for seat in seats]):
            return []
        return [seat for seat in seats if not store.check([self._part_key(key, seat)])]


def _raise_failure(world):
    cause = world.session.failure()
    if cause is not None:
        raise cause


def _raise_on_all(text, kind=_errors.ConfigError):
    """Where there is a text, which all ranks have. One that raised and ended before the others have
    the text as well would be a loss to them."""
    if not text:
        return
    with contextlib.suppress(Exception):
        dist.barrier()
    error = kind(text)
    error.on_all_ranks = True
    raise error


def _forged_text(forged):
    return (
        f"the per-rank part {forged} in the store was not put there by a member of this world, and"
        " nothing of it was read: somebody else can write the keys of this job. Start the job again"
        " from a checkpoint, with a token that only its ranks have (RESILIENT_TOKEN_FILE)"
    )


def _refuse_misfits(misfits):
    if misfits:
        raise _errors.ConfigError("; ".join(misfits))


def _refuse_misfits_of_any(world, misfits):
    """ConfigError on all ranks where the values of any do not fit its commit."""
    of_all = [None] * world.world_size
    dist.all_gather_object(of_all, misfits)
    ranks = [rank for rank in range(world.world_size) if of_all[rank]]
    texts = [f"on rank {rank}: {'; '.join(of_all[rank])[:_MISFIT_CHARACTERS]}" for rank in ranks]
    if texts:
        _raise_on_all(f"values of the commit cannot be brought back {' / '.join(texts)}")


def _caller():
    """Where the program makes a State: file:line, for texts."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class _Commit(NamedTuple):
    """What this rank keeps of a commit, and under which number in how large a world."""

    snapshot: _snapshot.Snapshot
    rank: int
    world_size: int
    parts: dict | None  # Rank of then -> its per-rank part; None: they are in the store.
    part: bytes  # This rank's, which outlives a store.

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


def _newest(missing_of, begun, held):
    """The newest commit whose per-rank parts exist for every seat, or why there is none. Neither
    before the first commit is complete: nobody has changed anything then, or `begun`.
    missing_of(held, key, seats): the seats whose parts nobody has."""
    known = sorted({tuple(key) for keys in held for key in keys}, key=lambda key: key[::-1])
    gaps = []
    for key in reversed(known):
        seats = _seats(held, key)
        if seats is None:
            gaps.append(f"commit {key[1]} is of another numbering of the ranks")
            continue
        missing = missing_of(held, key, [seat for seat in seats if seat is not None])
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
