"""resilient-run with spares: processes of no rank that wait for one to be lost."""

import re

import pytest
from launching import events, run, shell

# Rank 1 dies, and a process that replaces it comes when the spare has the seat.
LOSES_ONE = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
import torch_resilient

process = int(os.environ["RANK"])
lost, taken = (pathlib.Path(__file__).with_name(name) for name in ("lost", "taken"))
if process == 1 and lost.exists():
    while not taken.exists():
        time.sleep(0.01)
dist.init_process_group("resilient")
if process == 2:
    taken.touch()
if torch_resilient.membership()["generation"] == 1:
    if process == 1:
        dist.barrier()
        lost.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.barrier()
    except torch_resilient.RankLostError:
        torch_resilient.rebuild()
total = torch.ones(1)
dist.all_reduce(total)
print(f"process {process} is rank {os.environ['RANK']} of {int(total)}", flush=True)
dist.destroy_process_group()
"""


def test_they_are_counted_and_end_with_the_ranks(tmp_path):
    log = tmp_path / "events"
    text = f"""
echo "$RANK of $WORLD_SIZE with $RESILIENT_SPARES"
if [ "$RANK" -ge 2 ]; then touch {tmp_path}/$RANK; exec sleep 60; fi
until [ -e {tmp_path}/2 ] && [ -e {tmp_path}/3 ]; do sleep 0.01; done
"""
    script = shell(tmp_path, text)
    code, stdout, stderr = run("--nproc", 2, "--spares", 2, "--events", log, *script)
    assert code == 0, stderr
    said = sorted(line.partition("] ")[2] for line in stdout.splitlines())
    assert said == [f"{rank} of 4 with 2" for rank in range(4)]
    ends = {e["rank"]: e["exit_code"] for e in events(log) if e["event"] == "exited"}
    assert ends == {0: 0, 1: 0, 2: -15, 3: -15}


def test_a_spare_that_ends_by_itself_has_finished_for_nobody(tmp_path):
    """A rank and a spare end with 0, which are two; the other rank still has its part to do. By the
    end of the second spare the launcher has decided what the first two ends mean."""
    log = tmp_path / "events"
    text = f"""
until_ended() {{ until [ "$(grep -c '"exited"' {log})" -ge $1 ]; do sleep 0.01; done; }}
[ "$RANK" = 3 ] && until_ended 2
[ "$RANK" = 1 ] && until_ended 3
exit 0
"""
    code, _, stderr = run("--nproc", 2, "--spares", 2, "--events", log, *shell(tmp_path, text))
    assert code == 0, stderr
    ends = {e["rank"]: e["exit_code"] for e in events(log) if e["event"] == "exited"}
    assert ends == {rank: 0 for rank in range(4)}


@pytest.mark.parametrize(
    "policy",
    [("--restart-policy", "never"), pytest.param(("--max-restarts", 0), marks=pytest.mark.slow)],
)
def test_spares_are_enough_where_nothing_is_started_again(tmp_path, policy):
    script = tmp_path / "loses_one.py"
    script.write_text(LOSES_ONE)
    code, stdout, stderr = run("--nproc", 2, "--spares", 1, *policy, script, seconds=60)
    assert code == 0, stderr
    assert "process 2 is rank 1 of 2" in stdout
    assert "it is not started again, as a spare takes its seat" in stderr


def test_without_spares_left_the_job_ends(tmp_path):
    text = '[ "$RANK" -le 1 ] && exit 7; exec sleep 60'
    options = ["--nproc", 2, "--spares", 1, "--max-restarts", 0]
    code, _, stderr = run(*options, *shell(tmp_path, text))
    assert code == 7
    assert stderr.count("it is not started again, as a spare takes its seat") == 1
    assert stderr.count("all 0 restarts are used; ending the job") == 1


def test_a_spare_takes_the_seat_and_the_next_one_is_started(tmp_path):
    script = tmp_path / "loses_one.py"
    script.write_text(LOSES_ONE)
    code, stdout, stderr = run("--nproc", 2, "--spares", 1, script, seconds=60)
    assert code == 0, stderr
    assert sorted(re.findall(r"process \d is rank \d of \d", stdout)) == [
        "process 0 is rank 0 of 2",
        "process 2 is rank 1 of 2",
    ]
    assert "rank 1" in stderr and "replacing it (1 of 3 restarts)" in stderr


# The spare becomes rank 2, and has something to do when the other two have ended.
ENDS_LAST = """
import contextlib, os, select, signal
import torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")


def train(state):
    while dist.get_world_size() < 3:
        state.commit()
        dist.barrier()


torch_resilient.elastic(train, max_world=3)(torch_resilient.State(step=0))
pids = [None] * 3
dist.all_gather_object(pids, os.getpid())
rank = dist.get_rank()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
dist.destroy_process_group()
if rank == 2:
    for pid in pids[:2]:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [], 30)
    told = signal.sigtimedwait([signal.SIGTERM], 1)
    print("told to end" if told else "the last word", flush=True)
"""


def test_a_rank_that_was_a_spare_is_not_ended_as_one(tmp_path):
    script = tmp_path / "ends_last.py"
    script.write_text(ENDS_LAST)
    code, stdout, stderr = run("--nproc", 2, "--spares", 1, script, seconds=60)
    assert code == 0, stderr
    assert "the last word" in stdout


# The spare becomes rank 2; then rank 1 is lost, and nobody waits for its seat.
GROWS_AND_LOSES_ONE = """
import os, signal
import torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")


def train(state):
    while True:
        state.commit()
        dist.barrier()
        if dist.get_world_size() == 3 and dist.get_rank() == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


torch_resilient.elastic(train, max_world=3)(torch_resilient.State(step=0))
"""


def test_spares_that_a_grown_world_took_in_are_none_any_more(tmp_path):
    script = tmp_path / "grows.py"
    script.write_text(GROWS_AND_LOSES_ONE)
    code, _, stderr = run(
        "--nproc", 2, "--spares", 1, "--restart-policy", "never", script, seconds=60
    )
    assert code == 137, stderr
    assert "as a spare takes its seat" not in stderr
    assert "ending the job" in stderr


@pytest.mark.parametrize("policy", ["replace", "all", "never"])
def test_a_spare_that_dies_when_a_rank_has_finished_ends_nothing(tmp_path, policy):
    log = tmp_path / "events"
    text = f"""
has_ended() {{ grep -q '"exited", .*"rank": '$1 {log}; }}
[ "$RANK" = 0 ] && exit 0
[ "$RANK" = 2 ] && {{ until has_ended 0; do sleep 0.01; done; exit 9; }}
until has_ended 2; do sleep 0.01; done
"""
    options = ["--nproc", 2, "--spares", 1, "--restart-policy", policy, "--events", log]
    code, _, stderr = run(*options, *shell(tmp_path, text))
    assert code == 0, stderr
    assert "exit code 9; it waited for a seat, and the job goes on without it" in stderr
