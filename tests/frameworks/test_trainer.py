"""transformers' Trainer: the main process is late."""

import pytest

PROGRAM = "trainer_program.py"


def assert_trained(ranks):
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].stderr()
    first, second = (rank.result() for rank in ranks)
    assert first["backend"] == second["backend"] == "resilient"
    assert first["weights"] == second["weights"] and first["loss"] != second["loss"]


@pytest.mark.slow
def test_our_name_in_training_arguments(launcher):
    assert_trained(launcher.plain(PROGRAM, 2, "--backend", "resilient", "--late", 4))


def test_a_program_for_gloo_is_taken_over(launcher):
    taken = {"RESILIENT_TAKE_OVER": "gloo"}
    assert_trained(launcher.plain(PROGRAM, 2, "--late", 2, **taken))


@pytest.mark.slow
def test_the_command_line_of_transformers_takes_names_of_its_own_only(launcher):
    """So that docs/operations.md has to name RESILIENT_TAKE_OVER for it."""
    rank, *_ = launcher.plain(PROGRAM, 1, "--backend", "resilient", "--command-line")
    assert rank.wait() == 2
    assert "invalid choice: 'resilient'" in rank.stderr()
