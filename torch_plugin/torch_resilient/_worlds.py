"""Which session serves which world of this process, and their end."""

import atexit
import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from torch_resilient import _autoload, _ending, _native, _places, _server

OWNER_VARIABLE = "RESILIENT_OWNER"
# The program's exit handlers run before ours, and one may be what a call into a driver holds up.
# Python has no public way to come first; concurrent.futures goes this one too.
_before_exit_handlers = getattr(threading, "_register_atexit", atexit.register)
_seat_file = ""  # RESILIENT_SEATED, which is for this process and none that it starts.
# Of torch's flight recorder: whether its trace has the call stacks.
STACKS_VARIABLE = "TORCH_INCLUDE_STACK_TRACE"
_HOOKS_SECONDS = 0.3
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_STACKS_SECONDS = 20.0
COMMITTED = ".committed"  # What follows its name where this process has made a commit;
LEFT = ".left"  # where it has left its world.
_commit = 0  # The newest one of this process.


@dataclass
class World:
    """One init_process_group world: its session and what was decided at its start."""

    session: Any
    rank: int
    world_size: int
    job: str
    addresses: list
    settings: dict
    store_given: bool
    store_spawned: bool = False  # By this process.
    device: Any = None  # A DeviceClaim of the extension.
    process_group: Any = None
    store: Any = None
    handed_in: Any = None  # The program's own store, which lives as long as torch would keep it.
    asked: dict = field(default_factory=dict)  # Backends that we took over, by the group's name.
    agreements: tuple = (0, 0)  # The generation, and how many `agree` have ended in it.
    survivor_agreements: tuple = (0, 0)  # The same of `ulfm.agree`.
    whereabouts: Any = field(default_factory=_places.Whereabouts)
    pid: int = field(default_factory=os.getpid)
    # Made with enable_reconfigure=True: `session` is of this process alone, and the backend has one
    # with the members that the program chose last.
    reconfigurable: Any = None
    begun_by: Any = None  # The call of init_process_group, for _init.begin_again.
    lost: Any = None  # The RankLostError of another rank that this world had when its end began.

    def member_session(self):
        """The session that the world's operations run on."""
        return self.session if self.reconfigurable is None else self.reconfigurable.session

    def announce_end(self, cause, seconds):
        """To the other ranks: this process comes to its end, and by what."""
        for session in (self.session, self.member_session()):
            if session is None:
                continue
            first = session.failure()
            if getattr(first, "code", "") == "RANK_LOST" and first.rank != self.rank and first.pid:
                self.lost = first
            session.announce_end(cause, seconds)  # Of one that has ended already nothing happens.

    def close(self):
        # A child forked from this process must send no goodbye in its parent's name.
        if self.pid == os.getpid():
            if self.reconfigurable is not None:
                self.reconfigurable.shutdown()
            self.session.close()
            note_leave()


def is_last_thread():
    """Python goes on as long as another thread that is no daemon does."""
    main = threading.main_thread()
    return all(thread is main or thread.daemon for thread in threading.enumerate())


def _main_thread_ends():
    _ending.ending.decide()
    if is_last_thread():
        registry.tell_end()
        _native.load().exit_begins()


class Registry:
    """The open worlds of this process. Used by the threads that call init and destroy."""

    def __init__(self):
        self._worlds = []
        self._began = False  # This process has had one.
        self._on_begin = None
        self._on_end = None

    def add(self, world):
        self._worlds.append(world)
        _ending.ending.watch()
        if not self._began:
            self._began = True
            # Where the main thread has returned before, the exit handlers do all of it.
            with contextlib.suppress(RuntimeError):
                _before_exit_handlers(_main_thread_ends)
            _ending.watch_task()
        _autoload.close_worlds_at_exit()
        if self._on_begin is not None and world.reconfigurable is None:
            self._on_begin(world)

    def worlds(self):
        """Those that this process began, not its parent."""
        return [world for world in self._worlds if world.pid == os.getpid()]

    def tell(self, on_begin, on_end):
        """on_begin(world) is called for each world from now on whose members are not the program's
        choice, and on_end() at the end of the process, when all worlds are closed."""
        self._on_begin, self._on_end = on_begin, on_end
        if on_end is not None:
            _autoload.close_worlds_at_exit()

    def have_store_at(self, host, port):
        """Whether the store of one of them listens there, as the address was given."""
        given = _address_key(host, port)
        return any(
            _address_key(*_server.split_host_port(address)) == given
            for world in self.worlds()
            for address in world.addresses
        )

    def of(self, process_group):
        for world in self._worlds:
            if world.process_group is process_group:
                return world
        return None

    def current(self):
        """The world of torch's default group; else the newest one; None without any."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        default = c10d._world.default_pg if c10d is not None else None
        world = self.of(default) if default is not None else None
        if world is None and default is None and self._worlds:
            world = self._worlds[-1]
        return world

    def remove(self, world):
        if world in self._worlds:
            self._worlds.remove(world)
        if not self._worlds and owner_text() == os.environ.get(OWNER_VARIABLE):
            del os.environ[OWNER_VARIABLE]

    def tell_end(self):
        """What ends this process, if that is known, and no other thread keeps it going."""
        if not is_last_thread():
            return
        if self._began and _ending.ending.cause is not None:
            _native.load().exit_begins()  # Before the fence of its own end comes.
        _ending.ending.tell(self.worlds(), _seat_file, _commit)

    def end_now(self):
        """The process ends at once, and Python runs no more of it."""
        if _ending.ending.cause is not None:
            return _ending.ending.tell(self.worlds(), _seat_file, _commit)
        for world in self.worlds():
            world.close()

    def close_all(self):
        """At the end of the process."""
        if self._began:
            _ending.ending.decide()
            self.tell_end()
            _native.load().exit_begins()
        lost = [world.lost for world in self.worlds() if world.lost is not None]
        for world in list(self._worlds):
            self.remove(world)
            world.close()
        if self._on_end is not None:
            self._on_end()
        if self._began:
            _native.load().await_abort_hooks(_hooks_end_seconds())
        _ending.await_end_of(lost, lambda pid: start_time(pid) is not None)


def _hooks_end_seconds():
    """How long abort hooks may go on in the end of the process. A thread that takes the GIL when
    the interpreter has gone ends, inside torch's recorder with the whole process: it does so where
    the program wants call stacks in the trace."""
    wanted = os.environ.get(STACKS_VARIABLE, "").lower() in ("y", "yes", "1", "t", "true")
    return _STACKS_SECONDS if wanted else _HOOKS_SECONDS


def _address_key(host, port):
    host = host.strip().lower()
    return "localhost" if host in _LOOPBACK else host, port


registry = Registry()


def close(process_group):
    """Ends the session behind a destroyed world, if it was ours."""
    world = registry.of(process_group)
    if world is not None:
        registry.remove(world)
        world.process_group = None
        world.close()
        world.handed_in = None


def tell_of_seat(world_size):
    """By this resilient-run knows who is no spare any more, and of how many seats the world is. To
    be called when a seat was taken, and when its world was resized."""
    global _seat_file
    _seat_file = os.environ.pop("RESILIENT_SEATED", _seat_file)
    if _seat_file:
        with contextlib.suppress(OSError), open(_seat_file, "w") as file:  # Else: it has ended.
            file.write(str(world_size))
        with contextlib.suppress(OSError):
            os.unlink(_seat_file + LEFT)  # Of a world before this one.


def note_commit(number):
    """For the launcher: what the job has to lose, and whether it comes any further."""
    global _commit
    first = _commit == 0
    _commit = number
    if first and _seat_file:
        with contextlib.suppress(OSError), open(_seat_file + COMMITTED, "w"):
            pass


def note_leave():
    """For the launcher: the store knows the end of this process."""
    if _seat_file:
        with contextlib.suppress(OSError), open(_seat_file + LEFT, "w"):
            pass


def start_time(pid):
    """Start time of a process in clock ticks since boot; None when no such process is alive."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            # The name in parentheses may contain anything, also spaces and parentheses.
            fields = stat.read().rpartition(")")[2].split()
            return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def owner_text():
    return f"{os.getpid()}:{start_time(os.getpid())}"


def claim_ownership():
    """Marks the processes that we start from now on as helpers of this rank."""
    os.environ[OWNER_VARIABLE] = owner_text()


def is_helper(environment):
    """True in a process started by a living rank: a data loader, a checkpoint writer."""
    pid, _, start = environment.get(OWNER_VARIABLE, "").partition(":")
    if not pid.isdigit() or not start.isdigit() or int(pid) == os.getpid():
        return False
    return start_time(int(pid)) == int(start)
