"""The line of status of resilient-run: on a terminal, and nowhere else."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

import pytest
from launching import launch, run, shell

from torch_resilient._launch import status

PATIENCE = 20.0
CLEAR = "\r\x1b[K"


@pytest.fixture
def terminal():
    """(our side, the program's side) of one with 60 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(descriptor, wanted, text=""):
    """What has come, until the pattern is in it."""
    deadline = time.monotonic() + PATIENCE
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not re.search(wanted, text):
        assert poll.poll(max(deadline - time.monotonic(), 0) * 1000), repr(text)
        text += os.read(descriptor, 65536).decode()
    return text


def environment(**extra):
    return {**os.environ, "TERM": "xterm", **extra}


def test_what_it_says(tmp_path, terminal):
    ours, theirs = terminal
    text = f"""
[ "$RANK" = 0 ] && exit 0
[ "$RANK" = 1 ] && {{ until [ -e {tmp_path}/go ]; do sleep 0.01; done; exit 9; }}
echo said; exec sleep 600
"""
    process = launch(
        *("--nproc", 4, *shell(tmp_path, text)), stdout=theirs, stderr=theirs, env=environment()
    )
    try:
        first = r"resilient-run \| running 1-3 \| finished 0 \| restarts 0 of 3"
        seen = read_until(ours, first)
        seen = read_until(ours, r"\[2\] said\r\n[^$]*\[3\] said\r\n|\[3\] said\r\n[^$]*\[2\]", seen)
        # Each line stands alone, the status below it.
        assert f"{CLEAR}[2] said\r\n" in seen
        (tmp_path / "go").touch()
        seen = read_until(ours, r"cannot rejoin; ending the job\r\n", seen)
        seen = read_until(ours, r"resilient-run \| ending the job \| running 2-3 ", seen)
        assert max(len(line) for line in re.split(r"[\r\n]|\x1b\[K", seen) if "|" in line) <= 59
        assert process.wait(PATIENCE) == 9
        rest = read_until(ours, re.escape(CLEAR) + "$", seen)
        assert rest.endswith(CLEAR)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def test_who_flaps(tmp_path, terminal):
    ours, theirs = terminal
    script = shell(tmp_path, '[ "$RANK" = 1 ] && exit 9; exec sleep 600')
    options = {"stdout": theirs, "stderr": theirs, "env": environment()}
    process = launch("--nproc", 2, "--max-restarts", 9, *script, **options)
    try:
        line = r"resilient-run \| flapping: rank 1 ended [3-9] times \| running 0"
        read_until(ours, line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def test_a_terminal_that_can_do_nothing(tmp_path, terminal):
    ours, theirs = terminal
    script = shell(tmp_path, "echo said")
    options = {"stdout": theirs, "stderr": theirs, "env": environment(TERM="dumb")}
    process = launch("--nproc", 1, *script, **options)
    assert process.wait(PATIENCE) == 0
    assert read_until(ours, "said\r\n") == "[0] said\r\n"


def test_no_terminal(tmp_path):
    code, stdout, stderr = run("--nproc", 1, *shell(tmp_path, "echo said"), env=environment())
    assert (code, stdout, stderr) == (0, "[0] said\n", "")


def test_its_words():
    assert status.ranges([5, 0, 2, 1, 9, 8]) == "0-2,5,8-9"
    states = {"running": [0, 1], "held back": [], "finished": [2]}
    assert (
        status.text(states, 1, 3, 90061.5)
        == "resilient-run | running 0-1 | finished 2 | restarts 1 of 3 | 1 d 01:01:01"
    )
