"""Incident 5: aspect-ratio buckets give the ranks different numbers of batches."""

import json
import time

import pytest

PROGRAM = "uneven_program.py"


def line(process, name):
    found = [text for text in process.stdout().splitlines() if text.startswith(name + " ")]
    assert found, process.stderr()
    return json.loads(found[0].removeprefix(name))


@pytest.mark.parametrize("size", [2, 4])
def test_without_join_each_rank_is_told_what_differs_and_what_to_do(launcher, size):
    ranks = launcher.plain(PROGRAM, size)
    for rank in ranks:
        rank.await_line("batches")
    started = time.monotonic()
    assert all(rank.wait() != 0 for rank in ranks)
    assert time.monotonic() - started < 30
    assert len({line(rank, "batches") for rank in ranks}) > 1
    for rank in ranks:
        text = rank.stderr()
        assert "[resilient:MISMATCH]" in text, text
        assert "barrier" in text and "uneven_program.py:" in text
        assert "torch_resilient.join(model)" in text and "drop_last" in text


@pytest.mark.parametrize("size", [2, 4])
def test_with_join_it_trains(launcher, size):
    ranks = launcher.plain(PROGRAM, size, "--join")
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].stderr()
    results = [line(rank, "result") for rank in ranks]
    assert len({result["batches"] for result in results}) > 1
    assert all(result["weights"] == results[0]["weights"] for result in results)
    warning = "torch_resilient.join: a rank whose batches have run out"
    assert [rank.stderr().count(warning) for rank in ranks] == [1] + [0] * (size - 1)
