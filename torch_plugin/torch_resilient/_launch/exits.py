"""When children of the launcher have ended: by pidfds, or by SIGCHLD where the system has none.

Kernels before 5.3 and container runtimes with an older seccomp profile refuse pidfd_open. Nothing
but some looking is lost by it: the number of a child that nobody has reaped is its own.
"""

import os
import selectors


def open_pidfd(pid):
    """None where it is refused. ProcessLookupError: there is no such process."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


class Exits:
    """Calls back, in the launcher's loop, when a child has ended; to reap it is the owner's part.
    Owner and thread: the launcher."""

    def __init__(self, selector):
        self.selector = selector
        self._pidfds = {}  # By the child's number;
        self._others = {}  # of those without: callback and argument.

    def watch(self, pid, callback, argument=None):
        pidfd = open_pidfd(pid)
        if pidfd is None:
            self._others[pid] = (callback, argument)
        else:
            self._pidfds[pid] = pidfd
            self.selector.register(pidfd, selectors.EVENT_READ, (callback, argument))

    def forget(self, pid):
        """Before it is reaped, and its number another's."""
        self._others.pop(pid, None)
        if (pidfd := self._pidfds.pop(pid, None)) is not None:
            self.selector.unregister(pidfd)
            os.close(pidfd)

    def look(self):
        """To be called after each SIGCHLD."""
        for pid, (callback, argument) in list(self._others.items()):
            # One callback may end the watch of another child.
            if pid in self._others and _has_ended(pid):
                callback(argument)


def _has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
