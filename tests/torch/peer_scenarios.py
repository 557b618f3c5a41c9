"""The cases of test_peer_failures.py: what clients of either store do, in a process of their own.

Each returns done(...) of what it saw; the test does to the server and the network what it asks for.
"""

import socket
import struct
import threading
import time
from datetime import timedelta

import rank_server
import torch.distributed as dist
from protocol_client import HEADER, REQUEST, Client, messages

import torch_resilient

SECONDS = 20
SHORT = 0.5  # The timeout of calls that are expected to end with it.
VALUE_BYTES = 4 << 20
ANSWERS = 16
_VALIDATE = b"\0"
_MAGIC = 0x3C85F7CE


# ---- Servers and clients of both kinds ----


def tcp_server(port):
    """A rank: TCPStore's server until it is killed."""
    master = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    rank_server.tell(master.port)
    rank_server.hear()


def connect(kind, port, timeout=SECONDS):
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=timeout))
    return torch_resilient.Store(f"127.0.0.1:{port}", timeout=timeout, job="peer")


def outcome(call, *args):
    """("returned", value), or ("raised", class, code): what can be sent to the test."""
    try:
        return "returned", call(*args)
    except Exception as error:
        return "raised", type(error).__name__, getattr(error, "code", None)


def in_background(call, *args):
    """Runs the call on a thread; the returned function waits for its outcome."""
    results = []
    thread = threading.Thread(target=lambda: results.append(outcome(call, *args)), daemon=True)
    thread.start()

    def result():
        thread.join(SECONDS)
        return results[0] if results else ("waits",)

    return result


class Raw:
    """A client that speaks the protocol of either store by hand, and reads no answer."""

    def __init__(self, kind, port):
        self._kind = kind
        if kind == "ours":
            self._line = Client("127.0.0.1", port, "peer")
            self._socket = self._line.connection.socket
        else:
            self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_VALIDATE + struct.pack("=I", _MAGIC))

    def get(self, key):
        if self._kind == "ours":
            self._line.send(get={"key": key})
        else:
            key = b"/" + key  # So its clients call it.
            self._socket.sendall(b"\3" + struct.pack("=Q", len(key)) + key)

    def begin_set(self, key, size):
        """A set but for its last byte."""
        value = b"v" * size
        if self._kind == "ours":
            body = messages().Request(set={"key": key, "value": value}).SerializeToString()
            whole = HEADER.pack(len(body), REQUEST, 0, 0, 1) + body
        else:
            whole = b"\1" + struct.pack("=Q", len(key)) + key + struct.pack("=Q", size) + value
        self._socket.sendall(whole[:-1])

    def close(self):
        self._socket.close()


def ask(wish):
    """Has the test do something to the server or the network; returns what came of it."""
    rank_server.tell(wish)
    return rank_server.hear()


def done(value):
    rank_server.tell("done")
    return value


def waiting(other, call, *args):
    """Starts a call that waits, of a client behind the proxy; the server has read its request."""
    passed = ask("passed")
    result = in_background(call, *args)
    assert ask(("await_passed", passed, SECONDS)), "the request has not been sent"
    settle(other)
    return result


def settle(other):
    """What was in a socket of the server before has been read: its loop reads all of them in turn,
    and has read a request of `other` after it."""
    for _ in range(3):
        other.num_keys()


# ---- The cases ----


def restarted(kind, port, _):
    store = connect(kind, port)
    store.set("k", "kept")
    store.num_keys()
    ask("restart")
    return done([outcome(store.get, "k") for _ in range(3)])


def added_to_text(kind, port, _):
    store = connect(kind, port)
    store.set("k", "text")
    return done([outcome(store.add, "k", 1), outcome(store.get, "k"), outcome(store.num_keys)])


def overlong_key(kind, port, _):
    store = connect(kind, port)
    return done([outcome(store.set, "k" * 8193, "v"), outcome(store.check, ["x"])])


def append_without_end(kind, port, _):
    store = connect(kind, port)
    piece = "v" * (4 << 20)
    outcomes = [outcome(store.append, "k", piece) for _ in range(4)]
    return done([outcomes, len(store.get("k"))])


CHANGES = {
    "set": ("set", "new"),
    "append": ("append", "new"),
    "multi_set": (["multi_set"], ["new"]),
    "queue_push": ("a queue", "new"),
}


def silent_losses(kind, port, proxy_port):
    """Each change by a client of its own, all at once."""
    other = connect(kind, port)
    stores = {name: connect(kind, proxy_port, SHORT) for name in CHANGES}
    for name, store in stores.items():
        store.set(name, "old")
        store.num_keys()
    ask("stall")
    changes = {
        name: in_background(getattr(store, name), *CHANGES[name]) for name, store in stores.items()
    }
    told = {name: change() for name, change in changes.items()}
    settle(other)
    seen = {name: other.get(name) for name in CHANGES}, other.queue_len("a queue")
    ask("cut")  # What had not arrived is lost with the connection.
    ask("resume")
    return done([told, seen])


def half_a_multi_set(kind, port, proxy_port):
    store, other = connect(kind, proxy_port), connect(kind, port)
    count = 40
    keys = [f"k{i}" for i in range(count)]
    ask(("slow", 3_000_000))
    writing = in_background(store.multi_set, keys, ["v" * 30_000] * count)
    deadline = time.monotonic() + SECONDS
    while not other.check(keys[:1]) and time.monotonic() < deadline:
        pass
    present = other.check(keys)
    ask(("slow", 0))
    return done([present, writing()])


def deleted_between(kind, port, proxy_port):
    store, other = connect(kind, proxy_port), connect(kind, port)
    getting = waiting(other, store.get, "k")
    ask("stall")
    other.set("k", "v")
    other.delete_key("k")
    ask("resume")
    return done(getting())


def stale_waiter(kind, port, proxy_port):
    store, other = connect(kind, proxy_port), connect(kind, port)
    popping = waiting(other, store.queue_pop, "q")
    other.queue_push("q", "1")
    first = popping()
    getting = waiting(other, store.get, "nobody sets this")
    passed = ask("passed")
    other.queue_push("q", "2")
    if kind == "tcp":  # Woken, the client asks for the value.
        ask(("await_passed", passed, SECONDS))
    settle(other)
    other.set("nobody sets this", "but now")
    return done([first, getting()])


def stolen_item(kind, port, proxy_port):
    store, other = connect(kind, proxy_port), connect(kind, port)
    popping = waiting(other, store.queue_pop, "q")
    ask("stall")
    other.queue_push("q", "1")
    taken = outcome(other.queue_pop, "q", False)
    ask("resume")
    return done([taken[:2], popping()[:2]])


def second_barrier(kind, port, _):
    store, other = connect(kind, port), connect(kind, port)
    short = timedelta(seconds=SHORT)
    first = in_background(store.barrier, "b", 2, timedelta(seconds=SECONDS))
    outcomes = [outcome(other.barrier, "b", 2, timedelta(seconds=SECONDS)), first()]
    return done([outcomes, outcome(store.barrier, "b", 2, short)[0]])


def partial_handshake(kind, port, _):
    other = connect(kind, port)
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if kind == "tcp":
            hello = _VALIDATE + struct.pack("=I", _MAGIC)
        else:
            hello = b"RSL1" + struct.pack("<HH", 1, 1)
        sock.settimeout(SHORT)
        try:
            for i in range(len(hello)):
                sock.sendall(hello[i : i + 1])
                settle(other)
            answer = sock.recv(1)
        except TimeoutError:
            return done("open")
        except ConnectionError:
            return done("closed")
        return done("open" if answer else "closed")


def unread_answers(kind, port, _):
    other = connect(kind, port)
    other.set("k", "v" * VALUE_BYTES)
    before = ask("resident")
    raw = Raw(kind, port)
    for _ in range(ANSWERS):
        raw.get(b"k")
        settle(other)
    grown = ask("resident") - before
    raw.close()
    return done(grown)


def abandoned_requests(kind, port, _):
    other = connect(kind, port)
    other.set("k", "v")
    before = ask("resident")
    for _ in range(ANSWERS):
        raw = Raw(kind, port)
        raw.begin_set(b"k", VALUE_BYTES)
        settle(other)
        raw.close()
        settle(other)
    return done(ask("resident") - before)


def reached_elsewhere(kind, port, _):
    connect(kind, port)
    try:
        # Another address of this host, which the server was not told to listen at.
        socket.create_connection(("127.0.0.2", port), SECONDS).close()
    except ConnectionRefusedError:
        return done("refused")
    return done("accepted")


def garbage(kind, port, _):
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        sock.sendall(_VALIDATE + b"nope" if kind == "tcp" else b"\0nope, no protocol of ours")
        sock.settimeout(SHORT)
        try:
            while sock.recv(4096):
                pass
        except TimeoutError:
            return done("open")
        except ConnectionResetError:
            pass
        return done("closed")


def partly_set(kind, port, proxy_port):
    store, other = connect(kind, proxy_port), connect(kind, port)
    other.set("a", "1")
    result = waiting(other, store.wait, ["a", "b"], timedelta(seconds=SECONDS))
    other.set("b", "2")
    return done(result())
