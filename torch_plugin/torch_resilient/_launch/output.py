"""What the ranks say, and what the launcher says of them."""

import os
import sys

_CHUNK = 65536
_LINE_LIMIT = 1 << 20  # A longer line is passed on in pieces.


class Output:
    """Passes one pipe on, line by line, each with the rank before it."""

    def __init__(self, pipe, prefix, target):
        self.pipe = pipe
        self._prefix = prefix
        self._target = target
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
        self._write(lines)
        return True

    def finish(self):
        if self._pending:
            self._write([self._pending])
            self._pending = b""

    def _write(self, lines):
        if not lines:
            return
        try:
            self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._target.flush()
        except (BrokenPipeError, ValueError):
            pass  # Nobody reads any more; the job goes on.


def say(text):
    print(f"resilient-run: {text}", file=sys.stderr, flush=True)
