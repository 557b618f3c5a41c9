"""A death is known at once on the host where it happens, however much memory the process had."""

import ctypes
import signal
import time

import pytest
import torch.distributed as dist
from harness import settled, thread_names
from losses import outlive
from memory import touch
from rank_server import hear, tell

import torch_resilient

KNOWN_SECONDS = 0.5
GRACE_SECONDS = 0.3  # For the exception to leave the call, on a busy machine.
GIB = 1 << 30


def watch_threads(expected):
    return settled(lambda: thread_names().count("res-watch"), expected)


def lose(victim, size):
    dist.init_process_group("resilient")
    kept = [touch(size)] if dist.get_rank() == victim else []
    error = outlive(victim)
    raised = time.time()
    kept.clear()
    return torch_resilient.last_incident()["known"], raised, str(error)


def kill_with(world, size, env=None):
    """For each survivor (known, raised, text), in seconds after the kill; and whether the victim
    was still being torn down when all of them had raised."""
    victim = 1
    ranks = world.start(lose, 3, victim, size, env=env)
    for rank in ranks:
        assert rank.told(60) == "ready"
    _, killed = ranks[victim].signal()
    seen = [ranks[number].outcome(30) for number in (0, 2)]
    before_its_end = ranks[victim].alive()
    for number in (0, 2):
        ranks[number].wait()
    assert ranks[victim].wait() == -signal.SIGKILL
    assert all(outcome and outcome[0] == "returned" for outcome in seen), seen
    values = [(known - killed, raised - killed, text) for _, (known, raised, text) in seen]
    return values, before_its_end


@pytest.mark.parametrize(
    "gib", [pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_known_before_its_memory_is_given_back(world, gib):
    seen, before_its_end = kill_with(world, gib * GIB)
    for known, raised, text in seen:
        assert known < KNOWN_SECONDS
        assert raised < KNOWN_SECONDS + GRACE_SECONDS
        assert "was killed by signal 9 (SIGKILL)" in text
    assert before_its_end


def test_how_it_ended_is_known_without_a_launcher(world):
    seen, _ = kill_with(world, GIB)  # Gone after 0.2 s: the store's own watch comes later.
    for known, _, text in seen:
        assert known < KNOWN_SECONDS
        assert "was killed by signal 9 (SIGKILL)" in text


def test_without_the_watch_other_evidence_decides(world):
    seen, _ = kill_with(world, GIB // 4, env={"RESILIENT_HOST_WATCH": "0"})
    for known, _, text in seen:
        assert known < KNOWN_SECONDS + 1
        assert "SIGKILL" not in text


def exits_at_once(victim):
    dist.init_process_group("resilient")
    if dist.get_rank() == victim:
        kept = touch(GIB)  # Likewise.
        dist.barrier()
        # The system call alone: os._exit has a word to say.
        ctypes.CDLL(None)._exit(3 if len(kept) else 4)
    # Perhaps in the first one already, where the victim leaves it earlier.
    with pytest.raises(torch_resilient.RankLostError) as caught:
        for _ in range(2):
            dist.barrier()
    return str(caught.value)


def test_an_exit_without_goodbye_is_known_with_its_code(world):
    ranks = world.start(exits_at_once, 3, 1)
    for number in (0, 2):
        assert "exited with code 3" in ranks[number].value()
    assert ranks[1].wait() == 3


def comes_and_goes(watching):
    counts = []
    for _ in range(2):
        dist.init_process_group("resilient")
        dist.barrier()
        counts.append(watch_threads(watching))
        dist.destroy_process_group()
        counts.append(watch_threads(0))
    return counts


@pytest.mark.parametrize("size, watching", [(1, 0), (2, 1)])
def test_the_thread_is_there_while_there_is_somebody_to_watch(world, size, watching):
    assert world.run(comes_and_goes, size, watching) == [[watching, 0] * 2] * size


def leaves_first():
    dist.init_process_group("resilient")
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return None
    assert hear() == "it has ended"
    return torch_resilient.failure()


def test_the_end_of_a_process_that_has_left_is_no_death(world):
    ranks = world.start(leaves_first, 3)
    ranks[1].value()
    for number in (0, 2):
        ranks[number].say("it has ended")
    for number in (0, 2):
        assert ranks[number].value() is None


def stops_and_goes_on():
    dist.init_process_group("resilient")
    dist.barrier()
    tell("ready")
    if dist.get_rank() == 1:
        hear()
    dist.barrier()
    return torch_resilient.failure()


def test_a_stopped_rank_is_not_dead(world):
    ranks = world.start(stops_and_goes_on, 2)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal(signal.SIGSTOP)
    # Killed it would be known within this time.
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(KNOWN_SECONDS)
    ranks[1].signal(signal.SIGCONT)
    ranks[1].say("go")
    for rank in ranks:
        assert rank.value() is None
