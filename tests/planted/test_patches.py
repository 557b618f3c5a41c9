"""Each planted fault can be planted still: run.py, which takes a while, runs seldom."""

import subprocess

import pytest
import run


@pytest.mark.skipif(not (run.ROOT / ".git").exists(), reason="patches are applied by git")
@pytest.mark.parametrize("patch", sorted(run.PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_a_planted_fault_applies_and_says_what_finds_it(patch):
    what, finder = run.read(patch)
    assert what and finder
    applied = subprocess.run(
        ["git", "apply", "--check", patch], cwd=run.ROOT, capture_output=True, text=True
    )
    assert applied.returncode == 0, applied.stderr
