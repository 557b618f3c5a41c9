"""A kernel that refuses pidfds, as old container runtimes do. Imports nothing but Python's own."""

import ctypes
import struct

PIDFD_OPEN, PIDFD_SEND_SIGNAL = 434, 424
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2


def refuse_pidfds(error):
    """From here on pidfd_open and pidfd_send_signal of this process fail with that errno."""
    allow, refuse = 0x7FFF0000, 0x00050000 | error
    program = [(0x20, 0, 0, 0), (0x15, 2, 0, PIDFD_OPEN), (0x15, 1, 0, PIDFD_SEND_SIGNAL)]
    program += [(6, 0, 0, allow), (6, 0, 0, refuse)]
    packed = b"".join(struct.pack("HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(packed)
    filtered = struct.pack("HL", len(program), ctypes.addressof(lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtered, 0, 0) == 0, ctypes.get_errno()
