"""What ends this process: the other ranks and the launcher hear it on the way out.

A rank that ends by an exception nobody caught, or by sys.exit(n), is lost, and only it knows why.
Python tells a program of the first (sys.excepthook, sys.last_value), and of the second nothing:
SystemExit reaches no hook, and exit handlers are not given the code. So the last sys.exit, and the
last SystemExit that was made, are remembered. They count when the outermost frame of the main
thread has ended without a return. os._exit runs no exit handler, so it is wrapped: with code 0 the
rank leaves, with another one it says so. A child of multiprocessing ends in the same way.
"""

import contextlib
import dis
import json
import os
import socket
import sys
import sysconfig
import threading
import time

_ANNOUNCE_SECONDS = 1.0  # A store that is gone must not hold up the end.
_ROOT_SECONDS = 0.5  # The most that a victim waits for the end of the rank that it lost.
_LAUNCHER_POLL_SECONDS = 0.2  # torchrun looks for ends every 0.1 s, others as often.
_LOOK_SECONDS = 0.01
_TEXT_MAX = 400
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


def describe(error):
    """As "RuntimeError: CUDA out of memory (train.py:41)": with the line of the program, if any."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # An exception's own __str__.
        lines = []
    text = f"{name}: {lines[0]}" if lines else name
    if len(text) > _TEXT_MAX:
        text = text[: _TEXT_MAX - 3] + "..."
    place = _place(error.__traceback__)
    return f"{text} ({place})" if place else text


def _place(trace):
    """The innermost line of the program, else the innermost line."""
    own, last = None, None
    while trace is not None:
        last = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if _is_of_program(last[0]):
            own = last
        trace = trace.tb_next
    place = own or last
    return place and f"{os.path.basename(place[0])}:{place[1]}"


def _is_of_program(file):
    return not file.startswith(_LIBRARIES)


_LIBRARIES = (
    "<frozen",
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")},
)


def _outermost(frame):
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


class _Ending:
    """What is known so far of the end of this process. Used by the main thread, and by others that
    raise."""

    def __init__(self):
        self.cause = None  # What ends this process; None: nothing but its own will.
        self._pid = None  # Of the process that watches; a child forked from it does not.
        self._main = None  # The outermost frame of the main thread.
        self._exit = None  # The text of the last SystemExit; None: of a clean end.
        self._status = None  # Its code.
        self._seen = ""  # An exception that has passed `elastic`, or has ended a thread.
        self._told = False

    def watch(self):
        """From the first world of this process on."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._main = _outermost(sys._current_frames().get(threading.main_thread().ident))
        install_hooks()
        from torch_resilient import _native  # Which imports torch: not at import of this.

        _native.load().watch_system_exit(_on_system_exit)

    def note(self, error):
        """An exception on its way out, which the program may still catch."""
        self._seen = describe(error)

    def on_uncaught(self, error, trace):
        if self._ends_process(trace):
            self.cause = describe(error)

    def on_exit(self, status, what, frame):
        if threading.current_thread() is threading.main_thread():
            self._status = status
            self._exit = _text_of_exit(status, what, frame, self._seen)

    def on_system_exit(self, error, frame):
        # Python makes the exception of sys.exit when somebody looks at it first.
        if self._exit is None or error.code is not self._status:
            self.on_exit(error.code, "SystemExit", frame)

    def on_os_exit(self, status, frame):
        """The last that Python runs in this process."""
        if self._pid != os.getpid():
            return
        from torch_resilient import _worlds

        if self.cause is None:
            self.cause = _text_of_exit(status, "os._exit", frame, self._seen)
        # On a thread of its own: this one may have been stopped anywhere, also by a signal.
        saying = threading.Thread(target=_worlds.registry.end_now, daemon=True)
        saying.start()
        saying.join(_ANNOUNCE_SECONDS)

    def on_end_of_task(self, error):
        """Of a child of multiprocessing, which catches what its function raises."""
        if error is not None and not isinstance(error, SystemExit) and self._pid == os.getpid():
            self.cause = describe(error)

    def decide(self):
        """At the end of the main thread."""
        if self.cause is not None or self._pid != os.getpid() or self._has_returned():
            return
        last = getattr(sys, "last_value", None)
        trace = getattr(last, "__traceback__", None)
        if trace is not None and trace.tb_frame is self._main:
            self.cause = describe(last)  # The hook was replaced.
        else:
            self.cause = self._exit

    def tell(self, worlds, seat_file, commit):
        """Announces the end of all `worlds`, once; nothing when there is no cause."""
        if self.cause is None or self._told or self._pid != os.getpid():
            return
        self._told = True
        if seat_file:
            with contextlib.suppress(OSError), open(seat_file + ENDED, "w") as file:
                json.dump({"cause": self.cause, "commit": commit}, file)
        for world in worlds:
            with contextlib.suppress(Exception):
                world.announce_end(self.cause, _ANNOUNCE_SECONDS)

    def _has_returned(self):
        """Whether the main thread's outermost frame is done, and not by an exception."""
        frame = self._main
        if frame is None or frame.f_lasti < 0:
            return False
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS

    def _ends_process(self, trace):
        """Not where the program shows an exception by the hook, and goes on; nor at a prompt."""
        if sys.flags.interactive or hasattr(sys, "ps1") or os.environ.get("PYTHONINSPECT"):
            return False
        if trace is None or threading.current_thread() is not threading.main_thread():
            return False
        frame = sys._getframe()
        while frame is not None:
            if frame is trace.tb_frame:
                return False
            frame = frame.f_back
        return self._pid == os.getpid()


def await_end_of(lost, is_alive):
    """Lets the processes of these RankLostErrors end before this one, which ends because of them:
    torchrun, mp.spawn and others show the process that ended first as the root cause, and a rank
    that fails is gone some 0.1 s after it has said so. is_alive(pid): of a process of this host."""
    deadline = time.monotonic() + _ROOT_SECONDS
    own_host = socket.gethostname()
    waited = False
    for error in lost:
        # Of a process of another host only the time is known here.
        while error.host != own_host or is_alive(error.pid):
            if time.monotonic() >= deadline:
                return
            waited = True
            time.sleep(_LOOK_SECONDS)
    if waited:
        time.sleep(_LAUNCHER_POLL_SECONDS)


def _text_of_exit(status, what, frame, seen):
    """None for a clean end."""
    if status is None or (isinstance(status, int) and status & 0xFF == 0):
        return None
    text = f"{what}({status if isinstance(status, int) else repr(status)[:_TEXT_MAX]})"
    while frame is not None and not _is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        text += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
    handled = sys.exc_info()[1]
    cause = describe(handled) if handled is not None else seen
    return f"{cause}, then {text}" if cause else text


ENDED = (
    ".ended"  # What follows the name of RESILIENT_SEATED's file in the one that tells the cause.
)
ending = _Ending()
_before = {}  # The hooks that ours call.


def install_hooks():
    """Once a process; in a forked child they are there already."""
    if _before:
        return
    _before.update(uncaught=sys.excepthook, in_thread=threading.excepthook, exit=sys.exit)
    sys.excepthook, threading.excepthook, sys.exit = _on_uncaught, _on_uncaught_in_thread, _on_exit
    _before["os_exit"], os._exit = os._exit, _on_os_exit


def _on_uncaught(kind, error, trace):
    from torch_resilient import _worlds

    with contextlib.suppress(Exception):
        ending.on_uncaught(error, trace)
        _worlds.registry.tell_end()
    _before["uncaught"](kind, error, trace)


def _on_uncaught_in_thread(args):
    with contextlib.suppress(Exception):
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            ending.note(args.exc_value)
    _before["in_thread"](args)


def _on_exit(status=None, /):
    with contextlib.suppress(Exception):
        ending.on_exit(status, "sys.exit", sys._getframe(1))
    _before["exit"](status)


def _on_os_exit(status):
    with contextlib.suppress(Exception):
        ending.on_os_exit(status, sys._getframe(1))
    _before["os_exit"](status)


def watch_task():
    """In a child of multiprocessing: what its function has raised is told, too."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, lambda: ending.on_end_of_task(sys.exc_info()[1]), exitpriority=1)


def _on_system_exit(error):
    ending.on_system_exit(error, sys._getframe(1))


def _forget():
    """In a forked child: nothing of this is its own."""
    global ending
    ending = _Ending()


os.register_at_fork(after_in_child=_forget)
