"""What keeps a rank of these programs away from the others."""

import ctypes
import time


def work(seconds):
    """First half of it in one native call that keeps the GIL, second half in Python."""
    started = time.monotonic()
    ctypes.PyDLL(None).usleep(int(seconds / 2 * 1_000_000))
    while time.monotonic() < started + seconds:
        sum(range(100_000))
