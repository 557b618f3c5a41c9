"""Every situation of `situations` with resilient: it trains, or ends with an error that says why.

Method: each is a small program, started as its users start it, as processes of its own. What Gloo
makes of the same is in docs/compatibility.md (`make compatibility`).
"""

import shutil
import subprocess

import pytest
from situations import registry, runner
from situations.situation import Situation

MAY = {
    "mounts": ["unshare", "-m", "true"],
    "network": ["unshare", "-n", "true"],
    "names": ["unshare", "-u", "true"],
}


def missing(situation):
    """What this machine lacks for it."""
    for need in situation.needs:
        command = MAY.get(need, ["which", need])
        found = shutil.which(command[0])
        if not found or subprocess.run(command, capture_output=True).returncode != 0:
            return need
    return None


def case(situation):
    marks = [] if situation.quick else [pytest.mark.slow]
    if situation.shortfall:
        marks.append(pytest.mark.xfail(strict=True, reason=situation.shortfall))
    return pytest.param(situation, id=situation.name.replace(" ", "_"), marks=marks)


def test_names_are_names_of_one():
    names = [situation.name for situation in registry.ALL]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("situation", list(map(case, registry.ALL)))
def test_it_is_right(situation):
    if need := missing(situation):
        pytest.skip(f"this machine has no {need}, or does not allow it")
    outcome = runner.run(situation, "resilient")
    assert not runner.fault(situation, outcome), outcome.text
    assert set(outcome.trained) <= {"resilient"}


def outcome(codes, trained=0, text="", failures=(), left=()):
    return runner.Outcome(1.25, codes, ["gloo"] * trained, list(failures), text, list(left))


TRAINS = Situation("one", "")
ENDS = Situation("one", "", ends="port")
FAILED = "Traceback\nValueError: a port | no number\n"


@pytest.mark.parametrize(
    ("situation", "found", "words", "fault"),
    [
        (TRAINS, outcome([0, 0], 2), "trains, 1.2 s", ""),
        (TRAINS, outcome([0, None], 2), "hangs (cut off after 60 s)", "it hangs"),
        (TRAINS, outcome([0, 0], 1), "exit code 0, but 1 of 2 trained", "1 of 2 trained"),
        (TRAINS, outcome([0, -6], 2), "trains, then ends by SIGABRT, 1.2 s", "exit codes [0, -6]"),
        (TRAINS, outcome([0, 0], 2, left=["x"]), "trains, 1.2 s", "processes are left"),
        (ENDS, outcome([1, 1], 0, FAILED), "ends: `ValueError: a port ' no number`, 1.2 s", ""),
        (ENDS, outcome([1, 0], 0, FAILED), "ends: `ValueError", "exit codes [1, 0]"),
        (ENDS, outcome([1, 1], 0, "", ["x"]), "ends: `x`, 1.2 s", "no word of 'port'"),
    ],
)
def test_an_outcome_in_words(situation, found, words, fault):
    assert runner.words(found, situation).startswith(words)
    assert runner.fault(situation, found).startswith(fault)
    assert bool(fault) == bool(runner.fault(situation, found))
