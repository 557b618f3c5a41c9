"""on_event: the program hears what happens to its sessions."""

import itertools
import os
import threading
import traceback

from torch_resilient import _errors, _worlds
from torch_resilient._say import say

_SLICE_SECONDS = 0.2  # After so long the thread looks whether it is to end.
_END_SECONDS = 5.0  # How long the end of the process waits for a callback that runs.


def on_event(callback):
    """Calls `callback(event)` for what happens to the sessions of this process from now on, also to
    those that are still to come. Returns a handle; `handle.remove()` ends it.

    `event` is a dictionary: event, generation, time (unix), job, number (of the session, from 1),
    missed (how many before it were dropped: 256 wait for a slow callback), and, None where there is
    nothing to say, code, text, rank, host and pid of the cause, and the members. What "event" says:

    - "fenced": the generation is over, by that cause. Operations raise it.
    - "rebuilt": the generation is built on this rank, after that.
    - "running": the generation takes operations; members as in `membership()`.
    - "refused": recovery has stopped, as when a seat was not filled in time, until rebuild().
    - "failed": recovery is exhausted.
    - "closed": the last event of a session.

    Callbacks run one after the other on a thread of their own, "res-events", behind what they tell
    of; they hold up nothing else. The first exception that a callback raises is printed. At the end
    of the process no callback begins once that thread has ended, behind the end of the sessions.
    """
    if not callable(callback):
        raise _errors.ConfigError(f"on_event({callback!r:.200}): it takes a function of one event")
    return _watcher.add(callback)


class Handle:
    """A callback that is called, until remove()."""

    def __init__(self, watcher, number):
        self._watcher = watcher
        self._number = number

    def remove(self):
        """No call begins from now on; one that runs goes on. Idempotent."""
        self._watcher.callbacks.pop(self._number, None)


class _Watcher:
    """The callbacks and their thread, which is started with the first of them and lives until the
    end of the process. Used by any thread."""

    def __init__(self):
        self.callbacks = {}  # By number, in the order of their registration.
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._followed = {}  # World -> number of its last event that was told.
        self._thread = None
        self._ending = False
        self._complained = set()  # Numbers of callbacks that have raised.

    def add(self, callback):
        with self._changed:
            number = next(self._numbers)
            if self._thread is None and not self._ending:
                self._start()
            self.callbacks[number] = callback
        return Handle(self, number)

    def follow(self, world):
        """Told of each world that begins."""
        with self._changed:
            self._followed[id(world)] = [world, 0]
            self._changed.notify_all()

    def end(self):
        """Behind the end of all sessions: tells what is left to tell, and joins the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_END_SECONDS)
        if thread.is_alive():
            say(
                f"[resilient] a callback of on_event still runs {_END_SECONDS:.0f} s after the end"
                " of the sessions; the process ends without it"
            )

    def _start(self):
        for world in _worlds.registry.worlds():
            if world.reconfigurable is None:
                self._followed[id(world)] = [world, _last(world)]
        _worlds.registry.tell(self.follow, self.end)
        self._thread = threading.Thread(target=self._run, name="res-events", daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            with self._changed:
                while not self._followed and not self._ending:
                    self._changed.wait()
                followed = list(self._followed.values())
                ending = self._ending
            if ending and not followed:
                return
            for entry in followed:
                self._tell_news(entry, 0 if ending else _SLICE_SECONDS / len(followed))

    def _tell_news(self, entry, seconds):
        world, after = entry
        try:
            event = world.session.await_event(after, seconds)
            over = event is None and self._ending
        except _errors.ResilientError:
            event, over = None, True
        if over:  # There will be none any more.
            with self._changed:
                del self._followed[id(world)]
        elif event is not None:
            entry[1] = event["number"]
            self._tell(world, event)

    def _tell(self, world, event):
        event = _complete(world, event)
        for number, callback in list(self.callbacks.items()):
            if number not in self.callbacks:
                continue  # Removed by one before it.
            try:
                callback(dict(event))
            except BaseException:  # Also SystemExit: the others are to hear of it.
                if number not in self._complained:
                    self._complained.add(number)
                    say(
                        "[resilient] a callback of on_event raised; it is called further, and what"
                        " it raises then is not shown\n" + traceback.format_exc()
                    )


def _last(world):
    """The number of the latest event."""
    number = 0
    while (event := world.session.await_event(number, 0)) is not None:
        number = event["number"]
        if event["event"] == "closed":
            break
    return number


def _complete(world, event):
    for name in ("code", "text", "host"):
        event[name] = event[name] or None
    event["rank"] = event["rank"] if event["rank"] >= 0 else None
    event["pid"] = event["pid"] or None
    event["job"] = world.job
    event["members"] = None
    if event["event"] == "running":
        membership = world.session.membership()
        if membership["generation"] == event["generation"]:
            event["members"] = membership["members"]
    return event


def _begin():
    global _watcher
    _watcher = _Watcher()
    _worlds.registry.tell(None, None)


_begin()
os.register_at_fork(after_in_child=_begin)  # The thread, and the worlds, are the parent's.
