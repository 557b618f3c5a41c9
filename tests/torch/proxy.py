"""Stands between ranks and the store, and resets connections, as a firewall that restarts does."""

import contextlib
import selectors
import socket
import struct
import threading

BOUND = 30.0


class Proxy:
    """Carries bytes to `upstream` ("host:port") in a thread of its own. Owner: the test."""

    def __init__(self, upstream):
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._peers = {}  # By socket.
        self._orders = []
        self._done = threading.Semaphore(0)
        self._asleep, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="test-proxy")
        self._thread.start()

    def cut(self):
        """Resets every connection; new ones are reset, too, until `mend`."""
        self._order("cut")

    def mend(self):
        self._order("mend")

    def close(self):
        self._order("close")
        self._thread.join(BOUND)

    def _order(self, order):
        self._orders.append(order)
        self._waker.send(b"!")
        assert self._done.acquire(timeout=BOUND)

    def _run(self):
        refuses = False
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            for one in (self._listener, self._asleep):
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._asleep:
                        self._asleep.recv(1)
                        order = self._orders.pop(0)
                        refuses = order == "cut"
                        if order != "mend":
                            self._reset_all()
                        self._done.release()
                        if order == "close":
                            return self._end()
                    elif key.fileobj is self._listener:
                        self._accept(refuses)
                    elif key.fileobj in self._peers:
                        self._forward(key.fileobj)

    def _accept(self, refuses):
        client, _ = self._listener.accept()
        if refuses:
            return self._reset(client)
        server = socket.create_connection(self._upstream, timeout=BOUND)
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, one):
        with contextlib.suppress(OSError):
            if received := one.recv(1 << 16):
                return self._peers[one].sendall(received)
        for end in (one, self._peers[one]):
            del self._peers[end]
            self._selector.unregister(end)
            end.close()

    def _reset_all(self):
        for one in list(self._peers):
            del self._peers[one]
            self._selector.unregister(one)
            self._reset(one)

    @staticmethod
    def _reset(one):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()

    def _end(self):
        for one in (self._listener, self._asleep, self._waker):
            one.close()
