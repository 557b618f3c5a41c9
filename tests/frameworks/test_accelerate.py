"""accelerate: incident 1, the main process caches while the others wait."""

import os
import signal
import time

import launch
import pytest

PROGRAM = "accelerate_program.py"
# How a user chooses us: in the environment, or in the one place where accelerate takes a name.
WAYS = {
    "taken over": ([], {"RESILIENT_TAKE_OVER": "gloo"}),
    "by name": (["--backend", "resilient"], {}),
}
LONG = pytest.param(60, 10, marks=pytest.mark.slow)
KNOWN_SECONDS = 0.5
GRACE_SECONDS = 0.5  # For the exception to leave the call, on a busy machine.


def assert_trained_in_spite_of(busy, launcher, arguments, environment):
    started = time.monotonic()
    ranks = launcher.plain(PROGRAM, 3, *arguments, "--busy", busy, **environment)
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[1].stderr()
    assert time.monotonic() - started > busy
    results = [rank.result() for rank in ranks]
    assert results[0] == results[1] == results[2]
    assert results[0]["backend"] == "resilient" and len(results[0]["losses"]) == 6
    return ranks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("busy, timeout", [(6, 2), LONG])
def test_a_main_process_that_caches_for_longer_than_the_timeout_is_waited_for(
    launcher, way, busy, timeout
):
    arguments, environment = WAYS[way]
    assert_trained_in_spite_of(busy, launcher, [*arguments, "--timeout", timeout], environment)


@pytest.mark.parametrize("busy, timeout", [(4, 1), LONG])
def test_so_it_is_where_the_others_make_a_group(launcher, busy, timeout):
    arguments = ["--backend", "resilient", "--lazy", "--timeout", timeout]
    assert_trained_in_spite_of(busy, launcher, arguments, {})


def test_and_with_the_checks_of_torch_distributed_debug(launcher):
    arguments = ["--backend", "resilient", "--timeout", 1]
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert_trained_in_spite_of(3, launcher, arguments, debug)


if launch.WAITING_LINE:

    @pytest.mark.slow
    def test_who_waits_tells_for_whom(launcher):
        arguments = ["--backend", "resilient", "--timeout", 10]
        ranks = assert_trained_in_spite_of(60, launcher, arguments, {})
        for rank in ranks[1:]:
            assert "for rank 0" in rank.stderr() and "late.py" in rank.stderr()


def test_a_main_process_that_is_killed_while_it_caches_is_named_by_the_others(launcher):
    ranks = launcher.plain(PROGRAM, 3, "--backend", "resilient", "--busy", 60)
    ranks[0].await_line("caching")
    killed = time.time()
    ranks[0].signal()
    assert all(rank.wait() != 0 for rank in ranks)
    for rank in ranks[1:]:
        assert rank.time_of("failed") - killed < KNOWN_SECONDS + GRACE_SECONDS
        assert "[resilient:RANK_LOST] rank 0 " in rank.stderr(), rank.stderr()
        assert "barrier" in rank.stderr()


def test_under_torchrun(launcher):
    run = launcher.torchrun(PROGRAM, 2, "--busy", 4, "--timeout", 1, RESILIENT_TAKE_OVER="gloo")
    assert run.wait() == 0, run.stderr()
    assert run.stdout().count('"backend": "resilient"') == 2


# Seconds until torchrun looks at its workers, and then ends the others with SIGTERM: time enough
# for them to end by their exceptions, or none.
INTERVALS = [3, 0.1] if launch.FIRST_CAUSE_AT_SIGTERM else [3]


@pytest.mark.parametrize("interval", INTERVALS)
def test_the_first_cause_is_told_by_each_under_torchrun(launcher, interval):
    options = [f"--monitor-interval={interval}"]
    arguments = ("--backend", "resilient", "--busy", 60)
    run = launcher.torchrun(PROGRAM, 3, *arguments, options=options)
    run.await_line("caching")
    pid = int(run.after("caching"))
    os.kill(pid, signal.SIGKILL)
    assert run.wait() != 0
    for rank in (1, 2):
        lines = [line for line in run.stderr().splitlines() if f"rank{rank}" in line]
        cause = "[resilient:RANK_LOST] rank 0 (host "
        assert any(cause in line and f"pid {pid}" in line for line in lines), run.stderr()
