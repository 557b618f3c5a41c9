"""The store of a job: the launcher's own, which is kept running, or one that is there."""

import os
import selectors
import subprocess
import time

from torch_resilient import _server
from torch_resilient._launch import LaunchError
from torch_resilient._launch.backoff import Backoff
from torch_resilient._launch.output import Output
from torch_resilient._launch.worker import how

_START_SECONDS = 10.0
_RESTARTS = 8  # In a row; a store that has lived for long begins a new one.


class Store:
    """Owner and thread: the launcher, whose loop calls `turn`.

    address: of one that is there, or None. data: where one of its own keeps what it has.
    wanted: whether the job goes on, asked when the store has ended. event: writes what happens.
    """

    def __init__(self, address, data, exits, console, wanted, event):
        self.address = address
        self.due = None  # When it is started again.
        self._given = address is not None
        self._data = data
        self._exits = exits
        self._selector = exits.selector
        self._console = console
        self._wanted = wanted
        self._event = event
        self._process = None
        self._started = 0.0
        self._backoff = Backoff(at_once=1)
        self._reports = []

    def start(self):
        """Does nothing for a store that is there. LaunchError, OSError: there is none."""
        if self._given:
            return
        self._launch("127.0.0.1:0", "--print-address")
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(_START_SECONDS) else b""
        words = line.decode(errors="replace").split()
        if not words:
            raise LaunchError("the store did not start; its reason is above")
        self.address = words[0]

    def turn(self, now):
        if self.due is not None and now >= self.due:
            self.due = None
            if self._wanted():
                self._launch(self.address)
        self._reports = [report for report in self._reports if report.poll() is None]

    def report(self, job, rank, pid, exit_code):
        """Tells the store how a process ended, beside the start of its replacement."""
        command = [_server.binary(), "report", "--store", self.address, "--job", job]
        command += ["--rank", str(rank), "--pid", str(pid)]
        if exit_code < 0:
            command += ["--signal", str(-exit_code)]
        else:
            command += ["--exit-code", str(exit_code)]
        self._reports.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        )

    def processes(self):
        """Numbers of what has been started and not been reaped."""
        started = [*self._reports, *([self._process] if self._process else [])]
        return {process.pid for process in started if process.returncode is None}

    def end(self):
        for report in self._reports:
            if report.poll() is None:
                report.kill()
            report.wait()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(0.4)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process.stdout.close()

    def _launch(self, listen, *options):
        command = [*_server.serve_command(listen, self._data), "--parent-death"]
        command += ["--tcpstore=auto", "--users=auto", *options]
        if "RESILIENT_LOG" not in os.environ:
            command += ["--log-level", "warn"]
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            bufsize=0,  # What is read here as a line leaves nothing behind.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # A Ctrl-C ends the workers first.
        )
        self._exits.watch(self._process.pid, self._ended)
        output = Output(self._process.stdout, self._say_of_store)
        self._selector.register(output.pipe, selectors.EVENT_READ, (self._read, output))

    def _say_of_store(self, lines):
        self._console.write("err", "[store] ", lines, own=True)

    def _read(self, output):
        if not output.read():
            self._selector.unregister(output.pipe)
            output.pipe.close()

    def _ended(self, _):
        self._exits.forget(self._process.pid)
        code = self._process.wait()
        if not self._wanted():
            return
        pause = self._backoff.ended(None, time.monotonic() - self._started)
        restarts = self._backoff.ends(None) or 1
        text = f"the store ended with {how(code)}"
        if restarts > _RESTARTS:
            self._console.say(
                f"{text}, {_RESTARTS} times after a restart; it stays away, and without it "
                "no rank can be replaced"
            )
            return
        self.due = time.monotonic() + pause
        self._console.say(
            f"{text}; starting it again with what it kept"
            f" ({restarts} of {_RESTARTS})" + (f" in {pause:.1f} s" if pause else "")
        )
        self._event("store_restarted", exit_code=code, restarts=restarts)
