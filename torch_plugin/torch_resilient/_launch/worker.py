"""The process of a rank."""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import time

from torch_resilient._launch.output import Output

SEATED = "RESILIENT_SEATED"
# Beside that file: see _worlds.note_commit and note_leave, and _ending, which import torch.
COMMITTED = ".committed"
ENDED = ".ended"
LEFT = ".left"
_PR_SET_PDEATHSIG = 1


class Worker:
    """A process that holds a rank. The launcher owns it until it is reaped; until then its number
    is its own."""

    def __init__(self, rank, command, environment, exits, outputs, replaces=False):
        self.rank = rank
        self.replaces = replaces  # One that was lost.
        self._seated = environment[SEATED]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent(os.getpid()),
            start_new_session=True,  # Signals of the terminal come through us, once.
        )
        self._exits = exits
        self._selector = exits.selector
        outputs.begin(rank, self.process.pid)
        self._outputs = [
            Output(self.process.stdout, outputs.of(rank, "out")),
            Output(self.process.stderr, outputs.of(rank, "err")),
        ]
        for output in self._outputs:
            os.set_blocking(output.pipe.fileno(), False)
            self._selector.register(output.pipe, selectors.EVENT_READ, (self._read, output))

    def has_seat(self):
        """Whether it has had a seat in a world, as it says by a file; else it may wait for one."""
        return os.path.exists(self._seated)

    def world_size(self):
        """How many seats its world has, as it said last; 0: it has said nothing yet."""
        try:
            with open(self._seated) as file:
                return int(file.read() or 0)
        except FileNotFoundError:
            return 0

    def has_committed(self):
        """Whether it has, or had, a commit of the job's."""
        return os.path.exists(self._seated + COMMITTED)

    def has_left(self):
        """Whether it has said goodbye to the store, as it says by a file."""
        return os.path.exists(self._seated + LEFT)

    def end(self):
        """What has ended it, by its own word, and at which commit; (None, 0): it said nothing."""
        try:
            with open(self._seated + ENDED) as file:
                told = json.load(file)
            return str(told["cause"]), int(told["commit"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, 0

    def watch(self, on_exit):
        self._exits.watch(self.process.pid, on_exit, self)

    def _read(self, output):
        # Not one that an end told of in the same turn has closed: by then all of it has been read.
        if output in self._outputs and not output.read():
            self._drop(output)

    def _drop(self, output):
        if output in self._outputs:
            self._outputs.remove(output)
            self._selector.unregister(output.pipe)
            output.pipe.close()

    def reap(self, before):
        """Exit code of the ended process, negative for a signal. Passes its last lines on.
        `before` is called with its number while that is still its own."""
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        before(self.process.pid)
        self._exits.forget(self.process.pid)
        exit_code = self.process.wait()
        for output in list(self._outputs):
            while _readable(output.pipe) and output.read():
                pass
            output.finish()
            self._drop(output)
        return exit_code

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def _readable(pipe):
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0))


def die_with_parent(parent):
    """A preexec_fn: the child is killed when the process of that number ends."""
    libc = ctypes.CDLL(None, use_errno=True)  # Loaded here: not between fork and exec.

    def prepare():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare


def how(exit_code):
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"
