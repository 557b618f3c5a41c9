"""elastic: runs a training function, and runs it again from the last commit when a rank is lost."""

import contextlib
import functools
import gc
import json
import time
import traceback

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torch_resilient import _agree, _api, _ending, _errors, _native, _next_store, _worlds
from torch_resilient._say import say

# An exception such as "connection reset" may reach the program before the fence that explains it.
_FENCE_GRACE_SECONDS = 1.0
_MAX_RESTARTS = 100  # Without a commit in between.
_SAME_ENDS_MAX = 2  # By one exception, at one commit.
_OVER_STATES = ("FENCED", "FAILED", "CLOSED")


def elastic(fn=None, *, max_restarts=_MAX_RESTARTS, min_world=None, max_world=None):
    """`elastic(train)(state)` calls `train(state)` and returns what it returns.

    When the membership changes, the function is called again, on every rank, with the state of the
    newest complete commit. Groups, DDP wrappers and hooks are made inside the function. What is
    raised for another reason than a failure of the session passes through; MISMATCH, DEADLOCK,
    STALLED and wrong starts are bugs and are not tried again.

    When the store is lost, the same ranks meet at the one that answers at its address, or at
    another address of RESILIENT_STORE, and go on, where all groups are made inside the function.
    torch.distributed.group.WORLD is another object then. StoreLostError: they did not meet. With
    `min_world` those that came go on; where the list has several stores, more than half of them.

    `min_world`: when lost seats were not filled within RESILIENT_SEAT_WAIT the run goes on without
    them, with so many ranks at least, default RESILIENT_MIN_WORLD; see `rebuild`.

    `max_world`: at a commit that all ranks have made the run goes on with up to so many ranks, when
    spares wait. They are the last ones, and begin with the replicated part of that commit and with
    the per-rank part that they were made with. The same on all ranks.
    """
    if fn is None:
        return functools.partial(
            elastic, max_restarts=max_restarts, min_world=min_world, max_world=max_world
        )
    wish = _api.wish("replace", min_world)
    if max_world is not None:
        _api.check_size("max_world", max_world)

    @functools.wraps(fn)
    def run(state, *args, **kwargs):
        with _older_objects_frozen():
            return _Run(state, max_restarts, wish, max_world).run(fn, args, kwargs)

    return run


@contextlib.contextmanager
def _older_objects_frozen():
    """A recovery collects what the function has left in cycles, while other ranks wait. It would
    take 0.1 s and more to go through all that torch and its imports have made before: that is left
    out of it. A program that has frozen its objects itself is left alone."""
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()  # What is garbage already would stay.
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if gc.get_freeze_count() <= frozen:  # Otherwise the function has frozen more, for itself.
            gc.unfreeze()


class _Run:
    """One call of an elastic function: the loop around it, and what it must put back."""

    def __init__(self, state, max_restarts, wish, max_world):
        self._world = _api.current_world()
        self._state = state
        self._max_restarts = max_restarts
        self._wish = wish
        self._max_world = max_world or 0
        self._groups = _GroupsAtEntry()
        self._number = 0  # Of this run in the world.
        self._commits_seen = 0
        self._restarts = 0
        self._ends = None  # By what exception a rank ended last, and at which commit;
        self._same_ends = 0  # so often in a row.
        self._incident = None

    def run(self, fn, args, kwargs):
        state = self._state
        whereabouts = self._world.whereabouts
        self._number = whereabouts.begin_run(getattr(fn, "__qualname__", repr(fn)))
        state.__dict__["_observer"] = self._committed
        try:
            while True:
                cause, store_is_lost = None, False
                returned = False
                try:
                    whereabouts.begin_again(self._number)
                    self._enter()
                    result = fn(state, *args, **kwargs)
                    returned = True
                    # Nobody leaves while a peer may still need this rank to finish.
                    dist.barrier()
                    self._end()
                    return result
                except Exception as error:
                    if getattr(error, "on_all_ranks", False):
                        raise  # A rank that ends by it is no loss to go on after.
                    if returned or isinstance(error, dist.DistError):
                        self._require_world(error)
                    cause, store_is_lost = self._cause_of(error)
                    if cause is None:
                        _ending.ending.note(error)
                        raise
                    _drop_frames(error)
                # Outside of the except clause: the exception, and what it held, is gone by now.
                self._recover(cause, store_is_lost)
                del cause
        finally:
            state.__dict__["_observer"] = None
            whereabouts.end_run()

    def _enter(self):
        self._state.sync()
        self._world.whereabouts.entered()
        if self._state.commits == 0:
            self._state.commit()
        # From here on commit 1 is complete, and only then may a rank change its values.
        dist.barrier()
        self._state.__dict__["_begun"] = True
        self._note("entered_unix_s")

    def _end(self):
        """All ranks end the run, or none does: a barrier that a failure meets ends on some only,
        and these would be in the next run while the others are in this one again."""
        world = self._world
        generation = world.session.membership()["generation"]
        place = f"elastic/{generation}/{self._number}", world.rank, world.world_size
        with contextlib.suppress(_errors.StoreLostError):  # The result needs no store.
            _agree.collect(
                world,
                lambda timeout: world.store.agree(*place, b"end", generation, timeout),
                f"the end of elastic run {self._number}",
                "none of them was lost",
            )
        self._state._end_run()

    def _require_world(self, error):
        """The function may have ended the world that it is to be run again in."""
        if self._world in _worlds.registry.worlds():
            return
        raise _errors.ConfigError(
            "the function that elastic runs has destroyed the world's process group, which elastic"
            " needs to end together and to run it again after a loss: call"
            " destroy_process_group() after elastic has returned, not in a `finally` inside"
        ) from error

    def _cause_of(self, error):
        """(why to run again, whether that is a lost store); (None, False): it is not run again."""
        ours = isinstance(error, _errors.ResilientError)
        of_store = ours and error.code in _next_store.OUT_OF_REACH
        if of_store and _next_store.is_out_of_reach(self._world):
            return error, True
        of_session = of_store or (ours and _native.load().ends_generation(error.code))
        cause = self._session_failure(of_session)
        # A peer may have gone to the next store already: its goodbye is all that is heard here.
        unexplained = cause is None and of_session and _retried(error)
        if unexplained and _next_store.is_out_of_reach(self._world):
            return error, True
        return (cause, False) if cause is not None and _retried(cause) else (None, False)

    def _session_failure(self, of_session):
        """The session's failure, whatever exception it reached the program as; None: there is none.
        An operation may end by ours (`of_session`) long before the store's word is here."""
        grace = _FENCE_GRACE_SECONDS
        if of_session:
            grace = max(grace, self._world.settings["budget"])
        return self._world.session.await_failure(grace)

    def _recover(self, cause, store_is_lost):
        self._count_restart(cause)
        gc.collect()  # DDP's reducers, held in cycles, must not hook into the next backward.
        self._groups.put_back()
        if store_is_lost:
            return self._go_on_at_next_store(cause)
        while True:
            try:
                _api.recover(self._world, self._wish)
                break
            except _errors.ResilientError as error:
                over = self._world.session.membership()["state"] in _OVER_STATES
                if over and error.code == "STORE_LOST":
                    return self._go_on_at_next_store(error)
                if over or error.code == "TIMEOUT" or not _retried(error):
                    raise
                self._count_restart(error)  # Lost another rank meanwhile.
        self._incident = dict(self._world.session.last_incident() or {})

    def _go_on_at_next_store(self, cause):
        self._incident = None  # It was the former session's.
        self._world = _next_store.begin_again(
            self._world, cause, self._groups.made_before, self._wish.get("min_world", 0)
        )
        self._groups = _GroupsAtEntry()

    def _count_restart(self, cause):
        commits = self._state.commits
        self._count_ends(cause, commits)
        if commits > self._commits_seen:
            self._restarts = 0
        self._commits_seen = commits
        self._restarts += 1
        if self._restarts > self._max_restarts:
            raise cause

    def _count_ends(self, cause, commits):
        """The same exception at the same commit twice is a bug, and would come a third time."""
        exception = _exception_in(cause)
        if exception is None:
            return
        ends = exception, commits
        self._same_ends = self._same_ends + 1 if ends == self._ends else 1
        self._ends = ends
        # A launcher of ours hears it from that rank itself, and ends the job with its exit code.
        if self._same_ends >= _SAME_ENDS_MAX and not self._world.settings["supervised"]:
            say(
                f"[resilient] {exception} has ended a rank {self._same_ends} times at commit"
                f" {commits}: it would do so again, and is not tried again"
            )
            raise cause

    def _note(self, what):
        if self._incident is not None:
            self._incident[what] = time.time()

    def _committed(self):
        """After each commit; the first one after a recovery completes its time line."""
        # Who joins a later run would begin with the first one.
        if self._max_world > self._world.world_size and self._number == 1:
            self._world.session.offer_room(self._max_world, self._state.commits)
        if self._incident is None:
            return
        self._note("committed_unix_s")
        incident, self._incident = self._incident, None
        _log_recovery(self._world, incident, self._state.commits)


def _retried(error):
    return _native.load().retried_by_elastic(error.code)


def _exception_in(cause):
    """By what a rank ended, where it has said so itself; None: it was killed, or has left."""
    if cause.code != "RANK_LOST":
        return None
    _, found, rest = str(cause).partition(" ended by ")
    return rest.rpartition(", last seen ")[0] if found else None


class _GroupsAtEntry:
    """The process groups at entry, and torch's counter for their names: survivors and newcomers
    must make the same names for the groups that they make next. The world's is another one when
    the world has been resized."""

    def __init__(self):
        self._groups = set(c10d._world.pg_map)
        self._count = c10d._world.group_count
        # Besides the world's: the same on all ranks, members or not.
        self.made_before = self._count - 1

    def put_back(self):
        world = c10d._world
        kept = {*self._groups, world.default_pg}
        later = [group for group in world.pg_map if group not in kept]
        for group in sorted(later, key=lambda group: world.pg_names[group], reverse=True):
            try:
                dist.destroy_process_group(group)
            except Exception as error:
                _forget_group(world, group)
                say(f"[resilient] a group could not be closed: {error!r}")
        world.group_count = self._count


def _forget_group(world, group):
    """What destroy_process_group does to torch's tables, without the group's own shutdown."""
    name = world.pg_names.pop(group, None)
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    world.pg_coalesce_state.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    if name is not None:
        c10d._unregister_process_group(name)


def _drop_frames(error):
    """Frees the local variables of the frames that an exception, and those behind it, holds."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _log_recovery(world, incident, commits):
    """One line for each recovery, at its first commit; as JSON with the times of all phases."""
    log = world.settings["log"]
    if log.rpartition(":")[2] in ("off", "error"):
        return
    if log.startswith("json:"):
        line = json.dumps({"event": "recovered", "rank": world.rank, "commit": commits, **incident})
    else:
        # The session has already logged the failure and the phases of its own recovery.
        milliseconds = (incident["committed_unix_s"] - incident.get("known", 0)) * 1000
        line = (
            f"[resilient] rank {world.rank}: training goes on with commit {commits},"
            f" {milliseconds:.0f} ms after the failure was known"
        )
    say(line)
