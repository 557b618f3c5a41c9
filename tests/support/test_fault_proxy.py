"""The proxy between an echo server and plain sockets."""

import socket
import threading
import time

import pytest
from fault_proxy import FaultProxy

BOUND_SECONDS = 10


@pytest.fixture
def echo():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(BOUND_SECONDS)


@pytest.fixture
def proxy(echo):
    with FaultProxy(echo) as proxy:
        yield proxy


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), BOUND_SECONDS)


def receive(sock, count):
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the connection ended"
        data += piece
    return data


def test_forwards_much_and_the_end(proxy):
    blob = bytes(range(256)) * 8192
    with connect(proxy) as sock:
        sender = threading.Thread(target=sock.sendall, args=(blob,))
        sender.start()
        assert receive(sock, len(blob)) == blob
        sender.join(BOUND_SECONDS)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_cut_resets(proxy):
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with connect(proxy) as sock:
        sock.sendall(b"y")
        assert receive(sock, 1) == b"y"


def test_stall_delays_and_loses_nothing(proxy):
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        proxy.stall()
        sock.sendall(b"later")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        proxy.resume()
        sock.settimeout(BOUND_SECONDS)
        assert receive(sock, 5) == b"later"


def test_half_open_is_silent(proxy):
    with connect(proxy) as sock:
        sock.sendall(b"x")
        assert receive(sock, 1) == b"x"
        assert proxy.half_open() == 1
        sock.sendall(b"lost")
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)


def test_refuse(proxy):
    proxy.refuse()
    with pytest.raises(ConnectionResetError), connect(proxy) as sock:
        sock.sendall(b"x")
        sock.recv(1)


def test_slow(proxy):
    proxy.slow(20_000)
    with connect(proxy) as sock:
        started = time.monotonic()
        sock.sendall(b"x" * 4000)
        receive(sock, 4000)
        assert time.monotonic() - started > 0.1
