"""Multi-scale buckets under accelerate: incident 5, ranks have different numbers of batches."""

import pytest

PROGRAM = "buckets_program.py"
OURS = ("--backend", "resilient")
KNOWN_SECONDS = 2


def diverged(ranks):
    """When the first of them had no more batches, and which one it was."""
    epochs = {}
    for number, rank in enumerate(ranks):
        if "epoch 0 " in rank.stdout():
            epochs[number] = float(rank.after("epoch").split()[-1])
    return min((time, number) for number, time in epochs.items())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_different_numbers_of_batches_are_told_what_differs(launcher, size):
    ranks = launcher.plain(PROGRAM, size, *OURS)
    assert all(rank.wait() == 1 for rank in ranks), ranks[0].stdout()
    when, who = diverged(ranks)
    for rank in ranks:
        assert rank.time_of("failed") - when < KNOWN_SECONDS
        text = rank.stderr()
        assert "[resilient:MISMATCH]" in text, text
        assert f"rank {who} " in text.split("[resilient:MISMATCH]")[1]
        assert "all_reduce(float32[20], sum) at accelerator.py:" in text and " backward" in text
        assert "barrier() at state.py:" in text and " wait_for_everyone" in text
        assert "result" not in rank.stdout()


def test_a_rank_that_has_ended_meanwhile_is_named_by_those_who_need_it(launcher):
    ranks = launcher.plain(PROGRAM, 2, *OURS, "--leave")
    codes = [rank.wait() for rank in ranks]
    when, who = diverged(ranks)
    other = 1 - who
    assert codes[who] == 0 and codes[other] == 1
    assert ranks[other].time_of("failed") - when < KNOWN_SECONDS
    text = ranks[other].stderr()
    assert f"[resilient:LEFT] rank {who} " in text and "all_reduce(float32[20], sum)" in text


@pytest.mark.slow
def test_with_one_ratio_all_have_the_same_number_and_train(launcher):
    ranks = launcher.plain(PROGRAM, 4, *OURS, "--ratios", 1)
    assert [rank.wait() for rank in ranks] == [0] * 4, ranks[0].stderr()
    assert all(rank.result() == {"steps": [15, 15]} for rank in ranks)
