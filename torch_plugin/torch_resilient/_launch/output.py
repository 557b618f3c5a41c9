"""What the ranks say, and what the launcher says of them: on the console and in files.

The launcher's loop never writes itself: a console that nobody reads (Ctrl-S, a pager, a stuck
collector) or a disk that does not answer would keep it from its ranks. It hands all to backlogs,
each with a thread; what has no room there is lost, counted, and the count is told.
"""

import json
import os
import select
import sys
import threading
import time

from torch_resilient._launch import status
from torch_resilient._launch.backlog import Backlog

_CHUNK = 65536
_LINE_LIMIT = 1 << 20  # A longer line is passed on in pieces.
_CLEAR = b"\r\x1b[K"  # The line of the cursor.
_PIECE = select.PIPE_BUF  # Goes into a pipe as a whole, beside what others write there.
_SHOWN_LIMIT = 32 << 20  # Bytes that wait for a reader of the console,
_OWN_RESERVE = 1 << 20  # and room that only the launcher's own lines find.
_LOGGED_LIMIT = 16 << 20  # Bytes that wait for the disk of the logs,
_EVENTS_LIMIT = 1 << 20  # and of the events.
_LAST_WORDS_SECONDS = 2.0


class Output:
    """Passes one pipe on, in whole lines; `sink` takes a list of them, without their ends."""

    def __init__(self, pipe, sink):
        self.pipe = pipe
        self._sink = sink
        self._pending = b""

    def read(self):
        """What has arrived; False at the end."""
        try:
            data = os.read(self.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            self.finish()
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LINE_LIMIT:
            lines.append(self._pending)
            self._pending = b""
        if lines:
            self._sink(lines)
        return True

    def finish(self):
        if self._pending:
            self._sink([self._pending])
            self._pending = b""


def _append(descriptor, data, moved=lambda: None):
    """Writes all of it, for as long as that takes. In pieces of whole lines, where these fit."""
    at = 0
    while at < len(data):
        end = min(at + _PIECE, len(data))
        if end < len(data):
            end = data.rfind(b"\n", at, end) + 1 or end
        try:
            at += os.write(descriptor, data[at:end])
        except BlockingIOError:  # Another owner of the description wants it so.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        moved()


class _Target:
    """A file that is the stdout or stderr of the launcher, or both. Any thread may put."""

    def __init__(self, name):
        self.backlog = Backlog(name, self._write, _SHOWN_LIMIT, self._tell_lost)
        self._lock = threading.Lock()
        self._lost = 0  # Lines, not told yet,
        self._why = ""
        self._descriptor = None  # and where to tell it.
        self._has_failed = False  # The last write.

    def put(self, descriptor, data, lines, own):
        """So many lines; `own`: the launcher's, which are lost last."""
        with self._lock:
            told = 0 if self.backlog.size() else self._lost
            note = self._note() if told else b""
            reserve = _OWN_RESERVE if own else 0
            item = (descriptor, note + data, lines + told)
            if self.backlog.put(item, len(note) + len(data), reserve):
                self._lost -= told
            else:
                self._lose(descriptor, lines, "nobody read them in time")

    def _note(self):
        what = "1 line is" if self._lost == 1 else f"{self._lost} lines are"
        return f"resilient-run: {what} missing here, as {self._why}\n".encode()

    def _lose(self, descriptor, lines, why):
        self._lost += lines
        self._why = why
        self._descriptor = descriptor

    def _write(self, item):
        descriptor, data, lines = item
        try:
            _append(descriptor, data, self.backlog.moved)
        except OSError as error:
            with self._lock:
                self._lose(descriptor, lines, f"they could not be written ({error.strerror})")
            self._has_failed = True
        else:
            self._has_failed = False

    def _tell_lost(self):
        """All that had room is read."""
        with self._lock:
            if not self._lost or self._has_failed:
                return
            descriptor, note, told = self._descriptor, self._note(), self._lost
            self._lost = 0
        self._write((descriptor, note, told))


class Console:
    """The launcher's own stdout and stderr. Nobody needs to read them: the job goes on. Where
    stderr is a terminal a line of status stays below what is said. Any thread may write."""

    def __init__(self):
        self._descriptors = {"out": sys.stdout.fileno(), "err": sys.stderr.fileno()}
        # One order of what comes to one place.
        places = {stream: _place(fd) for stream, fd in self._descriptors.items()}
        by_place = {place: _Target(f"run-{stream}") for stream, place in places.items()}
        self._targets = {stream: by_place[place] for stream, place in places.items()}
        self.has_status = status.is_wanted(self._descriptors["err"])
        self._lock = threading.Lock()
        self._status = b""

    def say(self, text):
        self.write("err", "resilient-run: ", [text.encode()], own=True)

    def write(self, stream, prefix, lines, own=False):
        """`own`: not of a rank."""
        data = b"".join(prefix.encode() + line + b"\n" for line in lines)
        with self._lock:
            if not self._status:
                self._put(stream, data, len(lines), own)
            elif self._targets[stream] is self._targets["err"]:
                self._put(stream, _CLEAR + data + self._status, len(lines), own)
            else:
                self._put("err", _CLEAR, 0, own)
                self._put(stream, data, len(lines), own)
                self._put("err", self._status, 0, own)

    def show(self, text):
        """The line of status from here on; "": none. Only where `has_status`."""
        shown = text[: status.width(self._descriptors["err"])].encode()
        with self._lock:
            # Where nobody reads them they would only take the room of lines.
            is_read = self._targets["err"].backlog.size() < _PIECE
            if shown != self._status and (is_read or not shown):
                self._status = shown
                self._put("err", _CLEAR + shown, 0, True)

    def _put(self, stream, data, lines, own):
        self._targets[stream].put(self._descriptors[stream], data, lines, own)

    def finish(self, began, is_hurried):
        """As Backlog.finish."""
        for target in self._targets.values():
            target.backlog.finish(began, is_hurried)


def _place(descriptor):
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino, about.st_rdev


def last_words(text):
    """For who has no console, and ends."""
    console = Console()
    console.say(text)
    until = time.monotonic() + _LAST_WORDS_SECONDS
    console.finish(time.monotonic(), lambda: time.monotonic() > until)


class Logs:
    """DIRECTORY/rank-R.out and .err, appended to over replacements. At the first file that cannot
    be made or written the logs are given up, with one line that says why. What a disk does not
    take in time is missing, and the file says how much."""

    def __init__(self, directory, say):
        self._directory = directory
        self._say = say
        self._backlog = Backlog("run-logs", self._put, _LOGGED_LIMIT)
        self._missing = {}  # (rank, stream) -> lines
        self._has_told = False  # That lines are missing.
        self._files = {}  # (rank, stream) -> descriptor; the thread's,
        self._kept = directory is not None  # which ends this.

    def begin(self, rank, pid):
        """Another process writes from here on."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for stream in ("out", "err"):
            self.write(rank, stream, [f"=== {when} rank {rank} begins, pid {pid}".encode()])

    def write(self, rank, stream, lines, otherwise=None):
        """Whether they are taken: they come to the file or, where it cannot be written, are passed
        to `otherwise`, by another thread."""
        if not self._kept and not self._backlog.size():
            return False
        missing = self._missing.get((rank, stream), 0)
        note = f"=== {missing} lines are missing here: the disk did not take them in time"
        kept = [note.encode(), *lines] if missing else lines
        data = b"".join(line + b"\n" for line in kept)
        if self._backlog.put((rank, stream, data, lines, otherwise), len(data)):
            self._missing.pop((rank, stream), None)
            return True
        self._missing[rank, stream] = missing + len(lines)
        if not self._has_told:
            self._has_told = True
            self._say(f"{self._directory} takes nothing now: lines will be missing in the logs")
        return False

    def _put(self, item):
        rank, stream, data, lines, otherwise = item
        path = os.path.join(self._directory, f"rank-{rank}.{stream}")
        if self._kept:
            try:
                _append(self._file(rank, stream, path), data, self._backlog.moved)
                return
            except OSError as error:
                self._close()
                self._say(
                    f"{path} cannot be written ({error.strerror}): no more logs in"
                    f" {self._directory}, the output goes on to the console"
                )
        if otherwise:
            otherwise(lines)

    def _file(self, rank, stream, path):
        if (rank, stream) not in self._files:
            os.makedirs(self._directory, exist_ok=True)
            # A pipe that nobody reads is refused, instead of waited for.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            self._files[rank, stream] = os.open(path, flags, 0o666)
        return self._files[rank, stream]

    def _close(self):
        self._kept = False
        for descriptor in self._files.values():
            try:
                os.close(descriptor)
            except OSError:
                pass  # Some file systems tell only now that there was no room.
        self._files.clear()

    def finish(self, began, is_hurried):
        """As Backlog.finish. Nothing is written after it."""
        self._backlog.finish(began, is_hurried)
        if not self._backlog.size():  # Else the thread is in one of them.
            self._close()


class Events:
    """What happens, as JSON lines in a file; path None: nowhere. Given up at the first line that
    cannot be written, with one line that says why."""

    def __init__(self, path, say):
        self._path = path
        self._say = say
        self._file = None
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._backlog = Backlog("run-events", self._put, _EVENTS_LIMIT)
        self._lost = 0

    def write(self, name, **fields):
        if self._file is None:
            return
        told = [{"event": "lost", "time": time.time(), "lines": self._lost}] if self._lost else []
        told.append({"event": name, "time": time.time(), **fields})
        data = "".join(json.dumps(event) + "\n" for event in told).encode()
        self._lost = 0 if self._backlog.put(data, len(data)) else self._lost + 1

    def _put(self, data):
        if self._file is None:
            return
        try:
            _append(self._file, data, self._backlog.moved)
        except OSError as error:
            self._file = None
            self._say(f"{self._path} cannot be written ({error.strerror}): no more events in it")

    def finish(self, began, is_hurried):
        """As Backlog.finish."""
        self._backlog.finish(began, is_hurried)


class Outputs:
    """Where the lines of each rank go. directory: of their logs, or None. log_only: only what the
    logs do not take is on the console."""

    def __init__(self, console, directory, log_only):
        self._console = console
        self._logs = Logs(directory, console.say)
        self._log_only = log_only

    def begin(self, rank, pid):
        self._logs.begin(rank, pid)

    def of(self, rank, stream):
        """The sink of that stream, `out` or `err`."""

        def show(lines):
            self._console.write(stream, f"[{rank}] ", lines)

        def sink(lines):
            if not self._log_only:
                self._logs.write(rank, stream, lines)
                show(lines)
            elif not self._logs.write(rank, stream, lines, show):
                show(lines)

        return sink

    def finish(self, began, is_hurried):
        """As Backlog.finish. The console after the logs, which may pass lines to it."""
        self._logs.finish(began, is_hurried)
        self._console.finish(began, is_hurried)


def finish(parts, is_hurried):
    """At the end of the launcher: waits until all is written, but no longer than something is."""
    began = time.monotonic()
    for part in parts:
        part.finish(began, is_hurried)
