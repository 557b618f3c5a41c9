"""The signals of the launcher, as something that its loop can wait for."""

import contextlib
import signal
import socket

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BYTES = 64


class Signals:
    """Those that end the job, and SIGCHLD, one after the other. One that was ignored before, as by
    nohup, stays so. Owner and thread: the launcher, which has one of these."""

    def __init__(self):
        self._ends = []  # (number, whether it is the first) until somebody asks for them.
        self._hurried = False
        self.receiver, self._sender = socket.socketpair()
        for end in (self.receiver, self._sender):
            end.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in _ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # Ignored, it would leave no exit codes.

    def take(self):
        """What has come since. True: a child may have ended."""
        numbers = []
        with contextlib.suppress(BlockingIOError):
            numbers = list(self.receiver.recv(_BYTES))
        for number in numbers:
            if number in _ENDS:
                self._ends.append((number, not self._hurried))
                self._hurried = True
        return signal.SIGCHLD in numbers

    def ends(self):
        """(number, whether it is the first of all) of those taken that are to end the job, once."""
        ends, self._ends = self._ends, []
        return ends

    def is_hurried(self):
        """Whether somebody wants the job to end, or what is left after it."""
        self.take()
        return self._hurried

    def close(self):
        signal.set_wakeup_fd(-1)
        self.receiver.close()
        self._sender.close()
