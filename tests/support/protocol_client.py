"""A client of the store written from docs/protocol.md and store/proto/store.proto alone.

It shares no code with the real one: what it can do, the document says well enough. Blocking, for
one thread; every wait has a bound.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time

SECONDS = 20
PREAMBLE = struct.Struct("<4sHH")
HEADER = struct.Struct("<IBBHQ")
REQUEST, REPLY, EVENT = 1, 2, 3
VERSION = 1
_PROTO = pathlib.Path(__file__).parents[2] / "store" / "proto" / "store.proto"


@functools.cache
def messages():
    """The module that protoc makes of store.proto."""
    folder = tempfile.mkdtemp(prefix="resilient-proto-")
    try:
        command = ["protoc", f"--proto_path={_PROTO.parent}", f"--python_out={folder}", _PROTO.name]
        subprocess.run(command, check=True, timeout=SECONDS)
        spec = importlib.util.spec_from_file_location("store_pb2", f"{folder}/store_pb2.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        shutil.rmtree(folder)


def new_id():
    """32 hex digits: of a session, of a process."""
    return os.urandom(16).hex()


INCARNATION = new_id()  # Of this process.


class Refused(Exception):
    """The server answered a Hello with a failure."""

    def __init__(self, failure):
        super().__init__(f"{failure.code}: {failure.message}")
        self.code = failure.code


class Closed(Exception):
    """The server ended the connection."""


class Connection:
    """Preamble and frames over one socket. `tls`: an ssl.SSLContext, where the store has TLS."""

    def __init__(self, host, port, tls=None):
        self.socket = socket.create_connection((host, port), SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self._buffer = bytearray()
        self.socket.sendall(PREAMBLE.pack(b"RSL1", VERSION, VERSION))
        magic, lowest, highest = PREAMBLE.unpack(self._take(PREAMBLE.size, deadline_in(SECONDS)))
        assert magic == b"RSL1", magic
        assert lowest <= VERSION <= highest, (lowest, highest)

    def send_frame(self, kind, seq, body):
        self.socket.sendall(HEADER.pack(len(body), kind, 0, 0, seq) + body)

    def receive_frame(self, deadline):
        """(type, seq, body). TimeoutError, or Closed."""
        header = self._fill(HEADER.size, deadline)
        length, kind, flags, channel, seq = HEADER.unpack_from(header)
        assert (flags, channel) == (0, 0), (flags, channel)
        frame = self._take(HEADER.size + length, deadline)
        return kind, seq, frame[HEADER.size :]

    def _take(self, size, deadline):
        self._fill(size, deadline)
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _fill(self, size, deadline):
        while len(self._buffer) < size:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError as error:
                raise Closed(str(error)) from error
            if not data:
                raise Closed("end of the stream")
            self._buffer += data
        return self._buffer

    def close(self):
        self.socket.close()


class Line:
    """A session's connection of one role. `unanswered` outlives connections."""

    ROLE = "ROLE_REQUEST"

    def __init__(self, host, port, job, session=None, tls=None, **hello):
        self.target = (host, port, tls)
        self.session = session or new_id()
        self._hello = {"job": job, "session": self.session, "incarnation": INCARNATION, **hello}
        self._next = 1
        self.unanswered = {}  # seq -> message, in order
        self.replies = {}
        self.events = []
        self.welcome = None
        self.connect()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def connect(self):
        """A connection of its own; what was not answered goes out again."""
        pb = messages()
        self.connection = Connection(*self.target)
        hello = pb.Hello(role=pb.Role.Value(self.ROLE), **self._hello)
        hello.process.host = socket.gethostname()
        hello.process.pid = os.getpid()
        self._send_message(0, pb.Request(hello=hello, first_unacked=self.first_unacked()))
        kind, seq, body = self.connection.receive_frame(deadline_in(SECONDS))
        assert (kind, seq) == (REPLY, 0), (kind, seq)
        reply = pb.Reply.FromString(body)
        if reply.failure.code:
            raise Refused(reply.failure)
        self.welcome = reply.welcome
        for seq, message in self.unanswered.items():
            self._send_message(seq, message)

    def first_unacked(self):
        return next(iter(self.unanswered), self._next)

    def send(self, _seq=None, _scope=0, _generation=0, _acknowledged=None, **op):
        """send(set={"key": b"k", "value": b"v"}) -> seq."""
        pb = messages()
        seq = _seq
        if seq is None:
            seq = self._next
            self._next += 1
        message = pb.Request(scope=_scope, generation=_generation)
        for name, fields in op.items():
            part = getattr(message, name)
            part.SetInParent()
            part.MergeFrom(type(part)(**fields))
        self.unanswered[seq] = message
        message.first_unacked = _acknowledged or self.first_unacked()
        self._send_message(seq, message)
        return seq

    def send_unnumbered(self, **op):
        """Cancel and heartbeats: with seq 0, never answered by a reply, never sent again."""
        pb = messages()
        message = pb.Request(first_unacked=self.first_unacked())
        for name, fields in op.items():
            part = getattr(message, name)
            part.SetInParent()
            part.MergeFrom(type(part)(**fields))
        self._send_message(0, message)

    def _send_message(self, seq, message):
        self.connection.send_frame(REQUEST, seq, message.SerializeToString())

    def receive(self, seconds=SECONDS):
        """One frame is read and put where it belongs."""
        pb = messages()
        kind, seq, body = self.connection.receive_frame(deadline_in(seconds))
        if kind == EVENT:
            self.events.append(pb.Event.FromString(body))
        elif kind == REPLY:
            self.replies[seq] = pb.Reply.FromString(body)
            self.unanswered.pop(seq, None)

    def reply(self, seq, seconds=SECONDS):
        deadline = deadline_in(seconds)
        while seq not in self.replies:
            self.receive(deadline - time.monotonic())
        return self.replies.pop(seq)

    def call(self, **op):
        return self.reply(self.send(**op))

    def lose(self):
        """The connection is gone; connect() makes the next one."""
        self.connection.close()

    def close(self):
        self.connection.close()


class Client(Line):
    """Key operations."""


class Member(Line):
    """Membership."""

    ROLE = "ROLE_CONTROL"

    def join(self, rank, world_size, generation=0, seat_wait_ms=0):
        reply = self.call(
            join={
                "rank": rank,
                "world_size": world_size,
                "endpoint": b"endpoint %d" % rank,
                "join_timeout_ms": SECONDS * 1000,
                "seat_wait_ms": seat_wait_ms,
                "generation": generation,
            }
        )
        assert not reply.failure.code, reply

    def beat(self, number):
        self.send_unnumbered(heartbeat={"beat": number})

    def event(self, name, seconds=SECONDS):
        """The next event of that name; pings on the way are answered, other events dropped."""
        deadline = deadline_in(seconds)
        while True:
            while self.events:
                event = self.events.pop(0)
                which = event.WhichOneof("event")
                if which == "ping":
                    self.beat(0)
                if which == name:
                    return getattr(event, which)
            self.receive(deadline - time.monotonic())


def deadline_in(seconds):
    return time.monotonic() + seconds
