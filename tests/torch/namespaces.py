"""What a process does to become a host of its own: other processes, network and name.

Apart from hosts.py because it runs in the fork server, which knows no test.
"""

import ctypes
import os
import signal
import socket
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def become_host(router, name):
    """Returns in the first process of new namespaces, which belong to the user namespace of the
    process `router`. The caller waits behind it and ends with it, and it with the caller."""
    descriptor = os.open(f"/proc/{router}/ns/user", os.O_RDONLY)
    _call(_libc.setns, descriptor, CLONE_NEWUSER)
    os.close(descriptor)
    _call(_libc.unshare, CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS | CLONE_NEWPID)
    socket.sethostname(name)
    first = os.fork()
    if first != 0:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    _call(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call(_libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    _call(_libc.mount, b"proc", b"/proc", b"proc", 0, None)


def _call(function, *args):
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
