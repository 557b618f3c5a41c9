"""Asynchronous checkpoints whose helper processes inherit the variables of their ranks."""

import pytest

WAYS = {
    "by name": (["--backend", "resilient"], {}),
    "taken over": ([], {"RESILIENT_TAKE_OVER": "gloo"}),
}


@pytest.mark.parametrize("way", ["by name", pytest.param("taken over", marks=pytest.mark.slow)])
def test_the_helper_processes_open_a_world_beside_ours(launcher, tmp_path, way):
    arguments, environment = WAYS[way]
    ranks = launcher.plain(
        "checkpoint_program.py", 2, *arguments, "--folder", tmp_path, **environment
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr()
    assert [rank.after("backend") for rank in ranks] == ["resilient"] * 2
    assert len(list(tmp_path.glob("*/__*.distcp"))) == 4
