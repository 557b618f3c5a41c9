"""A kernel that refuses calls, as old ones and container runtimes do. Imports nothing but Python's
own."""

import ctypes
import platform
import socket
import struct

PIDFD_OPEN, PIDFD_SEND_SIGNAL = 434, 424
SOCKET = {"x86_64": 41, "aarch64": 198}
NETLINK_SOCK_DIAG = 4
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2

# Of seccomp_data, as classic BPF reads it.
NUMBER, FIRST, THIRD = 0, 16, 32


def load(offset):
    return (0x20, 0, 0, offset)


def skip(value, equal=0, other=0):
    """So many lines if that was loaded, or something else."""
    return (0x15, equal, other, value)


def refuse_pidfds(error):
    """From here on pidfd_open and pidfd_send_signal of this process fail with that errno."""
    refuse([load(NUMBER), skip(PIDFD_OPEN, 2), skip(PIDFD_SEND_SIGNAL, 1)], error)


def refuse_sock_diag(error):
    """From here on this thread and those that it starts cannot ask the kernel about sockets."""
    program = [load(NUMBER), skip(SOCKET[platform.machine()], 0, 4)]
    program += [load(FIRST), skip(socket.AF_NETLINK, 0, 2)]
    program += [load(THIRD), skip(NETLINK_SOCK_DIAG, 1)]
    refuse(program, error)


def refuse(program, error):
    """What `program` ends at the second line behind it fails; at the first one it is allowed."""
    program = [*program, (6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x00050000 | error)]
    packed = b"".join(struct.pack("HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(packed)
    filtered = struct.pack("HL", len(program), ctypes.addressof(lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtered, 0, 0) == 0, ctypes.get_errno()
