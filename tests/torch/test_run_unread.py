"""resilient-run whose own output nobody takes: it reaps, replaces and ends as ever, its ranks are
never held up by it, and what is lost is counted."""

import os
import pty
import re
import signal
import termios
import threading
import time
import tty

import pytest
from launching import events, launch, shell

PATIENCE = 30.0
# More than what waits in the launcher, in all of its pipes and in a terminal.
LIMITS = """
import sys
from torch_resilient import run
from torch_resilient._launch import output
output._SHOWN_LIMIT = 200_000
sys.exit(run.main())
"""


class Pipe:
    """A stdout and stderr that nobody reads, until `read`."""

    def __init__(self):
        self._reader, self.writer = os.pipe()

    def read(self):
        """All of it, by a thread; at the end `text` is whole."""
        self.chunks = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            while data := os.read(self._reader, 65536):
                self.chunks.append(data)
        except OSError:  # So ends a terminal.
            pass

    def text(self):
        """When nobody has it open any more."""
        os.close(self.writer)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        os.close(self._reader)
        return b"".join(self.chunks).decode()


class Terminal(Pipe):
    """Stopped, as by Ctrl-S."""

    def __init__(self):
        self._reader, self.writer = pty.openpty()
        tty.setraw(self.writer)
        termios.tcflow(self.writer, termios.TCOOFF)

    def read(self):
        super().read()
        termios.tcflow(self.writer, termios.TCOON)


def await_event(log, name, count, process):
    """So many of them, while nobody reads."""
    until = time.monotonic() + PATIENCE
    while True:
        seen = [event for event in events(log) if event["event"] == name] if log.exists() else []
        if len(seen) >= count:
            return seen
        assert process.poll() is None and time.monotonic() < until, seen
        time.sleep(0.01)


# Rank 1 dies when its output is more than all that could wait for a reader; its replacement
# goes on until both have said that much again.
FLOODS = """
for i in $(seq 6000); do echo "rank $RANK says $i ........................................"; done
echo said >>{folder}/said.$RANK
[ "$RANK" = 1 ] && [ ! -e {folder}/x ] && touch {folder}/x && kill -9 $$
until [ -e {folder}/go ]; do sleep 0.02; done
"""


@pytest.mark.parametrize("unread", [Pipe, Terminal])
def test_a_rank_is_replaced(tmp_path, unread):
    log = tmp_path / "events"
    output = unread()
    script = shell(tmp_path, FLOODS.format(folder=tmp_path))
    process = launch(
        *("--nproc", 2, "--events", log, *script),
        program=("-c", LIMITS),
        stdout=output.writer,
        stderr=output.writer,
        env={**os.environ, "TERM": "xterm"},  # With a line of status.
    )
    try:
        await_event(log, "started", 3, process)
        until = time.monotonic() + PATIENCE
        while (tmp_path / "said.1").read_text().count("said") < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        (tmp_path / "go").touch()
        await_event(log, "exited", 3, process)
        output.read()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    text = output.text()
    assert "(SIGKILL); replacing it (1 of 3 restarts)\n" in text  # Its own lines are lost last.
    shown = len(re.findall(r"\[\d\] rank \d says \d+ \.+\n", text))
    [missing] = re.findall(r"resilient-run: (\d+) lines are missing here, as nobody read", text)
    assert shown > 0 and shown + int(missing) == 3 * 6000


def test_a_signal_ends_it(tmp_path):
    output = Pipe()
    log = tmp_path / "events"
    text = FLOODS.format(folder=tmp_path)
    (tmp_path / "x").touch()  # Nobody dies by itself.
    streams = {"stdout": output.writer, "stderr": output.writer}
    process = launch("--nproc", 2, "--events", log, *shell(tmp_path, text), **streams)
    try:
        until = time.monotonic() + PATIENCE
        while not all((tmp_path / f"said.{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < until
            time.sleep(0.02)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 6  # Three seconds, and a busy machine.
    finally:
        process.kill()
        process.wait()
    output.read()
    output.text()


# The signal comes with the exit of a rank: the launcher finds both when it looks.
SIGNALLED = """
import os, selectors, signal, sys
from torch_resilient import run
class Selector(selectors.DefaultSelector):
    def select(self, timeout):
        ready = super().select(timeout)
        if any(key.data and type(key.data[1]).__name__ == "Worker" for key, _ in ready):
            os.kill(os.getpid(), signal.SIGTERM)
            ready = super().select(0)
            assert len(ready) > 1
            ready.sort(key=lambda entry: entry[0].fd, reverse={latest_first})
        return ready
selectors.DefaultSelector = Selector
sys.exit(run.main())
"""


@pytest.mark.parametrize("latest_first", [False, True])
@pytest.mark.parametrize("exit_code", [0, 7])
def test_a_signal_with_the_end_of_the_last_rank_is_not_its_cause(tmp_path, latest_first, exit_code):
    program = ("-c", SIGNALLED.format(latest_first=latest_first))
    script = shell(tmp_path, f"exit {exit_code}")
    process = launch("--restart-policy", "never", *script, program=program)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == exit_code


def test_a_full_disk_of_the_events_ends_nothing(tmp_path):
    process = launch("--nproc", 1, "--events", "/dev/full", *shell(tmp_path, "echo here"))
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (0, "[0] here\n")
    assert stderr == (
        "resilient-run: /dev/full cannot be written (No space left on device): no more events in"
        " it\n"
    )


def test_an_error_at_the_start_is_no_wait(tmp_path):
    output = Pipe()
    os.set_blocking(output.writer, False)
    try:
        while True:
            os.write(output.writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(output.writer, True)
    command = ["--nproc", 1, "--no-python", tmp_path / "no"]
    process = launch(*command, stdout=output.writer, stderr=output.writer)
    try:
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.wait()
    output.read()
    output.text()
