"""torch's own TCPStore client against our server (`resilient-store serve --tcpstore`): it works as
with torch's server, and for programs that keep gloo."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import store_support
import torch
import torch.distributed as dist
from store_access import plain_environment
from store_shell import until
from torch.distributed import rpc

import torch_resilient
from torch_resilient import _server

PATIENCE = 30.0
SHORT = timedelta(milliseconds=200)


@pytest.fixture(scope="module")
def server(subreaper):
    with store_support.TcpFrontServer() as server:
        yield server


@pytest.fixture
def connect(server):
    """Makes clients of a store without keys."""
    ours = torch_resilient.Store(server.address, timeout=PATIENCE, job="tcpstore")
    for key in ours.list_keys():  # One of torch's, "init/", has not the prefix of all others.
        ours.delete_key(key)
    ours.close()

    def make(timeout=PATIENCE):
        return server.client(timeout)

    return make


def waits(server):
    return store_support.waits(server.address, "tcpstore")


class Caller(threading.Thread):
    """One call of a store on a thread of its own."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call, self._value, self._error = call, None, None
        self.start()

    def run(self):
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error

    def value(self):
        self.join(PATIENCE)
        assert not self.is_alive(), "the call does not return"
        if self._error is not None:
            raise self._error
        return self._value


def test_values(connect):
    kv, other = connect(), connect()
    kv.set("k", bytes(range(256)))
    kv.num_keys()  # A set is not acknowledged; what is asked behind it on its connection is.
    assert other.get("k") == bytes(range(256))
    assert kv.add("n", 41) == 41
    assert other.add("n", -42) == -1
    assert kv.get("n") == b"-1"
    kv.append("k", "tail")
    assert kv.get("k") == bytes(range(256)) + b"tail"
    assert kv.compare_set("missing", "expected", "x") == b"expected"
    assert kv.compare_set("c", "", "1") == b"1"
    assert kv.compare_set("c", "wrong", "2") == b"1"
    assert kv.compare_set("c", "1", "2") == b"2"
    assert kv.check([]) and kv.check(["k", "n"]) and not kv.check(["k", "missing"])
    assert kv.num_keys() == 3
    assert sorted(kv.list_keys()) == ["c", "k", "n"]
    assert kv.delete_key("c") and not kv.delete_key("c")
    kv.set("empty", "")
    assert kv.get("empty") == b""


def test_many_keys(connect):
    kv = connect()
    keys = [f"many/{i}" for i in range(20_000)]
    kv.multi_set(keys, [str(i) for i in range(len(keys))])
    assert kv.multi_get(keys) == [str(i).encode() for i in range(len(keys))]
    assert kv.check(keys)
    kv.wait(keys)
    assert sorted(kv.list_keys()) == sorted(keys)


def test_large_values(connect):
    kv = connect()
    value = os.urandom(8 << 20)
    kv.set("large", value)
    assert kv.get("large") == value
    assert kv.multi_get(["large"] * 3) == [value] * 3


def test_waits(connect, server):
    kv, other = connect(), connect()
    waiting = Caller(lambda: kv.get("later"))
    until(lambda: waits(server) == 1, "one client waits")
    other.set("later", "value")
    assert waiting.value() == b"value"
    waiting = Caller(lambda: kv.wait(["a", "b"], timedelta(seconds=PATIENCE)))
    until(lambda: waits(server) == 1, "one client waits")
    other.multi_set(["a", "b"], ["", ""])
    waiting.value()
    assert waits(server) == 0


def test_a_wait_that_times_out_leaves_the_client_whole(connect, server):
    kv = connect()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
            kv.wait(["never"], SHORT)
    assert waits(server) == 0
    kv.set("k", "v")
    assert kv.get("k") == b"v"


def test_a_client_that_is_killed_in_a_wait_leaves_nothing(connect, server):
    program = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), None, False)\n"
        "store.get('never')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(server.port)])
    until(lambda: waits(server) == 1, "it waits", 60)
    process.kill()
    process.wait(PATIENCE)
    until(lambda: waits(server) == 0, "its wait is gone")
    assert connect().num_keys() == 0


def test_queues(connect, server):
    kv, other = connect(), connect()
    kv.queue_push("q", "1")
    kv.queue_push("q", "")
    assert kv.queue_len("q") == 2
    assert kv.check(["q"])
    assert kv.queue_pop("q") == b"1"
    assert other.queue_pop("q") == b""
    with pytest.raises(dist.QueueEmptyError):
        kv.queue_pop("q", False)
    assert kv.num_keys() == 0
    waiting = Caller(lambda: kv.queue_pop("q"))
    until(lambda: waits(server) == 1, "a pop waits")
    other.queue_push("q", "late")
    assert waiting.value() == b"late"


def test_each_item_wakes_one_of_many(connect, server):
    count = 16
    stores = [connect() for _ in range(count)]
    poppers = [Caller(lambda store=store: store.queue_pop("q")) for store in stores]
    until(lambda: waits(server) == count, "all pops wait")
    kv = connect()
    for i in range(count):
        kv.queue_push("q", str(i))
    assert sorted(int(popper.value()) for popper in poppers) == list(range(count))
    assert kv.queue_len("q") == 0


@pytest.mark.skipif(not hasattr(dist.TCPStore, "barrier"), reason="this torch has no barrier")
def test_barrier(connect):
    stores = [connect() for _ in range(4)]
    arrived = [Caller(lambda store=store: store.barrier("b", 4)) for store in stores[:3]]
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        connect().barrier("lonely", 2, SHORT)
    stores[3].barrier("b", 4)
    for caller in arrived:
        caller.value()


def test_under_a_prefix(connect):
    kv = dist.PrefixStore("outer", dist.PrefixStore("inner", connect()))
    kv.set("k", "v")
    assert kv.get("k") == b"v"
    assert kv.add("n", 3) == 3
    kv.multi_set(["a", "b"], ["1", "2"])
    assert kv.multi_get(["b", "a"]) == [b"2", b"1"]
    assert connect().check(["inner/outer/k"])
    with pytest.raises(dist.DistStoreError):
        kv.wait(["never"], SHORT)


def test_clones(connect):
    kv = connect()
    clone = kv.clone()
    kv.set("k", "v")
    kv.num_keys()
    assert clone.get("k") == b"v"


def test_a_bad_call_ends_one_connection_and_the_log_says_why(connect, server):
    kv, other = connect(), connect()
    other.set("text", "abc")
    other.num_keys()
    with pytest.raises(dist.DistNetworkError):
        kv.add("text", 1)
    assert "needs a decimal number" in server.logged("its ADD")
    assert other.get("text") == b"abc"


def test_the_command_line_reads_and_writes_the_keys(connect, server):
    kv = connect()
    kv.set("k", "v")
    kv.num_keys()

    def command(*words):
        options = ["--store", server.address, "--job", "tcpstore"]
        return subprocess.run(
            [_server.binary(), words[0], *options, *words[1:]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert command("keys") == "/k\n"
    assert command("get", "/k") == "v"
    waiting = Caller(lambda: kv.get("told"))
    until(lambda: waits(server) == 1, "one client waits")
    command("set", "/told", "yes")
    assert waiting.value() == b"yes"


def test_other_jobs_of_the_store_go_on(connect, server):
    ours = torch_resilient.Store(server.address, timeout=PATIENCE, job="another")
    try:
        connect().set("k", "v")
        ours.set("k", "ours")
        assert ours.get("k") == b"ours"
        assert connect().get("k") == b"v"
    finally:
        ours.close()


def test_a_flood_is_read_as_fast_as_it_is_kept(connect):
    """Sets that nobody waits for, 64 MiB of them on one connection: none is lost."""
    kv = connect()
    value = b"v" * (1 << 20)
    for i in range(64):
        kv.set(f"{i}", value)
    assert kv.num_keys() == 64


# ---- Bytes ----

HELLO = b"\0\xce\xf7\x85\x3c"
PING = b"\x0d\x01\x02\x03\x04"


def text(body):
    return len(body).to_bytes(8, "little") + body


@pytest.fixture
def raw(server):
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        yield connection


def test_bytes_that_come_one_at_a_time(raw):
    """And nothing is said before the client has shown how it speaks."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in HELLO + PING:
        raw.sendall(bytes([byte]))
    assert raw.recv(100) == b"\x01\x02\x03\x04"


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x03" + (1 << 63).to_bytes(8, "little"),
        b"\x0b" + (1 << 40).to_bytes(8, "little"),
        b"\x7f",
        HELLO,
    ],
    ids=["key", "count", "type", "again"],
)
def test_what_is_no_query_ends_that_connection(connect, raw, hostile):
    raw.sendall(HELLO + PING)
    assert raw.recv(100) == b"\x01\x02\x03\x04"
    raw.sendall(hostile)
    assert raw.recv(100) == b""
    connect().set("k", "v")


def test_who_does_not_read_is_cut(server, raw):
    raw.sendall(HELLO + b"\x01" + text(b"/large") + text(b"v" * (8 << 20)))
    asked = b"\x03" + text(b"/large")
    with contextlib.suppress(OSError):
        while True:  # Until the server reads no more, and then has lost patience.
            raw.sendall(asked * 1000)
    assert "it does not read" in server.logged("cut the connection")


# ---- Restarts and admission ----


def test_keys_outlive_the_server(subreaper, tmp_path):
    with store_support.TcpFrontServer("--data", str(tmp_path / "data")) as server:
        kv = server.client(PATIENCE)
        kv.set("k", "v")
        kv.queue_push("q", "item")
        assert kv.add("n", 7) == 7
        server.kill()
        with pytest.raises(dist.DistNetworkError):
            kv.add("n", 1)  # torch's client does not connect again.
        server.start()
        again = server.client(PATIENCE)
        assert again.get("k") == b"v"
        assert again.add("n", 1) == 8
        assert again.queue_pop("q") == b"item"


def test_without_the_option_it_is_refused(subreaper):
    with store_support.ResilientServer() as server:
        with pytest.raises(dist.DistError):
            store_support.tcp_client(server.port, 2)
        assert "--tcpstore" in server.logged("PyTorch's TCPStore")


def test_a_store_with_a_token_has_to_be_told_who_may(subreaper, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    command = [_server.binary(), "serve", "--token-file", str(token), "--tcpstore"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert refused.returncode == 2
    assert "--tcpstore=loopback" in refused.stderr
    flags = ("--token-file", str(token), "--tcpstore=loopback")
    with store_support.ResilientServer(*flags) as server:
        kv = store_support.tcp_client(server.port, PATIENCE)
        kv.set("k", "v")
        assert kv.get("k") == b"v"
        with pytest.raises(torch_resilient.ConnectError):
            server.client(PATIENCE).get("k")


# ---- Programs that keep their backend ----


def gloo_world(port, size):
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=PATIENCE))
    store = dist.PrefixStore("gloo-world", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    part = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(part)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize("size", [2, 4])
def test_a_gloo_world(world, connect, server, size):
    connect()
    assert world.run(gloo_world, size, server.port, size, seconds=120) == [sum(range(size))] * size


def gloo_by_variables():
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_a_gloo_world_by_plain_variables(world, connect, server):
    """As docs/operations.md says: a sidecar at MASTER_ADDR and MASTER_PORT, and no master."""
    connect()
    assert world.run(gloo_by_variables, 3, env=beside(server), seconds=120) == [3.0] * 3


def beside(server):
    """Plain variables that name it as a sidecar."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RESILIENT_STORE": None,
        "RESILIENT_JOB": None,
    }


def rpc_alone():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
    answer = rpc.rpc_sync(f"w{(rank + 1) % size}", torch.add, args=(torch.ones(1), rank))
    rpc.shutdown()
    return answer.item()


def test_rpc(world, connect, server):
    connect()
    assert world.run(rpc_alone, 3, env=beside(server), seconds=120) == [1.0, 2.0, 3.0]


MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"sum {total.item():g}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_agents_of_torchelastic_meet_over_it(connect, server, tmp_path):
    """torchrun's own rendezvous (c10d): no agent makes a server, as there is one."""
    connect()
    program = tmp_path / "program.py"
    program.write_text(MEETS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-id", "met"]
    command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{server.port}", str(program)]
    agents = [
        subprocess.Popen(
            command,
            env=plain_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [stdout.split() for stdout, _ in said] == [["sum", "2"]] * 2, said
    ours = torch_resilient.Store(server.address, timeout=PATIENCE, job="tcpstore")
    assert any("met" in key for key in ours.list_keys())
    ours.close()


def test_a_server_that_is_paused_loses_nothing(connect, server):
    kv, other = connect(), connect()
    waiting = Caller(lambda: kv.get("k"))
    until(lambda: waits(server) == 1, "one client waits")
    server.signal(signal.SIGSTOP)
    try:
        other.set("k", "v")
    finally:
        server.signal(signal.SIGCONT)
    assert waiting.value() == b"v"
