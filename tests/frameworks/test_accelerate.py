"""accelerate: incident 1, the main process caches while the others wait."""

import json
import time

import pytest

PROGRAM = "accelerate_program.py"
# How a user chooses us: in the environment, or in the one place where accelerate takes a name.
WAYS = {
    "taken over": ([], {"RESILIENT_TAKE_OVER": "gloo"}),
    "by name": (["--backend", "resilient"], {}),
}


def result(process):
    line = next(line for line in process.stdout().splitlines() if line.startswith("result "))
    return json.loads(line.removeprefix("result "))


@pytest.mark.parametrize("way", WAYS)
def test_a_main_process_that_caches_for_longer_than_the_timeout_is_waited_for(launcher, way):
    arguments, environment = WAYS[way]
    started = time.monotonic()
    ranks = launcher.plain(PROGRAM, 3, *arguments, "--busy", 6, "--timeout", 2, **environment)
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[1].stderr()
    assert time.monotonic() - started > 6
    results = [result(rank) for rank in ranks]
    assert results[0] == results[1] == results[2]
    assert results[0]["backend"] == "resilient" and len(results[0]["losses"]) == 6


def test_a_main_process_that_is_killed_while_it_caches_is_named_by_the_others(launcher):
    ranks = launcher.plain(PROGRAM, 3, "--backend", "resilient", "--busy", 60)
    ranks[0].await_line("caching")
    ranks[0].signal()
    killed = time.monotonic()
    assert all(rank.wait() != 0 for rank in ranks)
    assert time.monotonic() - killed < 5
    for rank in ranks[1:]:
        assert "[resilient:RANK_LOST] rank 0 " in rank.stderr(), rank.stderr()
        assert "barrier" in rank.stderr()


def test_under_torchrun(launcher):
    run = launcher.torchrun(PROGRAM, 2, "--busy", 4, "--timeout", 1, RESILIENT_TAKE_OVER="gloo")
    assert run.wait() == 0, run.stderr()
    assert run.stdout().count('"backend": "resilient"') == 2
