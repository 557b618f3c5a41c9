"""Ranks whose stderr nobody takes: they beat, wait, learn of a loss and heal as ever."""

import os
import pty
import signal
import termios
import time
import tty

import pytest
import torch
import torch.distributed as dist
from launching import events, launch
from rank_server import hear, tell

import torch_resilient

SIZE = 3
# Wait lines, written by the thread that beats; the lease ends long before the late rank comes.
# Torch's flight recorder writes to stderr at a failure as well, with a write that blocks.
ENVIRONMENT = {"RESILIENT_WAIT_LOG": "1s", "RESILIENT_SEAT_WAIT": "30s"}
LATE_SECONDS = 5.0
KNOWN_SECONDS = 0.5 + 1.0  # What is promised, and a busy machine.
_kept = []


def block_stderr(how):
    """Rank side: from here on nobody reads what this process says."""
    if how == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    elif how == "terminal":  # Stopped, as by Ctrl-S.
        reader, writer = pty.openpty()
        _kept.append(reader)
        tty.setraw(writer)
        termios.tcflow(writer, termios.TCOOFF)
    else:
        reader, writer = os.pipe()
        _kept.append(reader)
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"#" * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
    os.dup2(writer, 2)


def works_unread(how, is_replacement):
    block_stderr(how)
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    if not is_replacement:
        dist.barrier()
        if rank == 0:
            until = time.monotonic() + LATE_SECONDS
            while time.monotonic() < until:
                pass
        total = torch.ones(1)
        dist.all_reduce(total)
        tell(total.item())
        if rank == SIZE - 1:
            hear()  # Until it is killed.
        with pytest.raises(torch_resilient.RankLostError) as caught:
            dist.barrier()
        tell((caught.value.rank, time.time()))
        torch_resilient.rebuild()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize(
    "how",
    [
        "pipe",
        pytest.param("terminal", marks=pytest.mark.slow),
        pytest.param("full disk", marks=pytest.mark.slow),
    ],
)
def test_a_log_that_nobody_reads_holds_up_nobody(quick_world, how):
    ranks = quick_world.start(works_unread, SIZE, how, False, env=ENVIRONMENT)
    assert [rank.told() for rank in ranks] == [float(SIZE)] * SIZE
    _, killed = ranks[-1].signal()
    for rank in ranks[:-1]:
        lost, known = rank.told()
        assert lost == SIZE - 1
        assert known - killed < KNOWN_SECONDS
    ranks[-1].wait(10)
    ranks[-1] = quick_world.start_rank(works_unread, SIZE - 1, SIZE, how, True, env=ENVIRONMENT)
    assert [rank.value() for rank in ranks] == [float(SIZE)] * SIZE


# Each round is more than a pipe takes.
FLOODS = """
import os, signal, sys
import torch, torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")
rank = dist.get_rank()


def work():
    for _ in range(50):
        print("." * 2000, file=sys.stderr, flush=True)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


if torch_resilient.membership()["generation"] == 1:
    work()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.barrier()
    except torch_resilient.RankLostError:
        torch_resilient.rebuild()
work()
dist.destroy_process_group()
"""


def test_a_launcher_that_nobody_reads_heals_its_job(tmp_path):
    log, script = tmp_path / "events", tmp_path / "floods.py"
    script.write_text(FLOODS)
    reader, writer = os.pipe()
    environment = {**os.environ, "RESILIENT_WAIT_LOG": "1s"}
    options = {"stdout": writer, "stderr": writer, "env": environment}
    process = launch("--nproc", 2, "--events", log, script, **options)
    os.close(writer)
    try:
        until = time.monotonic() + 60
        ends = []
        while len(ends) < 3:  # Nobody has read anything by then.
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
            seen = events(log) if log.exists() else []
            ends = [(e["rank"], e["exit_code"]) for e in seen if e["event"] == "exited"]
        assert sorted(ends) == [(0, 0), (1, -signal.SIGKILL), (1, 0)]
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read().decode()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert "(SIGKILL); replacing it (1 of 3 restarts)\n" in text
    assert text.count("." * 2000) == 50 * 4
