"""Addresses of names, waited for no longer than the caller means to. Needs no torch.

The system's resolver may hang for as long as a name server is silent, and Python delivers no
Ctrl-C before it has returned; so it is called on a thread of its own. One call for a name is under
way at a time. A thread that hangs is a daemon: it keeps no process.
"""

import os
import socket
import threading
import time

PATIENCE_SECONDS = 60.0  # Where nobody has said how long he waits.


class NoAnswerError(OSError):
    """The resolver has not answered in time."""


class _Lookup:
    def __init__(self, host):
        self.host = host
        self.since = time.monotonic()
        self.done = threading.Event()
        self.addresses, self.error = (), None
        threading.Thread(target=self._run, name="res-names", daemon=True).start()

    def _run(self):
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
            self.addresses = tuple(dict.fromkeys(_text(address) for *_, address in found))
        except OSError as error:
            self.error = error
        except UnicodeError as error:  # No name that DNS could have.
            self.error = socket.gaierror(socket.EAI_NONAME, str(error))
        self.done.set()


def _text(address):
    """With the interface of an IPv6 address that holds on one link only."""
    host, _, *more = address
    return f"{host}%{more[1]}" if more and more[1] and "%" not in host else host


_lock = threading.Lock()
_lookups = {}


def _forget():
    """In a forked child, where the threads are not, nor perhaps who held the lock."""
    global _lock
    _lock = threading.Lock()
    _lookups.clear()


os.register_at_fork(after_in_child=_forget)


def is_number(host):
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def addresses(host, deadline=None):
    """The numeric addresses of a name, in the resolver's order; a number is its own.

    deadline: of time.monotonic(). Raises socket.gaierror when it has none, NoAnswerError when that
    is not known in time.
    """
    if is_number(host):
        return (host,)
    if deadline is None:
        deadline = time.monotonic() + PATIENCE_SECONDS
    with _lock:
        lookup = _lookups.get(host)
        if lookup is None or lookup.done.is_set():
            lookup = _lookups[host] = _Lookup(host)
    if not lookup.done.wait(min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)):
        raise NoAnswerError(
            f"the name {host!r} is not resolved: the resolver of this host has not answered for"
            f" {time.monotonic() - lookup.since:.1f} s; look at its name servers"
            " (/etc/resolv.conf, /etc/nsswitch.conf) and whether they can be reached, or give the"
            " address as a number"
        )
    if lookup.error is not None:
        raise lookup.error
    return lookup.addresses


def own_towards(number):
    """The numeric address of this host on the way to another one; sends nothing. OSError: none."""
    # The port counts for nothing: connecting a datagram socket only picks a route.
    (family, kind, *_, address), *_ = socket.getaddrinfo(
        number, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )
    with socket.socket(family, kind) as datagram:
        datagram.connect(address)
        return datagram.getsockname()[0]
