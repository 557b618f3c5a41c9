"""Processes that come of the ranks: which those are, wherever they have gone to, and their end.

A child that outlives its parent is the launcher's from then on (PR_SET_CHILD_SUBREAPER). By the
session, or where it made its own by RESILIENT_LAUNCH in its environment, it is known which start
of which rank it comes from; what neither tells is left alone while a rank runs.
"""

import contextlib
import ctypes
import os
import select
import signal
import time
from typing import NamedTuple

from torch_resilient._launch.exits import open_pidfd

MARK = "RESILIENT_LAUNCH"
TIDY_SECONDS = 2.0  # For those that remove names from /dev/shm behind the dead.
_LOOK_SECONDS = 0.02  # Between two looks at processes that no descriptor tells of.
_KILL_SECONDS = 1.0  # From SIGKILL to the end; only a driver call takes longer.
_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A process at one moment; pid and start name it for ever."""

    pid: int
    start: int
    state: str
    parent: int
    session: int


def look(pid):
    """The process of that number, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[19]), fields[0].decode(), int(fields[1]), int(fields[3]))


def everyone():
    """All processes that can be seen."""
    found = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def children(pid):
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [look(int(child)) for child in file.read().split()]
        return [process for process in found if process is not None]
    except OSError:  # A kernel without that file; or it has just ended.
        return [process for process in everyone() if process.parent == pid]


def mark_of(pid):
    """Value of RESILIENT_LAUNCH as the process was started with it; "" where it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode():
                return value.decode(errors="replace")
    return ""


def tidies(pid):
    """Whether the process removes what others leave in /dev/shm, once all of them have ended:
    multiprocessing's (or joblib's) resource tracker, torch's manager of shared files."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        line = file.read()
        return b"resource_tracker import main" in line or b"torch_shm_manager" in line
    return False


def kill(process):
    """SIGKILL, if the number still means that process. Returns a pidfd, or None: it is gone, or the
    system gives none."""
    try:
        pidfd = open_pidfd(process.pid)
    except ProcessLookupError:
        return None
    now = look(process.pid)
    if now is not None and now.start == process.start:
        with contextlib.suppress(OSError):
            if pidfd is None:
                os.kill(process.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return pidfd
    if pidfd is not None:
        os.close(pidfd)
    return None


def end_all(find):
    """Ends what `find` returns, again and again, until that is nothing. Bounded."""
    tidy_until = time.monotonic() + TIDY_SECONDS
    give_up = tidy_until + _KILL_SECONDS
    while (found := find()) and (now := time.monotonic()) < give_up:
        poll = select.poll()
        pidfds = []
        for process in found:
            if now < tidy_until and tidies(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(open_pidfd(process.pid))
            else:
                pidfds.append(kill(process))
        known = [pidfd for pidfd in pidfds if pidfd is not None]
        for pidfd in known:
            poll.register(pidfd, select.POLLIN)
        until = tidy_until if now < tidy_until else give_up
        if len(known) < len(found):  # The others are gone, or will be soon.
            until = min(until, now + _LOOK_SECONDS)
        poll.poll(max(until - now, 0) * 1000 + 1)
        for pidfd in known:
            os.close(pidfd)


class Family:
    """Ends what a rank leaves behind with that rank. Owner and thread: the launcher.

    own: the launcher's other children, by number; they are nobody's orphans.
    """

    def __init__(self, own):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pid = os.getpid()
        self.due = None  # When `sweep` has to be called.
        self.mark = f"{pid}.{look(pid).start}"
        self._own = own
        # A shell may have become this process, and left it children; the first process of a
        # container gets the orphans of all.
        self._foreign = {child.pid for child in children(pid)}
        self._all_ours = not self._foreign and pid != 1
        self._count = 0
        self._living = {}  # session of a worker -> mark of its start
        self._ended = {}  # The same of those that have ended and may have left something.
        self._marks = {}  # (pid, start) -> mark, as long as it is there.
        self._tidy_until = {}  # (pid, start) -> when it is killed.

    def next_mark(self):
        """For the environment of the worker that is started next."""
        self._count += 1
        return f"{self.mark}.{self._count}"

    def began(self, pid, mark):
        self._living[pid] = mark

    def ended(self, pid):
        """The worker has ended, and has not been reaped: its number is still its own."""
        self._ended[pid] = self._living[pid]
        self.sweep()
        del self._living[pid]

    def sweep(self):
        """Reaps orphans that have ended, and ends those whose rank has. To be called when a child
        has ended (SIGCHLD), and at `due`."""
        now = time.monotonic()
        marks = set(self._ended.values())
        left = set()
        self.due = None
        for orphan in self._orphans():
            mark = self._mark(orphan)
            if mark not in marks:
                continue
            left.add(mark)
            self._inherit(orphan, mark)
            name = (orphan.pid, orphan.start)
            if tidies(orphan.pid):
                until = self._tidy_until.setdefault(name, now + TIDY_SECONDS)
                if now < until:
                    self.due = min(until, self.due or until)
                    continue
            with contextlib.suppress(PermissionError):  # Of another user.
                os.kill(orphan.pid, signal.SIGKILL)  # Ours to reap: the number is its own.
        self._ended = {pid: mark for pid, mark in self._ended.items() if mark in left}

    def end(self):
        """All workers have been reaped: ends what is left of them."""
        end_all(self._left)

    def _left(self):
        known = set(self._ended.values())
        return [
            orphan
            for orphan in self._orphans()
            if self._all_ours or self._mark(orphan) in known or self._is_marked(orphan)
        ]

    def _is_marked(self, process):
        return self._mark(process).startswith(f"{self.mark}.")

    def _orphans(self):
        """The living children that neither the launcher has started nor somebody before it."""
        alive, known = [], self._own() | set(self._living) | self._foreign
        for child in children(os.getpid()):
            if child.pid in known:
                continue
            if child.state in "ZX":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
            else:
                alive.append(child)
        if not alive:
            self._marks.clear()
            self._tidy_until.clear()
        return alive

    def _mark(self, process):
        name = (process.pid, process.start)
        if not self._marks.get(name):  # In the midst of exec it has none.
            by_session = self._ended | self._living
            self._marks[name] = by_session.get(process.session) or mark_of(process.pid)
        return self._marks[name]

    def _inherit(self, process, mark):
        """Its children are told by it, before it is gone."""
        for child in children(process.pid):
            self._marks[child.pid, child.start] = mark
            self._inherit(child, mark)
