"""DeepSpeed on the CPU: incident 2, a rank calls init late, or never."""

import pytest

pytestmark = pytest.mark.slow  # DeepSpeed compiles its operators first.
PROGRAM = "deepspeed_program.py"
GRACE_SECONDS = 2  # From the line "init" to the join, and out of the call.


def assert_all_trained(ranks):
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), ranks[-1].stderr()
    results = [rank.result() for rank in ranks]
    assert all(result == results[0] for result in results)
    assert results[0]["backend"] == "resilient" and len(results[0]["losses"]) == 3


def test_initialize_is_taken_over_and_waits_for_the_host_of_the_store(
    launcher, deepspeed_environment
):
    late = ("--late-rank", 0, "--late", 4)
    taken = {"RESILIENT_TAKE_OVER": "gloo"}
    assert_all_trained(launcher.plain(PROGRAM, 2, *late, **taken, **deepspeed_environment))


@pytest.mark.parametrize("late_rank", [0, 2])
@pytest.mark.parametrize("late, timeout", [(5, 2), (60, 10)])
def test_a_rank_that_calls_init_later_than_the_timeout_is_waited_for(
    launcher, deepspeed_environment, late_rank, late, timeout
):
    arguments = ("--late-rank", late_rank, "--late", late, "--timeout", timeout)
    ranks = launcher.plain(
        PROGRAM, 3, "--backend", "resilient", *arguments, **deepspeed_environment
    )
    assert_all_trained(ranks)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts_is_named_by_all_others(launcher, deepspeed_environment, missing):
    timeout = 8  # So that a busy machine starts the others in that time.
    arguments = ("--backend", "resilient", "--timeout", timeout)
    ranks = launcher.plain(PROGRAM, 3, *arguments, missing=[missing], **deepspeed_environment)
    assert all(rank.wait() != 0 for rank in ranks)
    first_join = min(rank.time_of("init") for rank in ranks)
    for rank in ranks:
        assert rank.time_of("failed") - first_join < timeout + 1 + GRACE_SECONDS
        text = f"[resilient:JOIN_TIMEOUT] 2 of 3 joined; missing ranks {missing};"
        assert text in rank.stderr(), rank.stderr()
