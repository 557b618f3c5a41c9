"""Incident 5: aspect-ratio buckets give the ranks different numbers of
batches, and inside torch_resilient.join they train."""

import json

import pytest

PROGRAM = "uneven_program.py"


def line(process, name):
    found = [text for text in process.stdout().splitlines() if text.startswith(name + " ")]
    assert found, process.stderr()
    return json.loads(found[0].removeprefix(name))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_with_join_it_trains(launcher, size):
    ranks = launcher.plain(PROGRAM, size, "--join")
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].stderr()
    results = [line(rank, "result") for rank in ranks]
    assert len({result["batches"] for result in results}) > 1
    assert all(result["weights"] == results[0]["weights"] for result in results)
    warning = "torch_resilient.join: a rank whose batches have run out"
    assert [rank.stderr().count(warning) for rank in ranks] == [1] + [0] * (size - 1)
