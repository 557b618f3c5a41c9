"""accelerate: incident 1, the main process caches while the others wait."""

import os
import re
import signal
import time

import pytest

PROGRAM = "accelerate_program.py"
# How a user chooses us: in the one place where accelerate takes a name, or in the environment.
BY_NAME = ("--backend", "resilient")
LONG = pytest.param(60, 10, marks=pytest.mark.slow)
KNOWN_SECONDS = 0.5
GRACE_SECONDS = 2  # For the exception to leave the call, on a busy machine.


def assert_trained_in_spite_of(busy, launcher, arguments, environment):
    started = time.monotonic()
    ranks = launcher.plain(PROGRAM, 3, *arguments, "--busy", busy, **environment)
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[1].stderr()
    assert time.monotonic() - started > busy
    results = [rank.result() for rank in ranks]
    assert results[0] == results[1] == results[2]
    assert results[0]["backend"] == "resilient" and len(results[0]["losses"]) == 6
    return ranks


@pytest.mark.parametrize("busy, timeout", [(6, 2), LONG])
def test_a_main_process_that_caches_for_longer_than_the_timeout_is_waited_for(
    launcher, busy, timeout
):
    taken = {"RESILIENT_TAKE_OVER": "gloo"}
    assert_trained_in_spite_of(busy, launcher, ["--timeout", timeout], taken)


@pytest.mark.slow
@pytest.mark.parametrize("busy, timeout", [(6, 2), LONG])
def test_so_it_is_where_the_others_make_a_group(launcher, busy, timeout):
    arguments = [*BY_NAME, "--lazy", "--timeout", timeout]
    assert_trained_in_spite_of(busy, launcher, arguments, {})


@pytest.mark.slow
def test_and_with_the_checks_of_torch_distributed_debug(launcher):
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    assert_trained_in_spite_of(5, launcher, [*BY_NAME, "--timeout", 2], debug)


def lines_about_rank_0(rank):
    """What a rank says while it waits in the barrier: where rank 0 is."""
    text = r"has waited \d+ s in barrier.* wait_for_everyone for rank 0 .*: alive, last beat .*"
    return [found[0] for found in re.finditer(text, rank.stderr())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy, timeout, every", [(8, 2, "1s"), pytest.param(60, 10, "30s", marks=pytest.mark.slow)]
)
def test_who_waits_tells_for_whom_and_where_that_one_is(launcher, busy, timeout, every):
    """Rank 0 spends the first half in a native call that keeps the GIL, the second in Python."""
    arguments = [*BY_NAME, "--timeout", timeout]
    ranks = assert_trained_in_spite_of(busy, launcher, arguments, {"RESILIENT_WAIT_LOG": every})
    assert not lines_about_rank_0(ranks[0])
    for rank in ranks[1:]:
        lines = lines_about_rank_0(rank)
        assert any(re.search(r"late\.py:\d+ work", line) for line in lines), rank.stderr()


def test_a_main_process_that_is_killed_while_it_caches_is_named_by_the_others(launcher):
    ranks = launcher.plain(PROGRAM, 3, *BY_NAME, "--busy", 60)
    ranks[0].await_line("caching")
    for rank in ranks[1:]:
        rank.await_line("waiting")
    killed = time.time()
    ranks[0].signal()
    assert all(rank.wait() != 0 for rank in ranks)
    for rank in ranks[1:]:
        assert rank.time_of("failed") - killed < KNOWN_SECONDS + GRACE_SECONDS
        assert "[resilient:RANK_LOST] rank 0 " in rank.stderr(), rank.stderr()
        assert "barrier" in rank.stderr()


@pytest.mark.slow
def test_under_torchrun(launcher):
    run = launcher.torchrun(PROGRAM, 2, "--busy", 6, "--timeout", 2, RESILIENT_TAKE_OVER="gloo")
    assert run.wait() == 0, run.stderr()
    assert run.stdout().count('"backend": "resilient"') == 2


# Seconds until torchrun looks at its workers, and then ends the others with SIGTERM: time enough
# for them to end by their exceptions, or none.
@pytest.mark.parametrize("interval", [3, pytest.param(0.1, marks=pytest.mark.slow)])
def test_the_first_cause_is_told_by_each_under_torchrun(launcher, interval):
    options = [f"--monitor-interval={interval}"]
    run = launcher.torchrun(PROGRAM, 3, *BY_NAME, "--busy", 60, options=options)
    run.await_line("caching")
    run.await_line("waiting", times=2)
    pid = int(run.after("caching"))
    os.kill(pid, signal.SIGKILL)
    assert run.wait() != 0
    for rank in (1, 2):
        lines = [line for line in run.stderr().splitlines() if f"rank{rank}" in line]
        cause = "[resilient:RANK_LOST] rank 0 (host "
        assert any(cause in line and f"pid {pid}" in line for line in lines), run.stderr()
