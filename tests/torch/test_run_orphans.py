"""What the ranks under resilient-run leave behind is ended with them, and nothing else is."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from launching import launch, run, shell

PATIENCE = 20.0
# A child in a session of its own, which tells its number once it is there: APART FILE.
APART = """
setsid sh -c 'echo $$ >$0.new; mv $0.new $0; exec sleep 600' "$1" &
until [ -e "$1" ]; do sleep 0.01; done
"""


def apart(tmp_path, name):
    """A command that leaves such a child and ends."""
    script = tmp_path / "apart.sh"
    script.write_text(APART)
    return f"sh {script} {tmp_path / name}"


def number(path):
    return int(path.read_text())


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid, seconds=PATIENCE):
    """Whether it ends within that time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000)) or not is_alive(pid)
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(("how", "expected"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0)])
def test_a_session_of_its_own(tmp_path, how, expected):
    script = shell(tmp_path, f"{apart(tmp_path, 'pid')}; {how}")
    code = run("--nproc", 1, "--max-restarts", 0, *script)[0]
    assert code == expected
    assert not is_alive(number(tmp_path / "pid"))


def test_what_a_dead_rank_left_ends_while_the_others_run(tmp_path):
    """That of a rank that lives does not, though its parent has ended."""
    text = f"""
if [ "$RANK" = 0 ]; then
  {apart(tmp_path, "kept")}
  echo ready; exec sleep 600
fi
[ -e {tmp_path}/gone ] || {{ {apart(tmp_path, "gone")}; exit 7; }}
echo again; exec sleep 600
"""
    process = launch("--nproc", 2, *shell(tmp_path, text))
    said = {process.stdout.readline() for _ in range(2)}
    assert said == {"[0] ready\n", "[1] again\n"}
    kept, gone = number(tmp_path / "kept"), number(tmp_path / "gone")
    assert ends(gone)
    assert is_alive(kept)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert not is_alive(kept)


def test_a_chain_of_orphans(tmp_path):
    """Each parent ends before it is found; the last one has neither session nor variable of it."""
    leave = f"setsid env -i sh -c '(echo $$ >{tmp_path}/pid; exec sleep 600) &' &"
    text = f"({leave}); until [ -s {tmp_path}/pid ]; do sleep 0.01; done; exit 7"
    run("--nproc", 1, "--max-restarts", 0, *shell(tmp_path, text))
    # The rest is for the fixture that looks for leftovers.


def test_children_that_were_there_before_are_left_alone(tmp_path):
    """A shell may become the launcher, and leave it what it had started."""
    command = f'sleep 600 & echo $! >{tmp_path}/pid; exec "$@"'
    script = shell(tmp_path, f"{apart(tmp_path, 'own')}; exit 0")
    launcher = [sys.executable, "-m", "torch_resilient.run", "--nproc", "1", *map(str, script)]
    done = subprocess.run(["sh", "-c", command, "sh", *launcher], timeout=PATIENCE)
    before = number(tmp_path / "pid")
    try:
        assert done.returncode == 0
        assert is_alive(before)
        assert not is_alive(number(tmp_path / "own"))
    finally:
        os.kill(before, signal.SIGKILL)


def test_a_killed_launcher_leaves_no_session_behind(tmp_path):
    script = shell(tmp_path, f"{apart(tmp_path, 'pid')}; echo ready; exec sleep 600")
    process = launch("--nproc", 1, *script)
    assert process.stdout.readline() == "[0] ready\n"
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert ends(number(tmp_path / "pid"))


SHARED = """
import os, signal, sys
from multiprocessing import resource_tracker, shared_memory
kept = shared_memory.SharedMemory(create=True, size=4096)
tracker = resource_tracker._resource_tracker._pid
while b"resource_tracker" not in open(f"/proc/{tracker}/cmdline", "rb").read():
    pass  # Still a copy of this process.
print(kept.name, flush=True)
if sys.argv[1] == "rank":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def shared_memory_is_gone(name):
    return not os.path.exists(f"/dev/shm/{name}")


@pytest.mark.parametrize("who", ["rank", "launcher"])
def test_shared_memory_is_tidied_up(tmp_path, who):
    """By multiprocessing's resource tracker, which outlives those whose memory it was."""
    script = tmp_path / "worker.py"
    script.write_text(SHARED)
    process = launch("--nproc", 1, "--max-restarts", 0, script, who)
    name = process.stdout.readline().split()[1]
    if who == "launcher":
        process.kill()
    process.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not shared_memory_is_gone(name):
        if time.monotonic() > deadline:
            os.unlink(f"/dev/shm/{name}")
            pytest.fail(f"{name} is left in /dev/shm")


def test_a_tracker_that_does_not_end_is_killed(tmp_path):
    text = f"""
[ -e {tmp_path}/pid ] && exec sleep 600
sh -c 'echo $$ >{tmp_path}/pid; sleep 600; true' 'resource_tracker import main' &
until [ -s {tmp_path}/pid ]; do sleep 0.01; done
exit 7
"""
    started = time.monotonic()
    process = launch("--nproc", 1, *shell(tmp_path, text))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() - started < PATIENCE
    assert ends(number(tmp_path / "pid"))
    assert time.monotonic() - started >= 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
