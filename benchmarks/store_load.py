"""Many clients of a store in one process, by raw sockets, so that the server is what is measured.

Both stores get the same treatment: the bytes of all requests are made before the clock starts, and
answers are counted, not decoded.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from protocol_client import HEADER, INCARNATION, PREAMBLE, REQUEST, messages, new_id

SECONDS = 1200  # Of the longest wait: 10,000 clients ask TCPStore for 10,000 keys each.
CHUNK = 256 * 1024
VALUE = b"0123456789abcdef"
_MAGIC = 0x3C85F7CE
_IP_BIND_ADDRESS_NO_PORT = 24  # The port is chosen by connect(), for this destination alone.


def text(key: bytes) -> bytes:
    return struct.pack("=Q", len(key)) + key


class TcpProtocol:
    """Requests of TCPStore, and how many bytes answer them."""

    def greeting(self, _job, _control=False):
        return b"\0" + struct.pack("=I", _MAGIC)

    def welcome(self):
        return Count(0)

    def set(self, _seq, key, value):
        return b"\1" + text(b"/" + key) + text(value)

    def get(self, _seq, key):
        return b"\3" + text(b"/" + key)

    def value(self, size):
        return Count(8 + size)

    def wait(self, _seq, key):
        return b"\6" + struct.pack("=Q", 1) + text(b"/" + key)

    def released(self):
        return Count(1)

    def set_answers(self, _count):
        return Count(0)

    def set_and_value(self, size):
        return Count(8 + size)


class OurProtocol:
    """Requests of the resilient store, and how many frames answer them."""

    def frame(self, seq, **op):
        request = messages().Request(first_unacked=seq)
        for name, fields in op.items():
            part = getattr(request, name)
            part.SetInParent()
            part.MergeFrom(type(part)(**fields))
        body = request.SerializeToString()
        return HEADER.pack(len(body), REQUEST, 0, 0, seq) + body

    def greeting(self, job, control=False, session=None):
        role = "ROLE_CONTROL" if control else "ROLE_REQUEST"
        hello = {"job": job, "session": session or new_id(), "incarnation": INCARNATION}
        hello["process"] = messages().ProcessIdentity(host="bench", pid=os.getpid())
        hello["role"] = messages().Role.Value(role)
        return PREAMBLE.pack(b"RSL1", 1, 1) + self.frame(0, hello=hello)

    def welcome(self):
        return Frames(1, preamble=True)

    def set(self, seq, key, value):
        return self.frame(seq, set={"key": key, "value": value})

    def get(self, seq, key):
        return self.frame(seq, get={"key": key, "wait": True})

    def value(self, _size):
        return Frames(1)

    def wait(self, seq, key):
        return self.frame(seq, wait={"keys": [key]})

    def released(self):
        return Frames(1)

    def set_answers(self, count):
        return Frames(count)

    def set_and_value(self, _size):
        return Frames(2)


class Count:
    """Met when so many bytes have come."""

    def __init__(self, size):
        self._left = size

    def feed(self, data):
        self._left -= len(data)

    @property
    def met(self):
        return self._left <= 0


class Frames:
    """Met when so many frames have come; an event (type 3) of a heartbeat or ping counts not."""

    def __init__(self, count, preamble=False):
        self._left = count
        self._skip = PREAMBLE.size if preamble else 0
        self._head = b""

    def feed(self, data):
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                if self._skip == 0 and len(self._head) == HEADER.size:
                    self._head = b""
                    self._left -= 1
                continue
            step = HEADER.size - len(self._head)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == HEADER.size:
                self._skip = HEADER.unpack(self._head)[0]
                if self._skip == 0:
                    self._head = b""
                    self._left -= 1

    @property
    def met(self):
        return self._left <= 0


def _connect(address, source):
    sock = socket.socket()
    sock.settimeout(SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source:
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((source, 0))
    sock.connect(address)
    return sock


class Crowd:
    """Clients that do the same at the same time."""

    def __init__(
        self, protocol, address, count, job="bench", control=False, sessions=None, source=None
    ):
        self.protocol = protocol
        sessions = sessions or [None] * count
        greetings = []
        for session in sessions:
            ours = {"session": session} if session else {}
            greetings.append(protocol.greeting(job, control, **ours))
        began = time.perf_counter()
        self.sockets = []
        self._by_fd = {}
        self._poll = select.epoll()
        for greeting in greetings:
            sock = _connect(address, source)
            sock.sendall(greeting)
            self._by_fd[sock.fileno()] = len(self.sockets)
            self.sockets.append(sock)
            self._poll.register(sock.fileno(), select.EPOLLIN)
        self.gather([protocol.welcome() for _ in greetings])
        self.connected_s = time.perf_counter() - began

    def send(self, requests):
        for sock, request in zip(self.sockets, requests, strict=True):
            sock.sendall(request)

    def gather(self, goals):
        """Until all goals are met. What comes behind a goal's bytes in one read is lost."""
        waiting = sum(not goal.met for goal in goals)
        deadline = time.monotonic() + SECONDS
        while waiting:
            ready = self._poll.poll(max(deadline - time.monotonic(), 0), 4096)
            assert ready, f"{waiting} of {len(goals)} clients had no answer within {SECONDS} s"
            for fd, _ in ready:
                index = self._by_fd[fd]
                data = self.sockets[index].recv(CHUNK)
                assert data, "the server closed a connection"
                if not goals[index].met:
                    goals[index].feed(data)
                    waiting -= goals[index].met

    def close(self):
        self._poll.close()
        for sock in self.sockets:
            sock.close()


def release(protocol, address, count):
    """Seconds from a set until all clients that waited for its key know."""
    key = new_id().encode()
    crowd = Crowd(protocol, address, count)
    setter = Crowd(protocol, address, 1)
    crowd.send([protocol.wait(1, key)] * count)
    # A wait is not answered: a request on another connection, sent after it, has to be.
    for seq in (1, 3):
        setter.send([protocol.set(seq, b"before", b"x") + protocol.get(seq + 1, b"before")])
        setter.gather([protocol.set_and_value(1)])
    request = protocol.set(9, key, b"x")
    goals = [protocol.released() for _ in range(count)]
    began = time.perf_counter()
    setter.send([request])
    crowd.gather(goals)
    took = time.perf_counter() - began
    crowd.close()
    setter.close()
    return took


def pipelined_set(protocol, address, count, window=64):
    """Seconds a set, `window` of them sent at once. TCPStore does not answer: a get ends them."""
    crowd = Crowd(protocol, address, 1)
    groups = []
    seq = 1
    for _ in range(count // window):
        requests = [protocol.set(seq + i, b"k%d" % i, VALUE) for i in range(window)]
        groups.append(b"".join(requests))
        seq += window
    last = protocol.get(seq, b"k0")
    began = time.perf_counter()
    for group in groups:
        crowd.send([group])
        crowd.gather([protocol.set_answers(window)])
    crowd.send([last])
    crowd.gather([protocol.value(len(VALUE))])
    took = time.perf_counter() - began
    crowd.close()
    return took / (len(groups) * window)


def storm_tcp(address, count):
    """Connect, say that one is there, learn of all others what they have to say."""
    protocol = TcpProtocol()
    keys = [b"/rank/%d" % rank for rank in range(count)]
    joins = [b"\1" + text(key) + text(VALUE) + _add(b"/joined") for key in keys]
    wait = b"\6" + struct.pack("=Q", 1) + text(b"/all")
    asks = b"\x0a" + struct.pack("=Q", count) + b"".join(text(key) for key in keys)
    began = time.perf_counter()
    crowd = Crowd(protocol, address, count)
    crowd.send(joins)
    crowd.gather([Count(8) for _ in joins])
    crowd.send([wait] * (count - 1) + [b"\1" + text(b"/all") + text(b"1") + wait])
    crowd.gather([Count(1) for _ in joins])
    connected = time.perf_counter()
    _in_slices(crowd, [asks] * count, lambda: Count(count * (8 + len(VALUE))))
    took = time.perf_counter() - began
    crowd.close()
    return {"total_s": took, "exchange_s": time.perf_counter() - connected}


def _in_slices(crowd, requests, goal):
    """A large request blocks its sender until the server reads: each is sent, then all gather."""
    crowd.send(requests)
    crowd.gather([goal() for _ in requests])


def _add(key):
    return b"\4" + text(key) + struct.pack("=q", 1)


def storm_ours(address, count, job):
    """Connect twice (membership and keys), join, view, ready, running, exchange."""
    protocol = OurProtocol()
    sessions = [new_id() for _ in range(count)]
    joins = []
    for rank in range(count):
        join = {"rank": rank, "world_size": count, "endpoint": b"10.0.0.1:1234"}
        joins.append(protocol.frame(1, join={**join, "join_timeout_ms": SECONDS * 1000}))
    exchanges = [
        protocol.frame(1, exchange={"key": b"e", "rank": rank, "size": count, "value": VALUE})
        for rank in range(count)
    ]
    began = time.perf_counter()
    # Beyond 14,000 connections from one address to one port connect() looks through all ports, for
    # 1 ms and more; real clients have an address for each host.
    control = Crowd(protocol, address, count, job, True, sessions, "127.0.0.2")
    control.send(joins)
    control.gather([Frames(2) for _ in joins])  # The reply, and the view.
    joined = time.perf_counter()
    crowd = Crowd(protocol, address, count, job, False, sessions)
    connected = time.perf_counter()
    crowd.send(exchanges)
    crowd.gather([Frames(1) for _ in joins])
    took = time.perf_counter() - began
    result = {
        "total_s": took,
        "join_s": joined - began,
        "exchange_s": time.perf_counter() - connected,
    }
    control.close()
    crowd.close()
    return result
