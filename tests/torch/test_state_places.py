"""Which elastic run, and which State.

Goal: what a rank has in one run never reaches another one: a process that replaces a lost rank
begins the program from its start, and where the others are past that all ranks get the same
ConfigError and nothing is loaded. Method: programs with several runs, States and agreements, and a
kill at each commit of a later one.
"""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell

import torch_resilient
from torch_resilient import State, elastic

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
SIZE = 3
STEPS = 3


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def die_at(*places):
    """This process ends at these (phase, step), if the test has said so."""

    def die(phase, step):
        if (phase, step) in places:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def train(state, phase, die):
    while state.step < STEPS:
        die(phase, state.step)
        value = torch.full((1,), float(phase))
        dist.all_reduce(value)
        state.sums = [*state.sums, value.item()]
        state.step += 1
        state.commit()
    return state.sums


def tune(state, die):
    state.step = 0
    return train(state, 1, die)


def folds(*places):
    """A State and a run for each fold."""
    dist.init_process_group("resilient")
    die = die_at(*places)
    return [elastic(train)(State(step=0, sums=[]), fold, die) for fold in range(3)]


def phases(*places):
    """One State in two runs."""
    dist.init_process_group("resilient")
    state, die = State(step=0, sums=[]), die_at(*places)
    return [elastic(train)(state, 0, die), elastic(tune)(state, die)]


def phases_in_one_run(*places):
    """What the text of the error tells to do instead."""
    dist.init_process_group("resilient")
    die = die_at(*places)

    def run(state):
        while state.phase < 2:
            train(state, state.phase, die)
            state.phase, state.step = state.phase + 1, 0
        return state.sums

    return elastic(run)(State(phase=0, step=0, sums=[]))


def lost_at(world, function, *places, victim=1, env=WAIT):
    """Ranks of which one is killed there and replaced."""
    ranks = [
        world.start_rank(function, rank, SIZE, *(places if rank == victim else ()), env=env)
        for rank in range(SIZE)
    ]
    assert ranks[victim].wait(30) == -signal.SIGKILL, ranks[victim].stderr()
    ranks[victim] = world.start_rank(function, victim, SIZE, env=env)
    return ranks


def refusals(ranks):
    """The text of the ConfigError that all ranks must have got."""
    errors = [rank.error(30) for rank in ranks]
    for rank in ranks:
        rank.wait(10)
    assert [type(error) for error in errors] == [torch_resilient.ConfigError] * SIZE, errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


@pytest.mark.parametrize(
    ("step", "victim"),
    [(0, 1), (2, 0), *(slow(*place) for place in ((1, 1), (2, 1), (0, 0), (1, 0)))],
)
def test_folds(world, step, victim):
    text = refusals(lost_at(world, folds, (1, step), victim=victim))
    others = ", ".join(str(rank) for rank in range(SIZE) if rank != victim)
    assert f"rank {victim} is in elastic run 1 (train), with its State (step, sums; " in text
    assert f"ranks {others} are in elastic run 2 (train)" in text
    assert "loop over these inside the function" in text and "test_state_places.py:" in text


def test_folds_end_where_nobody_is_lost_or_the_first_one_loses_a_rank(world):
    right = [[SIZE * fold] * STEPS for fold in range(3)]
    assert [rank.value(30) for rank in lost_at(world, folds, (0, 1))] == [right] * SIZE


@pytest.mark.parametrize("step", [slow(0), 1, slow(2)])
def test_one_state_in_two_runs(world, step):
    text = refusals(lost_at(world, phases, (1, step)))
    assert "elastic run 1 (train)" in text and "elastic run 2 (tune)" in text


@pytest.mark.parametrize("place", [slow((0, 2)), (1, 0), slow((1, 2))])
def test_one_run_for_all_phases_heals(world, place):
    ranks = lost_at(world, phases_in_one_run, place)
    assert [rank.value(30) for rank in ranks] == [[0.0] * STEPS + [SIZE] * STEPS] * SIZE


def made_in_the_function(*places):
    """A State of each call of the function, beside the one that the run is about."""
    dist.init_process_group("resilient")
    die = die_at(*places)

    def run(state):
        other = State(seen=dist.get_rank(), sums=[])
        other.sync()
        assert other.commits == 0 and other.seen == 0
        other.commit()
        return train(state, 1, die)

    return elastic(run)(State(step=0, sums=[]))


@pytest.mark.parametrize("step", [slow(0), 1, slow(2)])
def test_a_state_that_the_function_makes_is_another_one_each_time(world, step):
    ranks = lost_at(world, made_in_the_function, (1, step))
    assert [rank.value(30) for rank in ranks] == [[SIZE] * STEPS] * SIZE


def two_states(newcomer):
    """Without elastic."""
    dist.init_process_group("resilient")
    first, second = State(step=0), State(step=0, best=0.0)
    first.sync()
    if not newcomer:
        second.sync()
        second.step = 7
        second.commit()
        outlive(1)
        hear()
        torch_resilient.rebuild()
    second.sync()


def test_without_elastic_another_state(world):
    ranks = world.start(two_states, SIZE, False, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(two_states, 1, SIZE, True, env=WAIT)
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    text = refusals(ranks)
    assert "rank 1 is outside of elastic, with its State (step; " in text
    assert "State number 2 used in it (step, best; " in text


def agrees_after(newcomer):
    dist.init_process_group("resilient")
    if not newcomer:
        elastic(lambda state: None)(State(step=0))
        outlive(1)
        hear()
        torch_resilient.rebuild()
    torch_resilient.agree(True)


def test_an_agreement_of_ranks_in_different_runs(world):
    ranks = world.start(agrees_after, SIZE, False, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(agrees_after, 1, SIZE, True, env=WAIT)
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    assert "['after elastic run 1', 'outside of elastic', 'after" in refusals(ranks)


def looks_for_parts():
    """What a run leaves in the store, and what a State does when its run is over."""
    dist.init_process_group("resilient")
    state, keys = State(step=0, sums=[], per_rank={"mine": dist.get_rank()}), []

    def run(state):
        train(state, 1, die_at())
        keys.extend(state._part_key(*part) for part in state._parts)

    elastic(run)(state)
    store = torch_resilient._api.current_world().store
    left = [key for key in keys if store.check([key])]
    state.step = 5
    state.restore()
    values = state.step, state.commits
    state.sync()
    assert (state.step, state.mine, state.commits) == (STEPS, dist.get_rank(), 0)
    state.commit()
    dist.destroy_process_group()
    return len(keys), left, values


def test_a_run_that_has_ended_leaves_no_parts(world):
    assert world.run(looks_for_parts, 2) == [(3, [], (STEPS, STEPS + 1))] * 2


def other_names():
    dist.init_process_group("resilient")
    if dist.get_rank() == 1:
        State(step=0, best=1.0).sync()
    State(step=0).sync()


def test_other_names_are_named_on_all_ranks(world):
    ranks = world.start(other_names, SIZE)
    assert "(step, best; " in refusals(ranks)


def commits_unevenly():
    dist.init_process_group("resilient")
    state = State(step=0, per_rank={"mine": 1}, keep_per_rank="buddy")
    state.sync()
    state.commit()
    other = State(step=0, per_rank={"mine": 2}, keep_per_rank="buddy")
    (state if dist.get_rank() == 1 else other).commit()


def test_a_buddy_keeps_no_part_of_another_commit(world):
    """Each compares by itself what it was given: one that ends before the other has come so far is
    a loss to that one, with the same text."""
    errors = [rank.error(30) for rank in world.start(commits_unevenly, 2)]
    assert any(isinstance(error, torch_resilient.ConfigError) for error in errors)
    for error in errors:
        text = str(error)
        assert re.search("rank 1 makes commit state/0.1/|rank 0 makes commit state/0.2/", text), (
            text
        )
        assert "while this rank makes" in text and "at the same steps" in text
    for rank in world.ranks:
        rank.wait(10)


def ends_early(victim):
    """The victim is killed when the others are in the barrier at the end of the run."""
    dist.init_process_group("resilient")
    calls = []

    def run(state):
        calls.append(1)
        train(state, 1, die_at())
        if victim:
            tell("through")
            signal.pause()

    state = State(step=0, sums=[])
    elastic(run)(state)
    dist.destroy_process_group()
    return len(calls), state.sums


def test_a_rank_that_is_lost_at_the_end_of_the_run_is_replaced(world):
    ranks = [world.start_rank(ends_early, rank, SIZE, rank == 1, env=WAIT) for rank in range(SIZE)]
    assert ranks[1].told() == "through"
    ranks[1].signal()
    ranks[1] = world.start_rank(ends_early, 1, SIZE, False, env=WAIT)
    sums = [SIZE] * STEPS
    assert [rank.value(30) for rank in ranks] == [(2, sums), (1, sums), (2, sums)]
