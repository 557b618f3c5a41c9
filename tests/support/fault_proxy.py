"""A TCP proxy that cuts, stalls, half-opens and slows down what goes through it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time

CHUNK = 64 * 1024
BUFFER_MAX = 1 << 20
JOIN_SECONDS = 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST.


class _Side:
    """One socket of a link, and what is still to be written to it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.sock.setblocking(False)
        self.out = bytearray()
        self.ended = False  # It will send no more.
        self.peer: _Side | None = None
        self.link: _Link | None = None
        self.ready_at = 0.0  # Slow: not read before.


class _Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket):
        self.sides = (_Side(client), _Side(server))
        self.sides[0].peer, self.sides[1].peer = self.sides[1], self.sides[0]
        for side in self.sides:
            side.link = self
        self.dark = False  # Half-open: nothing passes any more, and nobody is told.


class FaultProxy:
    """Listens on 127.0.0.1 and forwards to `target` (host, port). It has a thread of its own; the
    methods may be called from any thread."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.accepted = 0
        self._passed = 0
        self._links: set[_Link] = set()
        self._stalled = False
        self._refusing = False
        self._bytes_per_second = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- Faults ----

    def cut(self) -> int:
        """Resets every connection on both sides. Returns how many."""
        with self._change():
            links = list(self._links)
            for link in links:
                self._drop(link, reset=True)
            return len(links)

    def half_open(self) -> int:
        """The server's side of every connection is closed; the client hears nothing of it, ever."""
        with self._change():
            for link in self._links:
                link.dark = True
                _close(link.sides[1].sock, self._selector)
            return len(self._links)

    def stall(self) -> None:
        """Nothing passes in either direction, connections are kept, new ones wait."""
        with self._change():
            self._stalled = True

    def resume(self) -> None:
        with self._change():
            self._stalled = False

    def slow(self, bytes_per_second: int) -> None:
        """0: as fast as it goes."""
        with self._change():
            self._bytes_per_second = bytes_per_second

    def refuse(self, refusing: bool = True) -> None:
        """New connections are reset at once."""
        with self._change():
            self._refusing = refusing

    def await_accepted(self, count: int, seconds: float) -> bool:
        """Until so many connections have come in all, refused ones too."""
        with self._changed:
            return self._changed.wait_for(lambda: self.accepted >= count, seconds)

    def passed(self) -> int:
        """Bytes that clients have sent and the server's sockets have taken, ever."""
        with self._lock:
            return self._passed

    def await_passed(self, more_than: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._passed > more_than, seconds)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._links)

    def close(self) -> None:
        with self._change():
            self._closing = True
        self._thread.join(JOIN_SECONDS)
        assert not self._thread.is_alive(), "the proxy's thread did not end"
        self._wake.close()

    @contextlib.contextmanager
    def _change(self):
        with self._lock:
            yield
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # ---- The thread ----

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    for link in list(self._links):
                        self._drop(link, reset=True)
                    break
                timeout = self._register()
            events = self._selector.select(timeout)
            with self._lock:
                for key, mask in events:
                    self._handle(key, mask)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _register(self) -> float | None:
        """Says what is waited for, and returns until when at most."""
        now = time.monotonic()
        timeout = None
        interest = {self._woken: (selectors.EVENT_READ, None)}
        if not self._stalled:
            interest[self._listener] = (selectors.EVENT_READ, None)
        for link in self._links:
            for side in link.sides:
                mask = 0
                if not (self._stalled or link.dark):
                    held = side.ready_at - now if self._bytes_per_second else 0
                    if held > 0:
                        timeout = min(timeout or held, held)
                    elif not side.ended and len(side.peer.out) < BUFFER_MAX:
                        mask |= selectors.EVENT_READ
                    if side.out:
                        mask |= selectors.EVENT_WRITE
                if mask:
                    interest[side.sock] = (mask, side)
        registered = {key.fileobj: key for key in list(self._selector.get_map().values())}
        for sock in registered.keys() - interest.keys():
            self._selector.unregister(sock)
        for sock, (mask, side) in interest.items():
            if sock not in registered:
                self._selector.register(sock, mask, side)
            elif registered[sock].events != mask:
                self._selector.modify(sock, mask, side)
        return timeout

    def _handle(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(OSError):
                self._woken.recv(CHUNK)
        elif key.fileobj is self._listener:
            self._accept()
        elif key.data.link in self._links and not self._stalled and not key.data.link.dark:
            side = key.data
            if mask & selectors.EVENT_READ:
                self._read(side)
            if mask & selectors.EVENT_WRITE and side.link in self._links:
                self._write(side)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        self.accepted += 1
        self._changed.notify_all()
        if self._refusing:
            _reset(client)
            return
        try:
            server = socket.create_connection(self._target, JOIN_SECONDS)
        except OSError:
            _reset(client)
            return
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.add(_Link(client, server))

    def _read(self, side: _Side) -> None:
        limit = self._bytes_per_second
        try:
            data = side.sock.recv(max(limit // 50, 1) if limit else CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(side.link, reset=True)
            return
        if limit:
            side.ready_at = time.monotonic() + len(data) / limit
        if data:
            side.peer.out += data
            self._write(side.peer)
        else:
            side.ended = True
            self._settle(side.peer)

    def _write(self, side: _Side) -> None:
        try:
            while side.out:
                sent = side.sock.send(side.out)
                del side.out[:sent]
                if side is side.link.sides[1]:
                    self._passed += sent
                    self._changed.notify_all()
        except BlockingIOError:
            return
        except OSError:
            self._drop(side.link, reset=True)
            return
        self._settle(side)

    def _settle(self, side: _Side) -> None:
        """Passes the end of what the other one sent on, once everything before it is written."""
        if not side.peer.ended or side.out:
            return
        with contextlib.suppress(OSError):
            side.sock.shutdown(socket.SHUT_WR)
        if side.ended and not side.peer.out:
            self._drop(side.link, reset=False)

    def _drop(self, link: _Link, reset: bool) -> None:
        for side in link.sides:
            if reset and side.sock.fileno() >= 0:
                side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            _close(side.sock, self._selector)
        self._links.discard(link)


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def _close(sock: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(KeyError, ValueError):
        selector.unregister(sock)
    sock.close()
