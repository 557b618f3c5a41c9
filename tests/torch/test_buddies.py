"""Per-rank parts of a State in the memory of other ranks.

Goal: what only one rank has outlives it, however large, as long as its buddy lives; a commit that
is not complete is never used. Method: real ranks with parts that no store would take, killed alone,
one after the other, together, and in the middle of a commit.
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from rank_server import hear, tell

import torch_resilient
from torch_resilient import State, _buddies, elastic

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
STEPS = 6
ELEMENTS = 9 << 20  # Bytes; the store takes 8 MiB.


@given(some.lists(some.sampled_from("abcd"), min_size=1, max_size=40))
def test_each_has_one_on_another_host_where_that_can_be(hosts):
    buddies = _buddies.choose(hosts)
    size = len(hosts)
    assert sorted(buddies) == list(range(size))
    if size > 1:
        assert all(buddy != rank for rank, buddy in enumerate(buddies))
    near = sum(hosts[buddy] == hosts[rank] for rank, buddy in enumerate(buddies))
    most = max(hosts.count(host) for host in hosts)
    assert near == max(0, 2 * most - size)


def make_state():
    own = {"shard": torch.zeros(ELEMENTS, dtype=torch.uint8), "history": []}
    return State(step=0, per_rank=own, keep_per_rank="buddy")


def learn(state):
    total = torch.tensor([dist.get_rank() + state.step])
    dist.all_reduce(total)
    state.shard += dist.get_rank() + 1
    state.shard[state.step] = total.item()
    state.history = [*state.history, (dist.get_rank(), state.step, total.item())]
    state.step += 1


def stops_at(steps, newcomer):
    """A run whose ranks wait at some steps for what the test does; each step once in the job."""
    dist.init_process_group("resilient")
    state = make_state()
    waited = set(steps[: steps.index(newcomer) + 1]) if newcomer is not None else set()

    def run(state):
        while state.step < STEPS:
            if state.step in steps and state.step not in waited:
                waited.add(state.step)
                dist.barrier()  # The commit of that step is complete.
                tell(state.step)
                hear()
            learn(state)
            state.commit()

    elastic(run)(state)
    result = state.shard[:STEPS].tolist(), int(state.shard[STEPS:].sum()), state.history
    dist.destroy_process_group()
    return result


def expected(size):
    totals = [sum(rank + step for rank in range(size)) for step in range(STEPS)]
    rest = [(rank + 1) * STEPS for rank in range(size)]
    return [
        (
            [totals[step] + (rank + 1) * (STEPS - 1 - step) for step in range(STEPS)],
            rest[rank] * (ELEMENTS - STEPS),
            [(rank, step, totals[step]) for step in range(STEPS)],
        )
        for rank in range(size)
    ]


def lose(world, size, victims):
    """`victims`: by step, who is killed there; all are replaced. The ranks, still running."""
    steps = sorted(victims)
    ranks = world.start(stops_at, size, steps, None, env=WAIT)
    for step in steps:
        for rank in ranks:
            assert rank.told() == step
        for victim in victims[step]:
            ranks[victim].signal()
        for number, rank in enumerate(ranks):
            if number not in victims[step]:
                rank.say("go on")
        for victim in victims[step]:
            assert ranks[victim].wait() == -signal.SIGKILL
            ranks[victim] = world.start_rank(stops_at, victim, size, steps, step, env=WAIT)
    return ranks


@pytest.mark.parametrize(
    "victims",
    [{2: [0]}, {0: [1]}, {2: [1], 3: [2], 4: [1]}, {2: [0, 2]}],
    ids=["one", "at the first step", "one after the other", "two that are no buddies"],
)
def test_replaced_ranks_have_their_parts_again(world, victims):
    ranks = lose(world, 4, victims)
    assert [rank.value(60) for rank in ranks] == expected(4)


def test_a_rank_and_its_buddy_lost_together_are_missed_by_name(world):
    ranks = lose(world, 4, {2: [1, 2]})
    for rank in ranks:
        error = rank.error(60)
        assert isinstance(error, torch_resilient.CommError)
        assert "of commit 3 the per-rank part of ranks [1] is missing" in str(error)
        assert "both a rank and its buddy" in str(error)
        rank.wait()


def commits_late(newcomer):
    dist.init_process_group("resilient")
    state = make_state()

    def run(state):
        learn(state)
        dist.barrier()
        if not newcomer:
            tell("learned")
            hear()
        learn(state)
        state.commit()

    elastic(run)(state)
    dist.destroy_process_group()


def test_they_are_missed_where_nothing_but_the_start_was_committed(world):
    ranks = world.start(commits_late, 4, False, env=WAIT)
    for rank in ranks:
        assert rank.told() == "learned"
    for victim in (1, 2):
        ranks[victim].signal()
    for survivor in (0, 3):
        ranks[survivor].say("go on")
    for victim in (1, 2):
        ranks[victim] = world.start_rank(commits_late, victim, 4, True, env=WAIT)
    for rank in ranks:
        error = rank.error(60)
        assert isinstance(error, torch_resilient.CommError)
        assert "of commit 1 the per-rank part of ranks [1] is missing" in str(error)
        rank.wait()


class _Dies:
    """Of a rank, in a commit: before it has given its part away, or behind that."""

    def __init__(self, when, commit):
        self.when, self.commit, self.commits = when, commit, 0
        self.swap = _buddies.swap

    def __call__(self, part, buddies):
        self.commits += 1
        if self.commits == self.commit and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        swapped = self.swap(part, buddies)
        if self.commits == self.commit and self.when == "behind":
            os.kill(os.getpid(), signal.SIGKILL)
        return swapped


def dies_in_commit(victim, when):
    if int(os.environ["RANK"]) == victim:
        _buddies.swap = _Dies(when, 3)
    return stops_at([], None)


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_a_commit(world, victim, when):
    ranks = world.start(dies_in_commit, 3, victim, when, env=WAIT)
    assert ranks[victim].wait() == -signal.SIGKILL
    ranks[victim] = world.start_rank(stops_at, victim, 3, [], None, env=WAIT)
    assert [rank.value(60) for rank in ranks] == expected(3)


def keeps_at(places):
    dist.init_process_group("resilient")
    state = State(step=0, keep_per_rank=places[dist.get_rank()])
    with pytest.raises(torch_resilient.ConfigError, match=r"by rank: \['store', 'buddy'\]"):
        state.sync()
    dist.destroy_process_group()


def test_all_ranks_keep_them_at_one_place(world):
    world.run(keeps_at, 2, ("store", "buddy"))
    with pytest.raises(ValueError, match="keep_per_rank='disk'"):
        State(step=0, keep_per_rank="disk")


def alone():
    dist.init_process_group("resilient")
    state = make_state()
    elastic(lambda state: (learn(state), state.commit()))(state)
    dist.destroy_process_group()
    return state.step


def test_a_world_of_one_has_no_buddy(world):
    assert world.run(alone, 1) == [1]
