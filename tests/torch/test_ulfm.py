"""The four verbs of torch_resilient.ulfm.

Goal: revoke, failed, agree and shrink do among ranks that die what MPI's User Level Failure
Mitigation promises. Method: real ranks on a real store, some of which are killed.
"""

import importlib
import os
import random
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell

import torch_resilient
from torch_resilient import ulfm


def test_it_is_reached_without_an_import_of_its_own():
    assert torch_resilient.ulfm is importlib.import_module("torch_resilient.ulfm")
    assert "ulfm" in dir(torch_resilient)


@pytest.mark.parametrize("verb", [ulfm.revoke, ulfm.failed, ulfm.shrink, lambda: ulfm.agree(True)])
def test_without_a_session(verb):
    with pytest.raises(torch_resilient.ConfigError, match="init_process_group"):
        verb()


def total():
    """A digit for each rank, by its first number, that took part."""
    number = torch.tensor([10.0 ** int(os.environ["RANK"])])
    dist.all_reduce(number)
    return number.item()


def shrinks():
    dist.init_process_group("resilient")
    assert ulfm.failed() == []
    began = time.time()
    before = torch_resilient.membership()["members"]
    outlive(1)
    lost = ulfm.failed()
    membership = ulfm.shrink()
    assert began < lost[0]["known"] < time.time()
    assert ulfm.failed() == []
    return before, lost, membership["rank"], total()


def test_failed_tells_of_a_loss_until_it_is_acknowledged(world):
    ranks = world.start(shrinks, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for place, rank in enumerate((ranks[0], ranks[2])):
        before, (lost,), number, seen = rank.value(20)
        assert (number, seen) == (place, 101.0)
        assert {name: lost[name] for name in before[1]} == before[1]
        assert (lost["rank"], lost["pid"], lost["code"]) == (1, ranks[1].pid, "RANK_LOST")
        assert "rank 1" in lost["how"]
        # Whether a rank of its host or the store's is the first to see its end is chance.
        assert re.search("signal 9|its process ended", lost["how"]), lost


def loses_a_second(first):
    rebuilt = threading.Event()
    torch_resilient.on_event(lambda event: event["event"] == "rebuilt" and rebuilt.set())
    dist.init_process_group("resilient")
    if not first:
        return total()
    outlive(1)
    tell([entry["rank"] for entry in ulfm.failed()])
    if dist.get_rank() == 2:
        hear()  # Nothing: it is killed while the seat of rank 1 is empty.
    assert rebuilt.wait(30)
    tell([(entry["rank"], entry["code"]) for entry in ulfm.failed()])
    torch_resilient.rebuild()
    assert ulfm.failed() == []
    return total()


def test_failed_tells_of_a_loss_that_ended_no_generation(world):
    wait = {"RESILIENT_SEAT_WAIT": "30s"}
    ranks = world.start(loses_a_second, 4, True, env=wait)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for number in (0, 2, 3):
        assert ranks[number].told() == [1]
    ranks[2].signal()
    ranks[2].wait(10)
    for number in (1, 2):
        ranks[number] = world.start_rank(loses_a_second, number, 4, False, env=wait)
    for number in (0, 3):
        assert ranks[number].told() == [(1, "RANK_LOST"), (2, None)]
    assert [rank.value(30) for rank in ranks] == [1111.0] * 4


def too_few():
    dist.init_process_group("resilient")
    outlive(1)
    with pytest.raises(torch_resilient.RankLostError) as caught:
        ulfm.shrink(min_world=3)
    tell("refused")
    hear()
    return caught.value.rank, ulfm.shrink(min_world=2)["rank"]


def test_shrink_to_less_than_wanted_raises_the_first_cause(world):
    ranks = world.start(too_few, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for number in (0, 2):
        assert ranks[number].told() == "refused"
    for number in (0, 2):
        ranks[number].say("go")
    assert [ranks[0].value(20), ranks[2].value(20)] == [(1, 0), (1, 1)]


def revoked(who, go_on):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    assert torch_resilient.agree(True)  # Unlike a barrier, nobody is in it when another revokes.
    if rank in who:
        ulfm.revoke("the loss\nis not finite")
        ulfm.revoke("once more")  # What is over cannot end again.
    else:
        with pytest.raises(torch_resilient.CommError):
            # Not all will come to it: rank 1 waits for rank 0, and that for rank 2. No circle.
            dist.barrier(pair if rank == 0 else None)
    seen = []
    for group in [None, pair] if rank != 1 else [None]:
        with pytest.raises(torch_resilient.CommError) as caught:
            dist.barrier(group)
        seen.append((caught.value.code, caught.value.rank in who))
        assert "revoke(): the loss is not finite" in str(caught.value)
    assert ulfm.failed() == []
    before = torch_resilient.membership()["members"]
    membership = ulfm.shrink() if go_on == "shrink" else torch_resilient.rebuild()
    assert membership["members"] == before
    return set(seen), membership["generation"], total()


@pytest.mark.parametrize("who", [(2,), (0, 1, 2)])
@pytest.mark.parametrize("go_on", ["shrink", "rebuild"])
def test_a_revoked_generation_is_over_on_all_ranks_and_loses_none(world, who, go_on):
    expected = ({("COMM_FAILED", True)}, 2, 111.0)
    assert world.run(revoked, 3, who, go_on) == [expected] * 3


def revokes_for_a_number():
    dist.init_process_group("resilient")
    with pytest.raises(torch_resilient.ConfigError, match="the reason is a text"):
        ulfm.revoke(7)
    return total()


def test_a_reason_that_is_no_text(world):
    assert world.run(revokes_for_a_number, 1) == [1.0]


def agrees():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    answers = [ulfm.agree(True), ulfm.agree(rank != 1), ulfm.agree(0b1110 | (rank == 0))]
    with pytest.raises(torch_resilient.ConfigError, match=r"by rank: \['bool', 'int', 'int'\]"):
        ulfm.agree(1 if rank else True)
    with pytest.raises(torch_resilient.ConfigError, match="a bool, or an int"):
        ulfm.agree(None)
    return [*answers, ulfm.agree(-8)]


def test_agree_among_all(world):
    expected = [(True, ()), (False, ()), (0b1110, ()), (-8, ())]
    assert world.run(agrees, 3) == [expected] * 3


def agrees_over_a_loss(begins):
    """Some vote before the loss and some behind it, of a generation that is revoked as well."""
    dist.init_process_group("resilient")
    rank = int(os.environ["RANK"])
    dist.barrier()
    tell("ready")
    if rank == 1:
        hear()
    if rank not in begins:
        hear()
    answers = [ulfm.agree(rank != 0)]
    ulfm.revoke("to see whether it matters")
    answers.append(ulfm.agree(rank + 4))
    with pytest.raises(torch_resilient.ResilientError):
        dist.barrier()
    place = ulfm.shrink()["rank"]
    return [*answers, ulfm.agree(place != 2)], place, total()


@pytest.mark.parametrize("begins", [(0, 2, 3), (0,), ()])
def test_agree_over_a_loss_in_a_generation_that_is_over(world, begins):
    ranks = world.start(agrees_over_a_loss, 4, begins)
    for rank in ranks:
        assert rank.told() == "ready"
    if begins:
        assert ranks[0].outcome(0.5) is None  # It waits: rank 1 is late, and lives.
    ranks[1].signal()
    ranks[1].wait(10)
    for number in {0, 2, 3} - set(begins):
        ranks[number].say("go")
    answers = [(False, (1,)), (4, (1,)), (False, ())]
    for place, number in enumerate((0, 2, 3)):
        assert ranks[number].value(30) == (answers, place, 1101.0)


def agrees_until_one_is_missing(victim, delay):
    dist.init_process_group("resilient")
    tell("ready")  # The kill must not come while another is still in its init.
    if dist.get_rank() == victim:
        hear()
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    answers = [ulfm.agree(True)]
    while not answers[-1].missing:
        answers.append(ulfm.agree(len(answers) % 7 != 3))
    return answers


@pytest.mark.slow
def test_a_kill_at_any_moment_divides_nobody(world):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(8):
        world.job += "x"
        victim = number % 3
        ranks = world.start(agrees_until_one_is_missing, 3, victim, chance.random() * 0.1)
        for rank in ranks:
            assert rank.told() == "ready"
        ranks[victim].say("go")
        survivors = [rank.value(30) for rank in ranks if rank is not ranks[victim]]
        assert survivors[0] == survivors[1]
        assert survivors[0][-1].missing == (victim,)
        ranks[victim].wait(10)


def late():
    dist.init_process_group("resilient")
    if dist.get_rank() == 1:
        hear()
    return ulfm.agree(True)


def test_one_that_is_late_is_waited_for_and_named(world):
    ranks = world.start(late, 2, env={"RESILIENT_WAIT_LOG": "1s"})
    pattern = (
        r"rank 0 has waited \d+ s in ulfm.agree\(\) number 1 of generation 1: 1 of 2 arrived;"
        r" missing ranks 1; those of them that are alive are waited for"
    )
    deadline = time.monotonic() + 30
    while not re.search(pattern, ranks[0].stderr()):
        assert time.monotonic() < deadline, ranks[0].stderr()
        assert ranks[0].outcome(0.1) is None
    ranks[1].say("go")
    assert [rank.value(20) for rank in ranks] == [(True, ())] * 2


def goes_on_without():
    dist.init_process_group("resilient")
    assert torch_resilient.agree(True)  # Unlike a barrier, nobody is in it when another revokes.
    ulfm.revoke()
    if dist.get_rank() == 1:
        hear()
        torch_resilient.rebuild()
        tell("has gone on")
        dist.barrier()
        return None
    answer = ulfm.agree(True)
    torch_resilient.rebuild()
    dist.barrier()
    return answer


def test_one_that_has_gone_on_is_not_waited_for(world):
    ranks = world.start(goes_on_without, 2)
    assert ranks[0].outcome(0.5) is None
    ranks[1].say("go on")
    assert ranks[1].told() == "has gone on"
    assert [rank.value(20) for rank in ranks] == [(True, (1,)), None]


def leaves_instead():
    dist.init_process_group("resilient")
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return None
    return ulfm.agree(True), torch_resilient.failure()


def test_one_that_leaves_is_not_waited_for_and_fences_nobody(world):
    answer = ((True, (1,)), None)
    assert world.run(leaves_instead, 3) == [answer, None, answer]
