"""Writes that may block, on a thread beside the launcher's loop."""

import collections
import signal
import threading
import time

UNREAD_SECONDS = 60.0  # So long the end of the launcher waits where nothing is taken,
HURRIED_SECONDS = 0.3  # and so long after a signal.
_SLICE_SECONDS = 0.1


class Backlog:
    """What a thread of its own writes, in order, so that whoever puts it there never waits for a
    reader or for a disk. Any thread may put.

    The thread starts with the first item, and lives until the end of the process: nobody can join
    it, for its write may never return.

    name: of the thread. write: writes one item; it may call `moved`. most: how many bytes may wait.
    is_over: called by the thread when nothing is left to write.
    """

    def __init__(self, name, write, most, is_over=None):
        self._name = name
        self._write = write
        self._most = most
        self._is_over = is_over
        self._changed = threading.Condition()
        self._items = collections.deque()  # (item, size)
        self._size = 0  # Of these, and of the one that is being written.
        self._thread = None
        self._last = time.monotonic()

    def put(self, item, size, reserve=0):
        """Whether there was room. `reserve`: how much more than `most` this item may find."""
        with self._changed:
            if self._size and self._size + size > self._most + reserve:
                return False
            self._size += size
            self._items.append((item, size))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return True

    def size(self):
        """Bytes that are not written yet."""
        with self._changed:
            return self._size

    def moved(self):
        """A part of an item is written."""
        self._last = time.monotonic()

    def finish(self, began, is_hurried):
        """Waits until all is written, but no longer than something is. began: when the end of the
        launcher did. is_hurried: whether it is to be quick."""
        while not self._has_drained():
            patience = HURRIED_SECONDS if is_hurried() else UNREAD_SECONDS
            if time.monotonic() - max(began, self._last) >= patience:
                return

    def _has_drained(self):
        with self._changed:
            return self._changed.wait_for(lambda: not self._size, _SLICE_SECONDS)

    def _run(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # They are the loop's.
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                item, size = self._items.popleft()
            self._write(item)
            self.moved()
            with self._changed:
                is_last = not self._items
            if is_last and self._is_over:
                self._is_over()
            with self._changed:
                self._size -= size
                self._changed.notify_all()
