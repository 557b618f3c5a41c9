"""Servers of both kinds as processes, for the tests that hold our store against TCPStore."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch.distributed as dist

import torch_resilient
from torch_resilient import _server

START_SECONDS = 60
END_SECONDS = 10

_TCP_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def read_line(stream, seconds, what):
    """A line of a child's output; AssertionError when none comes in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        assert selector.select(seconds), f"{what} said nothing within {seconds} s"
    return stream.readline()


class ServerProcess:
    """A store server in a process of its own that can be killed, stopped, and started again on the
    same port."""

    def __init__(self):
        self.process = None
        self.port = 0
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        self.process = subprocess.Popen(
            self.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **self.extra()
        )
        line = read_line(self.process.stdout, START_SECONDS, "the server")
        assert line, f"the server ended with {self.process.wait(END_SECONDS)}"
        self.port = int(line.split()[0].rpartition(":")[2])

    def extra(self):
        return {}

    def kill(self):
        self.process.kill()
        self._collect()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self._collect()

    def _collect(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(END_SECONDS)


class TcpServer(ServerProcess):
    """PyTorch's TCPStore."""

    def command(self):
        return [sys.executable, "-c", _TCP_SERVER, str(self.port)]

    def client(self, timeout=30.0, port=None):
        return dist.TCPStore(
            "127.0.0.1", port or self.port, None, False, timeout=timedelta(seconds=timeout)
        )


class ResilientServer(ServerProcess):
    """Ours. `flags`: further ones of `resilient-store serve`. Its log is in `log()`."""

    def __init__(self, *flags):
        self.flags = flags
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__()

    def command(self):
        listen = ["--listen", f"127.0.0.1:{self.port}", "--print-address", "--parent-death"]
        return [_server.binary(), "serve", *listen, *self.flags]

    def extra(self):
        return {"stderr": self._log}

    def client(self, timeout=30.0, port=None, job="test"):
        address = f"127.0.0.1:{port or self.port}"
        return torch_resilient.Store(address, timeout=timeout, job=job)

    def log(self):
        with open(self._log.fileno(), "rb", closefd=False) as log:
            log.seek(0)
            return log.read().decode(errors="replace")

    def close(self):
        super().close()
        self._log.close()
