"""resilient-run as a launcher, with shell scripts for workers: no torch."""

import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from launching import events, launch, run, shell

from torch_resilient import _server


def test_it_does_not_import_torch():
    code = "import sys, torch_resilient.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0


def test_lines_are_prefixed_and_kept_whole(tmp_path):
    script = shell(tmp_path, 'for i in 1 2 3; do echo "out $RANK $i"; echo "err $RANK" >&2; done')
    code, stdout, stderr = run("--nproc", 3, *script)
    assert code == 0
    for rank in range(3):
        assert [line for line in stdout.splitlines() if line.startswith(f"[{rank}] ")] == [
            f"[{rank}] out {rank} {number}" for number in (1, 2, 3)
        ]
        assert stderr.count(f"[{rank}] err {rank}\n") == 3


def test_the_last_line_needs_no_newline(tmp_path):
    code, stdout, _ = run("--nproc", 1, *shell(tmp_path, "printf 'no end'"))
    assert (code, stdout) == (0, "[0] no end\n")


def test_a_child_that_speaks_as_its_rank_ends(tmp_path):
    """The launcher learns of both in one turn, of the end first, and closes what it then reads."""
    for name in ("go", "said"):
        os.mkfifo(tmp_path / name)
    child = f"""
until grep -q ^State:.Z /proc/$$/status; do sleep 0.01; done
echo late; echo >{tmp_path}/said
"""
    process = launch(
        "--nproc", 1, *shell(tmp_path, f"({child}) & echo ready; read x <{tmp_path}/go")
    )
    said = os.open(tmp_path / "said", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (tmp_path / "go").write_text("\n")
        spoken = select.poll()  # select() takes no descriptor beyond 1024.
        spoken.register(said, select.POLLIN)
        assert spoken.poll(20_000)
    finally:
        process.send_signal(signal.SIGCONT)
        os.close(said)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (0, "[0] late\n"), stderr


def test_the_environment_of_a_rank(tmp_path):
    code, stdout, _ = run("--nproc", 2, "--job", "night", *shell(tmp_path, "env"))
    assert code == 0
    for wanted in (
        "[1] RANK=1",
        "[1] LOCAL_RANK=1",
        "[1] WORLD_SIZE=2",
        "[1] RESILIENT_JOB=night",
        "[1] RESILIENT_SEAT_WAIT=10min",
        "[1] OMP_NUM_THREADS=1",
        "[1] RESILIENT_STORE=127.0.0.1:",
        "[1] MASTER_PORT=",
    ):
        assert wanted in stdout


@pytest.mark.parametrize("how", ["exit 7", "kill -9 $$"])
def test_a_dead_rank_is_replaced(tmp_path, how):
    log = tmp_path / "events"
    text = f"""
[ "$RANK" = 1 ] && [ ! -e {tmp_path}/x ] && touch {tmp_path}/x && {how}
until [ "$(grep -c '"started"' {log})" = 3 ]; do sleep 0.01; done
"""
    code, _, stderr = run("--nproc", 2, "--events", log, *shell(tmp_path, text))
    assert code == 0, stderr
    assert "rank 1" in stderr and "replacing it (1 of 3 restarts)" in stderr
    started = [event["rank"] for event in events(log) if event["event"] == "started"]
    assert sorted(started) == [0, 1, 1]
    assert all(event["time"] > 0 for event in events(log))


@pytest.mark.parametrize(("how", "expected"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_when_the_restarts_are_used_the_job_ends_with_its_code(tmp_path, how, expected):
    text = f'[ "$RANK" = 1 ] && {how}; exec sleep 60'
    started = time.monotonic()
    code, _, stderr = run("--nproc", 3, "--max-restarts", 1, *shell(tmp_path, text))
    assert code == expected
    assert "all 1 restarts are used" in stderr
    assert time.monotonic() - started < 15  # Not those of the sleep, and a busy machine.


def test_a_rank_that_ends_again_and_again_is_held_back(tmp_path):
    """It lives as long as one that imports something and fails in its first step."""
    log = tmp_path / "events"
    script = shell(tmp_path, '[ "$RANK" = 0 ] && { sleep 1.1; exit 3; }; exec sleep 60')
    code, _, stderr = run("--nproc", 2, "--max-restarts", 4, "--events", log, *script)
    assert code == 3
    said = re.findall(r"replacing it \((\d) of 4 restarts\)(?: in (\S+) s, (.*))?", stderr)
    why = "as it has ended {} times in a row within 60 s of its start (--steady-after)"
    assert said == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "0.5", why.format(3)),
        ("4", "1.0", why.format(4)),
    ]
    times = {"started": [], "exited": []}
    for event in events(log):
        if event.get("rank") == 0 and event["event"] in times:
            times[event["event"]].append(event["time"])
    pauses = [b - a for a, b in zip(times["exited"], times["started"][1:], strict=False)]
    assert len(pauses) == 4 and pauses[2] >= 0.5 and pauses[3] >= 1


def test_one_that_is_held_back_does_not_come_when_others_have_finished(tmp_path):
    log = tmp_path / "events"
    text = f"""
[ "$RANK" = 1 ] && exit 3
until [ "$(grep -c '"restarted"' {log})" -ge 5 ]; do sleep 0.01; done
"""
    options = ["--nproc", 2, "--max-restarts", 9, "--events", log]
    code, _, stderr = run(*options, *shell(tmp_path, text))
    assert code == 3
    assert "rank 1" in stderr and "other ranks have finished: it cannot rejoin" in stderr
    told = [event["event"] for event in events(log) if event.get("rank") == 1]
    # The start that was told of last was held back, and never came: the fifth, by 2 s.
    assert told.count("restarted") >= 5
    assert told.count("started") == told.count("restarted")


def test_nothing_is_held_back_where_every_life_is_long_enough(tmp_path):
    script = shell(tmp_path, "exit 3")
    code, _, stderr = run("--nproc", 1, "--max-restarts", 5, "--steady-after", 0, *script)
    assert code == 3
    assert "(5 of 5 restarts)\n" in stderr and "in a row" not in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(tmp_path, number):
    process = launch("--nproc", 3, *shell(tmp_path, "echo ready; exec sleep 60"))
    for _ in range(3):
        assert "ready" in process.stdout.readline()
    started = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=10)
    assert time.monotonic() - started < 6  # Three seconds, and a busy machine.
    assert process.returncode == 128 + number


# Kills nobody by itself.
PATIENT = """
import sys
from torch_resilient import run
from torch_resilient._launch import launcher
launcher._END_SECONDS = 600.0
sys.exit(run.main())
"""


def test_a_second_signal_kills(tmp_path):
    script = shell(tmp_path, "trap 'echo asked' INT; echo ready; while :; do sleep 0.1; done")
    process = launch("--nproc", 2, *script, program=("-c", PATIENT))
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    for _ in range(2):  # One signal is lost in another, if it comes too early.
        assert "asked" in process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT


def test_who_ignores_the_signal_is_killed(tmp_path):
    script = shell(tmp_path, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    process = launch("--nproc", 2, *script)
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert time.monotonic() - started < 6  # Three seconds, and a busy machine.


def test_a_killed_launcher_leaves_nothing(tmp_path):
    script = shell(tmp_path, "echo ready; exec sleep 60")
    folders = tmp_path / "folders"
    folders.mkdir()
    process = launch("--nproc", 2, *script, env={**os.environ, "TMPDIR": str(folders)})
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    assert list(folders.iterdir())
    process.kill()
    process.communicate(timeout=10)  # Processes are for the fixture that looks for leftovers.
    until = time.monotonic() + 10
    while list(folders.iterdir()):
        assert time.monotonic() < until


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc", "0", "x"], "must be at least 1"),
        (["--nproc", "many", "x"], "'many' is not a number"),
        (["--nproc", "2"], "script"),
    ],
)
def test_bad_arguments(arguments, text):
    code, _, stderr = run(*arguments)
    assert code == 2
    assert text in stderr


def test_a_missing_script(tmp_path):
    code, _, stderr = run("--nproc", 1, "--max-restarts", 0, tmp_path / "no.py")
    assert code == 2
    assert "no.py" in stderr


def test_a_program_that_cannot_be_started(tmp_path):
    code, _, stderr = run("--nproc", 1, "--no-python", tmp_path / "no")
    assert code == 1
    assert stderr.startswith("resilient-run: ")
    assert len(stderr.splitlines()) == 1


def test_as_a_module(tmp_path):
    (tmp_path / "worker.py").write_text("import os; print('module', os.environ['RANK'])")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    code, stdout, _ = run("--nproc", 1, "-m", "worker", env=environment)
    assert (code, stdout) == (0, "[0] module 0\n")


def test_a_dead_store_is_started_again_with_its_data(tmp_path):
    log = tmp_path / "events"
    data = tmp_path / "data"
    # The worker kills the store, whose pid is in its lock, and reads back what it had kept there.
    text = f"""
store() {{ command=$1; shift; {_server.binary()} $command "$@" --timeout 15s; }}
store set k kept || exit 1
kill -KILL $(cut -d' ' -f2 {data}/lock) || exit 2
[ "$(store get k)" = kept ] || exit 3
"""
    options = ["--nproc", 1, "--max-restarts", 0, "--events", log, "--store-data", data]
    code, _, stderr = run(*options, *shell(tmp_path, text), seconds=60)
    assert code == 0, stderr
    assert "the store ended with signal 9 (SIGKILL); starting it again with what it kept" in stderr
    assert [event["restarts"] for event in events(log) if event["event"] == "store_restarted"] == [
        1
    ]


def test_store_data_is_kept_where_it_is_told(tmp_path):
    data = tmp_path / "data"
    code, _, stderr = run("--nproc", 1, "--store-data", data, *shell(tmp_path, "exit 0"))
    assert code == 0, stderr
    assert (data / "store.db").exists()
    code, _, stderr = run(
        "--nproc", 1, "--store", "127.0.0.1:1", "--store-data", data, *shell(tmp_path, "exit 0")
    )
    assert code == 2
    assert "--store-data is for a store of its own" in stderr
