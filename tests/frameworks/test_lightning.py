"""Lightning Fabric and Trainer: incident 3, one rank comes late to a barrier, or never."""

import signal
import time

import pytest

PROGRAM = "lightning_program.py"
TTL_SECONDS = 5
GRACE_SECONDS = 2  # For the exception to leave the call, on a busy machine.


@pytest.mark.parametrize("kind", ["fabric", pytest.param("trainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("late, timeout", [(5, 2), pytest.param(60, 10, marks=pytest.mark.slow)])
def test_a_rank_that_is_later_than_the_timeout_is_waited_for(launcher, kind, late, timeout):
    arguments = ("--backend", "resilient", "--late", late, "--timeout", timeout)
    ranks = launcher.plain(PROGRAM, 2, kind, *arguments, NODE_RANK="0")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].stderr()
    assert ranks[0].result() == ranks[1].result()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fabric", pytest.param("trainer", marks=pytest.mark.slow)])
def test_a_rank_that_stops_is_named_and_finally_runs(launcher, kind):
    arguments = ("--backend", "resilient", "--late", 60)
    ranks = launcher.plain(PROGRAM, 2, kind, *arguments, NODE_RANK="0")
    ranks[0].await_line("training")
    ranks[1].await_line("training")
    ranks[0].signal(signal.SIGSTOP)
    stopped = time.time()
    assert ranks[1].wait() != 0
    assert ranks[1].time_of("failed") - stopped < TTL_SECONDS + 1 + GRACE_SECONDS
    assert "[resilient:RANK_LOST] rank 0 " in ranks[1].stderr(), ranks[1].stderr()
    assert "finally" in ranks[1].stdout()
    ranks[0].signal(signal.SIGKILL)
    ranks[0].wait()
