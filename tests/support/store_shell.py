"""The store's server and C++ client as processes that a test drives by lines (client_shell.cc)."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import unittest

PATIENCE = 30.0
END_SECONDS = 10.0


def until(condition, text, seconds=PATIENCE):
    """Waits for what other processes do; each look at it costs a round trip."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {text}")


class Process:
    """A child whose output lines are collected by a thread of its own. It dies with the test."""

    def __init__(self, command, **options):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            **options,
        )
        self._lines = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _find(self, starts):
        return next((line for line in self._lines if line.startswith(starts)), None)

    def take(self, starts, seconds=PATIENCE):
        """The oldest line that begins so, which is taken out; others stay."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(starts) or self._ended, seconds)
            line = self._find(starts)
            if line is None:
                raise AssertionError(
                    f"no line {starts!r} of pid {self.process.pid} within {seconds} s; it said "
                    f"{self._lines}, and logged:\n{self.log()}"
                )
            self._lines.remove(line)
            return line

    def said(self, starts):
        with self._changed:
            return self._find(starts) is not None

    def log(self):
        with open(self._log.fileno(), "rb", closefd=False) as log:
            log.seek(0)
            return log.read().decode(errors="replace")

    def logged(self, what, count=1):
        """Line `count` of those that hold `what`. It may come after the event that it reports, as
        a thread of its own writes the log."""
        found = []

        def is_there():
            found[:] = [line for line in self.log().splitlines(keepends=True) if what in line]
            return len(found) >= count and found[count - 1].endswith("\n")

        until(is_there, f"pid {self.process.pid} logs {what!r} {count} times")
        return found[count - 1]

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(END_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join(END_SECONDS)
        self.process.stdout.close()
        self._log.close()


class Store(Process):
    """`resilient-store serve`. `address` is where it listens, once it does."""

    def __init__(self, binary, *flags, host="127.0.0.1", port=0, prefix=(), **options):
        listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        command = [*prefix, binary, "serve", "--listen", listen, "--print-address", *flags]
        super().__init__([*command, "--parent-death"], **options)
        self.address = None

    def listening(self):
        self.address = self.take("").split()[0]
        self.port = int(self.address.rpartition(":")[2])
        return self


class Client(Process):
    """client_shell. `seconds`: the most that any command takes."""

    def __init__(self, binary, address, *, seconds=PATIENCE, job="job", prefix=(), **options):
        super().__init__([*prefix, binary, address, job, str(int(seconds))], **options)

    def connected(self, seconds=PATIENCE):
        self._done(seconds)
        return self

    def tell(self, *words):
        """Does not wait for the answer."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds=PATIENCE):
        """("done" or the code of the failure, the rest)."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._find("done") or self._find("failed") or self._ended, seconds
            )
            failed = self._find("done") is None
        line = self.take("failed" if failed and self.said("failed") else "done", 0)
        if not failed:
            return "done", line.removeprefix("done").strip()
        code, _, text = line.removeprefix("failed [resilient:").partition("] ")
        return code, text

    def _done(self, seconds=PATIENCE):
        outcome, text = self.answer(seconds)
        if outcome != "done":
            raise AssertionError(f"{outcome}: {text}\n{self.log()}")
        return text

    def do(self, *words):
        self.tell(*words)
        return self._done()

    def add(self, key, amount=1):
        return int(self.do("add", key, amount))

    def event(self, name, seconds=PATIENCE):
        return self.take(f"event {name}", seconds).removeprefix(f"event {name}").strip()

    def told(self, name):
        return self.said(f"event {name}")

    def busy(self, seconds):
        """Works for so long, one request behind the other: it goes on whatever others suffer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.add(f"busy{self.process.pid}")


class StoreCase(unittest.TestCase):
    """Servers and clients end with the test. The binaries are class attributes, set by main."""

    store_binary = ""
    client_binary = ""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def keep(self, process):
        self.addCleanup(process.end)
        return process

    def starting_store(self, *flags, **options):
        return self.keep(Store(self.store_binary, *flags, **options))

    def store(self, *flags, **options):
        return self.starting_store(*flags, **options).listening()

    def client(self, address, **options):
        return self.keep(Client(self.client_binary, address, **options))

    def run_world(self, clients):
        for rank, client in enumerate(clients):
            client.do("join", rank, len(clients))
        for client in clients:
            client.event("running")
