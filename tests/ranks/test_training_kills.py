"""A training script that is not a toy loses ranks again and again and ends with the same bits."""

import pytest
import training_run


def check(tmp_path, kills, steps, seed, seconds):
    """A run with so many kills against one without. Its loader works in the ranks themselves, which
    must make no difference either."""
    calm, _ = training_run.run(tmp_path, "calm", "--steps", steps, "--workers", 0, seconds=seconds)
    plan = training_run.Kills(kills, steps, seed)
    killed, lines = training_run.run(
        tmp_path,
        "killed",
        *("--steps", steps, "--checkpoint", tmp_path / "checkpoint"),
        kills=plan,
        seconds=seconds,
    )
    assert len(plan.sent) == kills
    assert killed == calm, plan.sent
    assert killed["steps"] == steps and killed["buckets"] >= 3
    # Each sample once in each epoch.
    assert killed["seen"] == [steps // training_run.STEPS_PER_EPOCH] * 2
    assert any('"event": "recovered"' in line for line in lines)


def test_two_kills(tmp_path):
    check(tmp_path, 2, 20, 1, 120)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    check(tmp_path, 20, 60, 2, 300)


@pytest.mark.slow
def test_torchrun_begins_anew_from_the_checkpoint(tmp_path):
    """It restarts all ranks: what they held is gone, and the checkpoint has the same bits."""
    calm, _ = training_run.run(tmp_path, "calm", "--workers", 0, seconds=120)
    plan = training_run.Kills(2, 20, 4, replaced=False)
    checkpoint = tmp_path / "checkpoint"
    restarted, lines = training_run.run(
        tmp_path,
        "restarted",
        *("--checkpoint", checkpoint),
        launcher=[*training_run.TORCHRUN, "--max-restarts", 2],
        kills=plan,
        seconds=240,
    )
    assert restarted == calm, plan.sent
    assert sum("begins at step" in line for line in lines) >= 1


@pytest.mark.soak
def test_two_hundred_kills(tmp_path):
    check(tmp_path, 200, 400, 3, 3000)
