"""agree: all ranks decide the same, or all raise the same.

Goal: no two ranks ever have different outcomes of one agreement, whoever is late, leaves or dies in
the midst of it. Method: real ranks on a real store; kills at random moments, whose seed is printed.
"""

import ctypes
import os
import random
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell

import torch_resilient
from torch_resilient import agree

SIZE = 3
LINES = {"RESILIENT_WAIT_LOG": "1s"}


def combines():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    answers = [
        agree(True),
        agree(rank != 1),
        agree(0b1110 | (rank == 0)),
        agree(-1 if rank else 6),
        agree(-8),
        agree(1 << 63),
    ]
    with pytest.raises(torch_resilient.ConfigError, match=r"by rank: \['bool', 'int', 'int'\]"):
        agree(1 if rank else True)
    for wrong in (1.0, None, "yes", [True], 1 << 64):
        with pytest.raises(torch_resilient.ConfigError, match="a bool, or an int"):
            agree(wrong)
    answers.append(agree(True))
    dist.destroy_process_group()
    return answers


def test_bools_and_bits_are_combined(world):
    values = world.run(combines, SIZE)
    assert values == [[True, False, 0b1110, 6, -8, 1 << 63, True]] * SIZE
    assert [type(value) for value in values[0]] == [bool, bool, int, int, int, int, bool]


def test_without_a_session():
    with pytest.raises(torch_resilient.ConfigError, match="init_process_group"):
        agree(True)


def outcome(value=True):
    """What came of one agreement."""
    try:
        return agree(value)
    except torch_resilient.ResilientError as error:
        return error.code, error.rank


def waits_for_one(how):
    dist.init_process_group("resilient")
    assert agree(True)
    tell("ready")
    if dist.get_rank() == 1:
        if how == "leaves first":
            dist.destroy_process_group()
            tell("left")
            return None
        if hear() == "leave":
            dist.destroy_process_group()
            return None
    if how == "leaves first":
        hear()
    return outcome(), outcome()


def test_a_rank_that_dies_before_it_votes(world):
    ranks = world.start(waits_for_one, SIZE, "is killed")
    for rank in ranks:
        assert rank.told() == "ready"
    assert ranks[0].outcome(0.5) is None
    ranks[1].signal()
    for rank in (ranks[0], ranks[2]):
        assert rank.value(20) == (("RANK_LOST", 1), ("RANK_LOST", 1))


@pytest.mark.parametrize("how", ["leaves first", "leaves while the others wait"])
def test_a_rank_that_leaves_before_it_votes(world, how):
    ranks = world.start(waits_for_one, SIZE, how)
    for rank in ranks:
        assert rank.told() == "ready"
    if how == "leaves first":
        assert ranks[1].told() == "left"
        for rank in (ranks[0], ranks[2]):
            rank.say("go")
    else:
        assert ranks[0].outcome(0.5) is None
        ranks[1].say("leave")
    for rank in (ranks[0], ranks[2]):
        assert rank.value(20) == (("LEFT", 1), ("LEFT", 1))
    ranks[1].value(20)


def late():
    dist.init_process_group("resilient")
    if dist.get_rank() == 2:
        hear()
    answers = agree(True), agree(dist.get_rank() == 2)
    dist.destroy_process_group()
    return answers


def test_a_late_rank_is_waited_for_and_named(world):
    ranks = world.start(late, SIZE, env=LINES)
    pattern = (
        r"rank [01] has waited \d+ s in agree\(\) number 1 of generation 1: \d of 3 arrived;"
        r" missing ranks (\d, )?2; none of them was lost"
    )
    deadline = time.monotonic() + 30
    while min(len(re.findall(pattern, rank.stderr())) for rank in ranks[:2]) < 2:
        assert time.monotonic() < deadline, [rank.stderr() for rank in ranks]
        assert ranks[0].outcome(0.1) is None
    ranks[2].say("go")
    assert [rank.value(20) for rank in ranks] == [(True, False)] * SIZE
    # In the second one it may be the others that are late.
    assert "agree() number 1 " not in ranks[2].stderr()


def agrees_until_it_fails(victim, delay):
    dist.init_process_group("resilient")
    tell("ready")  # The kill must not come while another is still in its init.
    if dist.get_rank() == victim:
        hear()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    outcomes = []
    while True:
        outcomes.append(outcome(len(outcomes) % 7 != 3))
        if isinstance(outcomes[-1], tuple):
            return outcomes


@pytest.mark.slow
def test_a_kill_at_any_moment_divides_nobody(world):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    agreed = 0
    for number in range(20):
        world.job += "x"
        victim = number % SIZE
        ranks = world.start(agrees_until_it_fails, SIZE, victim, chance.random() * 0.1)
        for rank in ranks:
            assert rank.told() == "ready"
        ranks[victim].say("go")
        survivors = [rank.value(30) for rank in ranks if rank is not ranks[victim]]
        assert survivors[0] == survivors[1]
        assert survivors[0][-1] == ("RANK_LOST", victim)
        assert all(answer is (index % 7 != 3) for index, answer in enumerate(survivors[0][:-1]))
        agreed += len(survivors[0]) - 1
        ranks[victim].wait(10)
    assert agreed > 0


def holds_the_gil_while_it_waits():
    """For rank 0 the answer and the news of a fence are there before it can look at either."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    if rank == 0:

        def hold():
            hear()
            tell("holds")
            ctypes.PyDLL(None).usleep(3_000_000)

        threading.Thread(target=hold).start()
    else:
        hear()
    answers = [outcome()]
    if rank != 0:
        tell(answers[0])
    if rank == 2:
        signal.pause()
    return [*answers, outcome()]


def test_an_answer_counts_that_is_there_when_the_fence_comes(world):
    ranks = world.start(holds_the_gil_while_it_waits, SIZE)
    assert ranks[0].outcome(0.5) is None
    ranks[0].say("hold")
    assert ranks[0].told() == "holds"
    # By now it looks for signals, for which it needs the GIL, and not for an answer.
    assert ranks[0].outcome(0.5) is None
    for rank in ranks[1:]:
        rank.say("go")
    assert [rank.told() for rank in ranks[1:]] == [True, True]
    ranks[2].signal()
    assert [rank.value(20) for rank in ranks[:2]] == [[True, ("RANK_LOST", 2)]] * 2


def across_a_failure(first):
    dist.init_process_group("resilient")
    if first:
        assert [agree(True) for _ in range(3)] == [True] * 3
        outlive(1)
        hear()
        torch_resilient.rebuild()
    answers = [agree(dist.get_rank() != 2), agree(5)]
    dist.destroy_process_group()
    return answers


def test_survivors_and_newcomers_agree(world):
    wait = {"RESILIENT_SEAT_WAIT": "30s"}
    ranks = world.start(across_a_failure, SIZE, True, env=wait)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(across_a_failure, 1, SIZE, False, env=wait)
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    assert [rank.value(30) for rank in ranks] == [[False, 5]] * SIZE


def interrupted():
    dist.init_process_group("resilient")
    if dist.get_rank() == 1:
        hear()
    else:
        with pytest.raises(KeyboardInterrupt):
            tell("waits")
            agree(True)
        tell("again")
    answer = agree(dist.get_rank() == 0)
    dist.destroy_process_group()
    return answer


def test_ctrl_c_ends_the_wait_and_takes_the_vote_back(world):
    ranks = world.start(interrupted, 2)
    assert ranks[0].told() == "waits"
    assert ranks[0].outcome(0.5) is None
    ranks[0].signal(signal.SIGINT)
    assert ranks[0].told() == "again"
    ranks[1].say("go")
    assert [rank.value(20) for rank in ranks] == [False, False]
