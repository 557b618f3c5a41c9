"""A TCP proxy in front of a store that cuts connections, so that tests see what is lost by it."""

import contextlib
import selectors
import socket
import threading


class CuttingProxy:
    """Forwards to `upstream`. After each `cut_every` bytes of answers (0: never) it drops what came
    last and resets both sides: some requests took effect and were never answered."""

    def __init__(self, upstream, cut_every=0):
        host, port = upstream.rsplit(":", 1)
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._told)
        self._peers = {}  # Of each socket the other one; confined to the thread, as all below.
        self._answered = {}  # Of each connection to the store the bytes that came from it.
        self._ended = False
        self.cut_every = cut_every
        self.cuts = 0
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def cut(self):
        """Cuts what is connected now."""
        self._waker.send(b"c")

    def close(self):
        self._waker.send(b"e")
        self._thread.join(10)
        assert not self._thread.is_alive(), "the proxy does not end"

    def _run(self):
        while not self._ended:
            for key, _ in self._selector.select():
                if key.fd >= 0 and key.fileobj.fileno() >= 0:
                    key.data(key.fileobj)
        self._cut_all()
        for each in (self._listener, self._wake, self._waker):
            each.close()
        self._selector.close()

    def _told(self, wake):
        for command in wake.recv(64):
            self._cut_all()
            self._ended = self._ended or command == ord("e")

    def _accept(self, listener):
        client, _ = listener.accept()
        try:
            server = socket.create_connection(self._upstream, 5)
        except OSError:
            client.close()
            return
        self._peers[client], self._peers[server] = server, client
        self._answered[server] = 0
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(each, selectors.EVENT_READ, self._forward)

    def _forward(self, source):
        try:
            data = source.recv(65536)
            if source in self._answered:
                self._answered[source] += len(data)
                if self.cut_every and self._answered[source] >= self.cut_every:
                    data = b""
            if data:
                self._peers[source].sendall(data)
                return
        except OSError:
            pass
        self._cut(source)

    def _cut(self, source):
        for each in (source, self._peers[source]):
            # Zero linger: a reset, as of a peer that is gone.
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self._selector.unregister(each)
            del self._peers[each]
            self._answered.pop(each, None)
            each.close()
        self.cuts += 1

    def _cut_all(self):
        while self._peers:
            self._cut(next(iter(self._peers)))
