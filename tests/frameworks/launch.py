"""Starts a program of a framework as its users do, each process with the plain variables."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

PROGRAMS = Path(__file__).parent
WAIT_SECONDS = 240  # A minute late, and minutes of imports on a busy machine.


class Process:
    """One rank. Its output is kept in files, so that nobody waits for a reader."""

    def __init__(self, command, environment):
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._files[0], stderr=self._files[1]
        )

    def signal(self, number=signal.SIGKILL):
        self._process.send_signal(number)

    def wait(self, seconds=WAIT_SECONDS):
        return self._process.wait(seconds)

    def stdout(self):
        return self._content(0)

    def stderr(self):
        return self._content(1)

    def result(self):
        """What it printed behind "result", which is JSON."""
        return json.loads(self.after("result"))

    def time_of(self, word):
        """The unix time that it printed behind `word`."""
        return float(self.after(word).split()[-1])

    def after(self, word):
        """The rest of its first line that begins with `word`."""
        for line in self.stdout().splitlines():
            if line.startswith(f"{word} "):
                return line.removeprefix(f"{word} ")
        raise AssertionError(f"no line '{word} ...'\n{self.stdout()}\n{self.stderr()}")

    def await_line(self, text, times=1, seconds=WAIT_SECONDS):
        """Until it has printed `text` so many times; its end or the bound is a failure."""
        deadline = time.monotonic() + seconds
        while self.stdout().count(text) < times:
            assert self._process.poll() is None and time.monotonic() < deadline, self.stderr()
            # A file cannot be waited for; the end of the process can.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)

    def end(self):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in self._files:
            file.close()

    def _content(self, which):
        # By its own offset: the process writes at the end of the same file.
        descriptor = self._files[which].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


class Launcher:
    """The processes of one test; what is left of them ends with it."""

    def __init__(self):
        self._processes = []

    def plain(self, program, size, *arguments, missing=(), **extra):
        """`size` ranks with RANK, WORLD_SIZE and MASTER_*, without those that are `missing`;
        `extra`: more of the environment."""
        port = harness.free_port()
        return [
            self._start(
                [sys.executable, str(PROGRAMS / program), *map(str, arguments)],
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **extra,
            )
            for rank in range(size)
            if rank not in missing
        ]

    def torchrun(self, program, size, *arguments, options=(), **extra):
        """All of them under torchrun, as one process."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={harness.free_port()}"]
        command += options
        return self._start([*command, str(PROGRAMS / program), *map(str, arguments)], **extra)

    def elastic(self, program, *options, program_arguments=(), **extra):
        """One agent of torchrun with options of the test's own."""
        command = [sys.executable, "-m", "torch.distributed.run", *map(str, options)]
        command += [str(PROGRAMS / program), *map(str, program_arguments)]
        return self._start(command, **extra)

    def alone(self, program, *arguments, **extra):
        """A process that is no rank."""
        return self._start([sys.executable, str(PROGRAMS / program), *arguments], **extra)

    def end(self):
        for process in self._processes:
            process.end()

    def _start(self, command, **extra):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s", **extra}
        process = Process(command, environment)
        self._processes.append(process)
        return process
