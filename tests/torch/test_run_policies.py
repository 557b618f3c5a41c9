"""What resilient-run does when a rank dies: restart policies, their budget, and codes."""

import os
import signal
import time

import pytest
from launching import events, launch, run, shell


def starts(log):
    return sorted(event["rank"] for event in events(log) if event["event"] == "started")


@pytest.mark.parametrize("policy", ["replace", "all", "never"])
def test_a_code_that_forbids_restarts(tmp_path, policy):
    log = tmp_path / "events"
    script = shell(tmp_path, '[ "$RANK" = 1 ] && exit 78; exec sleep 60')
    options = ["--nproc", 2, "--restart-policy", policy, "--events", log]
    code, _, stderr = run(*options, *script)
    assert code == 78
    assert "exit code 78, by which it says that a restart is of no use; ending the job" in stderr
    assert starts(log) == [0, 1]


@pytest.mark.parametrize(("how", "expected"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_never(tmp_path, how, expected):
    log = tmp_path / "events"
    script = shell(tmp_path, f'[ "$RANK" = 1 ] && {how}; exec sleep 60')
    code, _, stderr = run("--nproc", 3, "--restart-policy", "never", "--events", log, *script)
    assert code == expected
    assert "rank 1" in stderr and "ending the job" in stderr
    assert starts(log) == [0, 1, 2]


def test_all_are_started_anew_with_the_next_attempt(tmp_path):
    log = tmp_path / "events"
    text = f"""
echo "attempt ${{RESILIENT_ATTEMPT:-0}} port $MASTER_PORT"
[ "$RANK" = 0 ] && [ ! -e {tmp_path}/0 ] && {{ touch {tmp_path}/0; exit 0; }}
if [ "$RANK" = 1 ] && [ ! -e {tmp_path}/1 ]; then
  until [ -e {tmp_path}/0 ]; do sleep 0.01; done
  touch {tmp_path}/1
  exit 7
fi
[ "$RESILIENT_ATTEMPT" = 1 ] || exec sleep 60
"""
    options = ["--nproc", 3, "--restart-policy", "all", "--events", log]
    code, stdout, stderr = run(*options, *shell(tmp_path, text))
    assert code == 0, stderr
    assert "exit code 7; starting all ranks anew (1 of 3 restarts)" in stderr
    assert starts(log) == [0, 0, 1, 1, 2, 2]
    said = {line.partition("] ")[2] for line in stdout.splitlines()}
    assert sorted(line.rpartition(" port ")[0] for line in said) == ["attempt 0", "attempt 1"]
    assert len({line.rpartition(" ")[2] for line in said}) == 2


def test_all_has_the_same_budget_and_holds_back(tmp_path):
    log = tmp_path / "events"
    script = shell(tmp_path, '[ "$RANK" = 0 ] && exit 3; exec sleep 60')
    options = ["--nproc", 2, "--restart-policy", "all", "--max-restarts", 3, "--events", log]
    code, _, stderr = run(*options, *script)
    assert code == 3
    assert "in 0.5 s, as a rank has ended 3 times in a row within 60 s of its start" in stderr
    assert "all 3 restarts are used" in stderr
    times = [e["time"] for e in events(log) if e["event"] == "started" and e["rank"] == 0]
    assert len(times) == 4
    assert times[3] - times[2] >= 0.5


def test_all_ends_who_ignores_the_signal(tmp_path):
    text = f"""
[ -e {tmp_path}/x ] && exit 0
trap '' TERM; touch {tmp_path}/ready.$RANK
if [ "$RANK" = 0 ]; then
  until [ -e {tmp_path}/ready.1 ]; do sleep 0.01; done
  touch {tmp_path}/x
  exit 5
fi
while :; do sleep 0.1; done
"""
    code, _, stderr = run("--nproc", 2, "--restart-policy", "all", *shell(tmp_path, text))
    assert code == 0, stderr


def test_a_signal_while_all_are_being_ended(tmp_path):
    text = f"""
[ "$RANK" = 0 ] && {{ until [ -e {tmp_path}/ready ]; do sleep 0.01; done; exit 5; }}
trap 'echo asked' TERM; echo ready; touch {tmp_path}/ready
while :; do sleep 0.1; done
"""
    process = launch("--nproc", 2, "--restart-policy", "all", *shell(tmp_path, text))
    assert process.stdout.readline() == "[1] ready\n"
    assert process.stdout.readline() == "[1] asked\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - started < 6  # Three seconds, and a busy machine.


def test_no_rank_with_a_commit_is_left(tmp_path):
    """Workers say that they have one by a file beside the one of their seat."""
    text = f"""
if [ -e {tmp_path}/ran.$RANK ]; then exec sleep 60; fi
echo 2 > $RESILIENT_SEATED; touch $RESILIENT_SEATED.committed {tmp_path}/ran.$RANK
until [ -e {tmp_path}/ran.0 ] && [ -e {tmp_path}/ran.1 ]; do sleep 0.01; done
exit $((8 + RANK))
"""
    code, _, stderr = run("--nproc", 2, *shell(tmp_path, text))
    assert code in (8, 9), stderr
    assert (
        "no rank is left that has a commit, and the job never begins again at its first" in stderr
    )
    assert "(1 of 3 restarts)" in stderr and "2 of 3" not in stderr


def test_one_exception_at_one_commit_is_not_tried_a_third_time(tmp_path):
    text = f"""
echo 2 > $RESILIENT_SEATED; touch $RESILIENT_SEATED.committed {tmp_path}/kept.$RANK
[ "$RANK" = 0 ] && exec sleep 60
until [ -e {tmp_path}/kept.0 ]; do sleep 0.01; done
printf '{{"cause": "ValueError: x (train.py:3)", "commit": 4}}' > $RESILIENT_SEATED.ended
exit 5
"""
    code, _, stderr = run("--nproc", 2, *shell(tmp_path, text))
    assert code == 5, stderr
    assert "ValueError: x (train.py:3) has ended a rank twice at commit 4" in stderr
    assert "(1 of 3 restarts)" in stderr and "2 of 3" not in stderr


CONFIG = """
import atexit, os, torch, torch.distributed as dist
atexit.register(print, "its end runs")
if os.environ["RANK"] == "1":
    os.environ["RESILIENT_BUDGET"] = "soon"
dist.init_process_group("resilient")
"""


# Of the program, once it has a group: torch's hook for what is not caught is around ours then.
LATER_CONFIG = """
import atexit, os, torch, torch.distributed as dist, torch_resilient
atexit.register(print, "its end runs")
dist.init_process_group("resilient")
torch_resilient.State(**{f"of_{os.environ['RANK']}": 1}).sync()
"""


@pytest.mark.parametrize("program", [CONFIG, LATER_CONFIG])
def test_a_config_error_is_not_tried_again(tmp_path, program):
    script = tmp_path / "worker.py"
    script.write_text(program)
    code, stdout, stderr = run("--nproc", 2, script, seconds=60)
    assert code == 78, stderr
    assert "[1] its end runs" in stdout
    assert "[1] torch_resilient.ConfigError: [resilient:SETTING]" in stderr
    assert "restart is of no use" in stderr


ANEW = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"attempt {os.environ.get('RESILIENT_ATTEMPT', 0)} total {int(total)}\\n".encode())
dist.barrier()  # All have printed before one dies.
if dist.get_rank() == 1 and "RESILIENT_ATTEMPT" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_all_in_a_new_life_on_the_same_store(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(ANEW)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    options = ["--nproc", 3, "--restart-policy", "all", "--max-restarts", 1]
    code, stdout, stderr = run(*options, script, seconds=60, env=kept)
    assert code == 0, stderr
    said = sorted(line.partition("] ")[2] for line in stdout.splitlines())
    assert said == ["attempt 0 total 3"] * 3 + ["attempt 1 total 3"] * 3
