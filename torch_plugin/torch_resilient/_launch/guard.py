"""A process beside the launcher that ends the job when the launcher is killed.

Workers end by themselves then (PR_SET_PDEATHSIG), but not what they have started.
"""

import contextlib
import os
import shutil
import signal

from torch_resilient._launch import family


class Guard:
    """Owner: the launcher, which tells it by a pipe of the workers. Forked, so that it costs
    neither a start nor memory; the launcher has one thread until then.

    folder: what it removes when it has ended them. last_words: a command that it runs then, or
    None."""

    def __init__(self, mark, folder, last_words=None):
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _guard(reader, mark, folder, last_words)
            finally:
                os._exit(0)
        os.close(reader)

    def began(self, pid):
        self._tell(f"+{pid}\n")

    def ended(self, pid):
        self._tell(f"-{pid}\n")

    def dismiss(self):
        """Nothing is left to guard."""
        self._tell("done\n")
        os.close(self._writer)
        os.waitpid(self.pid, 0)

    def _tell(self, line):
        with contextlib.suppress(OSError):  # Somebody has killed it.
            # The guard does nothing but read. tidy: allow(blocking-write)
            os.write(self._writer, line.encode())


def _guard(reader, mark, folder, last_words):
    os.setsid()  # What ends the launcher's terminal or group does not end it.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(reader, 3)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    sessions = set()
    with os.fdopen(3) as lines:
        for line in lines:
            if line == "done\n":
                return
            (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))

    def left():
        return [
            process
            for process in family.everyone()
            if process.state not in "ZX"
            and (process.session in sessions or family.mark_of(process.pid).startswith(f"{mark}."))
        ]

    family.end_all(left)
    shutil.rmtree(folder, ignore_errors=True)
    if last_words:
        os.spawnv(os.P_WAIT, last_words[0], last_words)
