"""Servers of both kinds as processes, for the tests that hold our store against TCPStore."""

import json
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist
from store_shell import Process, Store

import torch_resilient
from torch_resilient import _server

START_SECONDS = 60


def waits(address, job):
    """How many calls of clients wait in that job of a store of ours."""
    command = [_server.binary(), "status", "--store", address, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(entry["waits"] for entry in json.loads(said)["jobs"] if entry["job"] == job)


_TCP_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class ServerProcess:
    """A store server in a process of its own that can be killed, stopped, and started again on the
    same port."""

    def __init__(self):
        self.port = 0
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self._process.process.pid

    def start(self):
        self._process = self.launch()
        line = self._process.take("", START_SECONDS)
        self.port = int(line.split()[0].rpartition(":")[2])

    def kill(self):
        self._process.end()

    def signal(self, number):
        self._process.signal(number)

    def logged(self, what):
        return self._process.logged(what)

    def close(self):
        self._process.end()


class TcpServer(ServerProcess):
    """PyTorch's TCPStore."""

    def launch(self):
        return Process([sys.executable, "-c", _TCP_SERVER, str(self.port)])

    def client(self, timeout=30.0, port=None):
        return tcp_client(port or self.port, timeout)


def tcp_client(port, timeout):
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=timeout))


class ResilientServer(ServerProcess):
    """Ours. `flags`: further ones of `resilient-store serve`."""

    def __init__(self, *flags):
        self._flags = flags
        super().__init__()

    def launch(self):
        return Store(_server.binary(), *self._flags, port=self.port)

    def client(self, timeout=30.0, port=None, job="test"):
        address = f"127.0.0.1:{port or self.port}"
        return torch_resilient.Store(address, timeout=timeout, job=job)


class TcpFrontServer(ResilientServer):
    """Ours, for torch's own client."""

    def __init__(self, *flags):
        super().__init__("--tcpstore", *flags)

    def client(self, timeout=30.0, port=None):
        return tcp_client(port or self.port, timeout)
