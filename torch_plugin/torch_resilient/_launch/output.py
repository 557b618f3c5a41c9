"""What the ranks say, and what the launcher says of them: on the console and in files."""

import os
import sys
import time

from torch_resilient._launch import status

_CHUNK = 65536
_LINE_LIMIT = 1 << 20  # A longer line is passed on in pieces.
_CLEAR = b"\r\x1b[K"  # The line of the cursor.


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


class Console:
    """The launcher's own stdout and stderr. Nobody needs to read them: the job goes on. Where
    stderr is a terminal a line of status stays below what is said."""

    def __init__(self):
        self._targets = {"out": sys.stdout.buffer, "err": sys.stderr.buffer}
        self.has_status = status.is_wanted(sys.stderr.fileno())
        self._status = b""

    def say(self, text):
        self.write("err", "resilient-run: ", [text.encode()])

    def write(self, stream, prefix, lines):
        if self._status:
            self._put("err", _CLEAR)
        self._put(stream, b"".join(prefix.encode() + line + b"\n" for line in lines))
        if self._status:
            self._put("err", self._status)

    def show(self, text):
        """The line of status from here on; "": none. Only where `has_status`."""
        shown = text[: status.width(sys.stderr.fileno())].encode()
        if shown != self._status:
            self._status = shown
            self._put("err", _CLEAR + shown)

    def _put(self, stream, data):
        try:
            self._targets[stream].write(data)
            self._targets[stream].flush()
        except (OSError, ValueError):
            pass


class Logs:
    """DIRECTORY/rank-R.out and .err, appended to over replacements. At the first file that cannot
    be made or written the logs are given up, with one line that says why."""

    def __init__(self, directory, say):
        self._directory = directory
        self._say = say
        self._files = {}  # (rank, stream) -> descriptor
        self._kept = directory is not None

    def begin(self, rank, pid):
        """Another process writes from here on."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for stream in ("out", "err"):
            self.write(rank, stream, [f"=== {when} rank {rank} begins, pid {pid}".encode()])

    def write(self, rank, stream, lines):
        """Whether all of it is in the file."""
        if not self._kept:
            return False
        path = os.path.join(self._directory, f"rank-{rank}.{stream}")
        try:
            if (rank, stream) not in self._files:
                os.makedirs(self._directory, exist_ok=True)
                # A pipe that nobody reads is refused, instead of waited for.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
                self._files[rank, stream] = os.open(path, flags, 0o666)
            data = memoryview(b"".join(line + b"\n" for line in lines))
            while data:
                data = data[os.write(self._files[rank, stream], data) :]
        except OSError as error:
            self.close()
            self._say(
                f"{path} cannot be written ({error.strerror}): no more logs in"
                f" {self._directory}, the output goes on to the console"
            )
        return self._kept

    def close(self):
        self._kept = False
        for descriptor in self._files.values():
            try:
                os.close(descriptor)
            except OSError:
                pass  # Some file systems tell only now that there was no room.
        self._files.clear()


class Outputs:
    """Where the lines of each rank go. log_only: only what the logs do not take
    is on the console."""

    def __init__(self, console, logs, log_only):
        self._console = console
        self._logs = logs
        self._log_only = log_only

    def begin(self, rank, pid):
        self._logs.begin(rank, pid)

    def of(self, rank, stream):
        """The sink of that stream, `out` or `err`."""

        def sink(lines):
            kept = self._logs.write(rank, stream, lines)
            if not (kept and self._log_only):
                self._console.write(stream, f"[{rank}] ", lines)

        return sink

    def close(self):
        self._logs.close()
