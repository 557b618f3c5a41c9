"""resilient-run --min-world: ranks that are lost and not started again, and those that go on."""

import os
import re

import pytest
from launching import events, run, shell

from torch_resilient import ConfigError, _api

# The ranks that are named in `victims` die one after the other, each in a step of its own.
LOSES_SOME = """
import os, signal, sys
import torch, torch.distributed as dist
import torch_resilient

victims = [int(word) for word in sys.argv[1:]]
process = int(os.environ["RANK"])
dist.init_process_group("resilient")


def train(state):
    while state.step < 4:
        if process in victims and state.step == 1 + victims.index(process):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(state.total)
        state.step += 1
        state.commit()


state = torch_resilient.State(total=torch.ones(1), step=0)
torch_resilient.elastic(train)(state)
print(f"process {process} is rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
"""


# Rank 1 dies in the first step of its first life, and comes again when the others have gone on.
COMES_AGAIN = """
import os, pathlib, signal, time
import torch.distributed as dist
import torch_resilient

went_on = pathlib.Path(__file__).with_name("went on")
while "RESILIENT_REPLACES" in os.environ and not went_on.exists():
    time.sleep(0.01)
dist.init_process_group("resilient")
first = torch_resilient.membership()["generation"] == 1


def train(state):
    if first and dist.get_world_size() == 3 and not state.sizes:
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            dist.barrier()
    state.sizes = [*state.sizes, dist.get_world_size()]
    while dist.get_world_size() < 3:
        went_on.touch()
        state.commit()
        dist.barrier()


state = torch_resilient.State(sizes=[])
torch_resilient.elastic(train, max_world=3)(state)
print(f"rank {dist.get_rank()}: {state.sizes[0]} to {state.sizes[-1]}", flush=True)
dist.destroy_process_group()
"""


def test_who_is_started_again_comes_in_where_the_others_have_gone_on(tmp_path):
    script = tmp_path / "comes_again.py"
    script.write_text(COMES_AGAIN)
    code, stdout, stderr = run(
        *("--nproc", 3, "--min-world", 2),
        script,
        env={**os.environ, "RESILIENT_SEAT_WAIT": "0"},
        seconds=90,
    )
    assert code == 0, stderr
    found = sorted(re.findall(r"rank \d: \d to \d", stdout))
    assert found == [f"rank {rank}: 2 to 3" for rank in range(3)]


def run_script(tmp_path, *options, victims):
    script = tmp_path / "loses_some.py"
    script.write_text(LOSES_SOME)
    return run("--nproc", 4, "--min-world", 3, *options, script, *victims, seconds=90)


@pytest.mark.parametrize(
    "policy",
    [("--restart-policy", "never"), pytest.param(("--max-restarts", 0), marks=pytest.mark.slow)],
)
def test_the_others_go_on_without_waiting(tmp_path, policy):
    log = tmp_path / "events"
    code, stdout, stderr = run_script(tmp_path, *policy, "--events", log, victims=[1])
    assert code == 0, stderr
    assert sorted(re.findall(r"process \d is rank \d of \d", stdout)) == [
        "process 0 is rank 0 of 3",
        "process 2 is rank 1 of 3",
        "process 3 is rank 2 of 3",
    ]
    assert "the job goes on with 3, as 3 are enough (--min-world)" in stderr
    lost = [event for event in events(log) if event["event"] == "lost"]
    assert [(event["rank"], event["left"]) for event in lost] == [(1, 3)]


@pytest.mark.slow
def test_below_the_least_the_job_ends_with_the_last_loss(tmp_path):
    code, stdout, stderr = run_script(tmp_path, "--restart-policy", "never", victims=[1, 2])
    assert code == 137, stderr
    assert "is rank" not in stdout
    assert "the job goes on with 3" in stderr
    assert "2 are left, fewer than --min-world 3; ending the job" in stderr


def test_restarts_come_first(tmp_path):
    log = tmp_path / "events"
    text = f"""
[ "$RANK" = 1 ] && exit 7
until grep -q '"lost"' {log}; do sleep 0.01; done
"""
    options = ["--nproc", 3, "--min-world", 2, "--max-restarts", 1, "--events", log]
    code, _, stderr = run(*options, *shell(tmp_path, text))
    assert code == 0, stderr
    assert "replacing it (1 of 1 restarts)" in stderr
    assert "exit code 7; all 1 restarts are used; the job goes on with 2" in stderr


def test_one_that_dies_behind_the_end_of_others_ends_nothing(tmp_path):
    log = tmp_path / "events"
    text = f"""
[ "$RANK" = 0 ] && exit 0
until grep -q '"exited", .*"rank": 0' {log}; do sleep 0.01; done
exit 5
"""
    options = ["--nproc", 2, "--min-world", 1, "--events", log]
    code, _, stderr = run(*options, *shell(tmp_path, text))
    assert code == 0, stderr
    assert "it cannot rejoin; the job goes on with 1, as 1 are enough" in stderr


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--restart-policy", "never"], ["MIN_WORLD=1"]),
        (["--restart-policy", "never", "--spares", 1], ["MIN_WORLD=1", "SEAT_WAIT=30s"]),
        ([], ["MIN_WORLD=1", "SEAT_WAIT=10min"]),
    ],
)
def test_the_ranks_are_told(tmp_path, options, wanted):
    script = shell(tmp_path, "env")
    code, stdout, _ = run("--nproc", 1, "--min-world", 1, *options, *script)
    assert code == 0
    found = re.findall(r"\[0\] RESILIENT_(MIN_WORLD=.*|SEAT_WAIT=.*)", stdout)
    assert sorted(found) == wanted


def test_the_setting_is_the_default_of_min_world(monkeypatch):
    monkeypatch.setenv("RESILIENT_MIN_WORLD", "3")
    assert _api.wish("replace", None) == {"min_world": 3}
    assert _api.wish("replace", 2) == {"min_world": 2}
    assert _api.wish("shrink", None) == {"min_world": 3, "seat_wait": 0.0}
    for bad in ("0", "two", "-1"):
        monkeypatch.setenv("RESILIENT_MIN_WORLD", bad)
        with pytest.raises(ConfigError, match="the least number of ranks"):
            _api.wish("replace", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--min-world", 3], "more than the 2 of --nproc"),
        (["--min-world", 1, "--restart-policy", "all"], "all starts all anew"),
        (["--min-world", 0], "must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, text):
    code, _, stderr = run("--nproc", 2, *options, *shell(tmp_path, "exit 0"))
    assert code == 2
    assert text in stderr
