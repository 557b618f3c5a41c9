"""Presence of a rank before its init: the other ranks see that it lives and is on its way.

On its host always: a datagram socket bound to a name in the abstract namespace. No thread, port or
file, and gone with the process. The name has the user's number in it, and what another user binds
counts for nothing (runtime/net/presence.h). On every host where the store is known before init, by
RESILIENT_STORE (resilient-run sets it) or by MASTER_ADDR and MASTER_PORT under
RESILIENT_TAKE_OVER: a lease at the store. Neither claims the seat: only init does. A forked child
keeps nothing of it.

A program may call init at another store than its launcher's variables say, or for another job.
While an init lasts, the process says which one it is, and no rank of another init waits for it.
"""

import atexit
import contextlib
import errno
import hashlib
import os
import socket
from dataclasses import dataclass

from torch_resilient._names import number

# What a host calls itself.
_HERE = ("localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::")
_kept = None  # A _Name, bound until the process ends or its variables call it otherwise.
_of_init = []  # Names beside it, of the init that this process is in.
_announcement = None  # Of the extension; until this rank has joined.
_announced = None  # The Init that it is for.
_prepared = False


def prefix(environment):
    """What the names of all ranks of a job begin with; "" where the launcher says too little."""
    address, port = environment.get("MASTER_ADDR", ""), number(environment.get("MASTER_PORT"))
    if not address or port is None:
        address, port = environment.get("RESILIENT_STORE", ""), ""
    if not address:
        return ""
    address = address.strip().lower()
    address = "localhost" if address in _HERE else address
    job = environment.get("RESILIENT_JOB", "")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    text = "\0".join((address, str(port), job, run, str(_world_size(environment))))
    return f"resilient/{os.geteuid()}/{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def prefix_for(init, environment):
    """What an init that waits for its ranks goes by; "" where the variables do not count those."""
    return prefix(environment) if init.processes == number(environment.get("WORLD_SIZE")) else ""


def _world_size(environment):
    """Of the ranks, without the spares among WORLD_SIZE; 0: not known."""
    size = number(environment.get("WORLD_SIZE"))
    spares = number(environment.get("RESILIENT_SPARES") or "0")
    return 0 if size is None or spares is None else max(size - spares, 0)


@dataclass(frozen=True)
class Init:
    """What tells an init from others. `port`: of the store, where nothing but its address leads to
    it; else "". `rank`: of this process. `processes`: ranks and spares."""

    job: str
    port: str
    rank: int
    processes: int

    def name(self):
        """The same on all ranks."""
        text = "\0".join((self.job, self.port, str(self.processes)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Name:
    """A datagram socket bound to a name in the abstract namespace. OSError: another has it, or the
    system has no such sockets."""

    def __init__(self, text):
        self.text = text
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0{text}")
        except OSError:
            self._socket.close()
            raise

    def close(self):
        self._socket.close()


def announce(environment=os.environ):
    """Binds the name of this process's rank. Helpers, which inherit RANK, find it taken. True: this
    process is the rank's."""
    global _kept
    if environment.get("RESILIENT_OWNER"):
        return _kept is not None
    rank, size = number(environment.get("RANK")), number(environment.get("WORLD_SIZE"))
    if rank is None or size is None or not 0 <= rank < size > 1:
        return _kept is not None
    names = prefix(environment)
    if not names:
        return _kept is not None
    text = f"{names}/{rank}"
    if _kept is not None and _kept.text == text:
        return True
    try:
        name = _Name(text)
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # Without such sockets nobody can tell.
    if _kept is not None:
        _kept.close()
    _prepare()
    _kept = name
    return True


@contextlib.contextmanager
def in_init(init, launchers, environment=os.environ):
    """While it lasts this process is on its way to `init` and to no other. `launchers`: the Init
    that its launcher's variables alone lead to."""
    announced = announce(environment)  # Torch may have been imported before RANK was set.
    if announced and _kept is not None:
        # The program may number its ranks differently. Only when all have come is it known which
        # process is which rank.
        rank = "any" if init.name() == launchers.name() else init.rank
        _bind_beside(f"{_kept.text}/{init.name()}/{rank}")
        _bind_beside(f"{_kept.text}/init")
    elsewhere = _announced is not None and _announced.name() != init.name()
    if elsewhere:
        end()
    try:
        yield
    except BaseException:
        _leave_init()
        if elsewhere:
            at_import(environment)
        raise
    _leave_init()


def _bind_beside(text):
    with contextlib.suppress(OSError):
        _of_init.append(_Name(text))


def _leave_init():
    while _of_init:  # "/init" first: what it stands for is not seen without the other.
        _of_init.pop().close()


def at_import(environment=os.environ):
    """At the end of `import torch`: silent, and costs next to nothing where no store is known."""
    global _announcement, _announced
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
        addresses, job, port, access = found
        rank, size = number(environment["RANK"]), _world_size(environment)
        if rank >= size:
            return  # A spare: nobody waits for it.
        _prepare()
        _announcement = native.Announcement(addresses, job, rank, size, **access)
        _announced = Init(job, port, rank, number(environment["WORLD_SIZE"]))


def end():
    """The lease ends: this rank has joined, or the process ends."""
    global _announcement, _announced
    announcement, _announcement, _announced = _announcement, None, None
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
    global _kept, _announcement, _announced
    kept, _kept, _announcement, _announced = _kept, None, None, None
    _leave_init()
    if kept is not None:
        kept.close()
