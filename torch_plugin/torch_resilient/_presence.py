"""Presence of a rank before its init: the other ranks see that it lives and is on its way.

On its host always: a datagram socket bound to a name in the abstract namespace. No thread, port or
file, and gone with the process. On every host where the store is known before init, by
RESILIENT_STORE (resilient-run sets it) or by MASTER_ADDR and MASTER_PORT under
RESILIENT_TAKE_OVER: a lease at the store. Neither claims the seat: only init does. A forked child
keeps nothing of it.
"""

import atexit
import contextlib
import errno
import hashlib
import os
import socket

_kept = None  # Bound until the process ends.
_announcement = None  # Of the extension; until this rank has joined.
_prepared = False


def prefix(environment):
    """What the names of all ranks of a job begin with; "" where the launcher says too little."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address or not port:
        address, port = environment.get("RESILIENT_STORE", ""), ""
    if not address:
        return ""
    job = environment.get("RESILIENT_JOB", "")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    text = "\0".join((address, port, job, run, str(_world_size(environment))))
    return "resilient/" + hashlib.sha256(text.encode()).hexdigest()[:32]


def _world_size(environment):
    """Of the ranks, without the spares among WORLD_SIZE; 0: not known."""
    size, spares = environment.get("WORLD_SIZE", ""), environment.get("RESILIENT_SPARES", "0")
    return int(size) - int(spares) if size.isdigit() and spares.isdigit() else 0


def announce(environment=os.environ):
    """Binds the name of this process's rank, once. Helpers, which inherit RANK, find it taken.
    True: this process is the rank's."""
    global _kept
    if _kept is not None:
        return True
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if environment.get("RESILIENT_OWNER"):
        return False
    if not (rank.isdigit() and size.isdigit() and 0 <= int(rank) < int(size) > 1):
        return False
    names = prefix(environment)
    if not names:
        return False
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.bind(f"\0{names}/{int(rank)}")
        except OSError:
            sock.close()
            raise
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # Without such sockets nobody can tell.
    _prepare()
    _kept = sock
    return True


def at_import(environment=os.environ):
    """At the end of `import torch`: silent, and costs next to nothing where no store is known."""
    global _announcement
    if not announce(environment) or _announcement is not None:
        return
    if not (environment.get("RESILIENT_STORE") or environment.get("RESILIENT_TAKE_OVER")):
        return
    with contextlib.suppress(Exception):  # Init says what is wrong.
        from torch_resilient import _address, _native

        native = _native.load()
        found = _address.before_init(native, environment)
        if found is None:
            return
        addresses, job, access = found
        rank, size = int(environment["RANK"]), _world_size(environment)
        if rank >= size:
            return  # A spare: nobody waits for it.
        _prepare()
        _announcement = native.Announcement(addresses, job, rank, size, **access)


def end():
    """The lease ends: this rank has joined, or the process ends."""
    global _announcement
    announcement, _announcement = _announcement, None
    if announcement is not None:
        announcement.close()


def _prepare():
    global _prepared
    if not _prepared:
        _prepared = True
        atexit.register(end)
        os.register_at_fork(after_in_child=_forget)


def _forget():
    """In a forked child, which is no rank until its own init says so."""
    global _kept, _announcement
    kept, _kept, _announcement = _kept, None, None
    if kept is not None:
        kept.close()
