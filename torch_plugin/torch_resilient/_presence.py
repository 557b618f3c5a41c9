"""Presence of a rank before its init: the ranks of its host see that it lives and is on its way.

A datagram socket bound to a name in the abstract namespace: no thread, port or file, and gone with
the process. It never claims the seat: only init does.
"""

import contextlib
import hashlib
import os
import socket

_kept = None  # Bound until the process ends.


def prefix(environment):
    """What the names of all ranks of a job begin with; "" where the launcher says too little."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address or not port:
        return ""
    job = environment.get("RESILIENT_JOB", "")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    text = "\0".join((address, port, job, run, environment.get("WORLD_SIZE", "")))
    return "resilient/" + hashlib.sha256(text.encode()).hexdigest()[:32]


def announce(environment=os.environ):
    """Binds the name of this process's rank, once. Helpers, which inherit RANK, find it taken."""
    global _kept
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if _kept is not None or environment.get("RESILIENT_OWNER"):
        return
    if not (rank.isdigit() and size.isdigit() and int(size) > 1):
        return
    names = prefix(environment)
    if not names:
        return
    with contextlib.suppress(OSError):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.bind(f"\0{names}/{int(rank)}")
        except OSError:
            sock.close()
            raise
        _kept = sock
