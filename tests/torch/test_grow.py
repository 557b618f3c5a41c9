"""A world that takes in more ranks.

Goal: at a commit that all ranks have made, those who wait for a seat become its last ranks; nobody
loses a step, and a run that has grown ends like one that was started anew with more ranks at the
same step. Method: real ranks and spares; a spare is started while the ranks stand before a commit.
"""

import json
import os
import signal
import subprocess

import pytest
import torch.distributed as dist
from rank_server import hear, tell
from test_shrink import SAMPLES, learn, outcome_of, scripted_run, training_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

import torch_resilient
from torch_resilient import State, _server, _state, elastic

GROW_AT = 4
SPARE = {"RESILIENT_SPARES": "1"}


def await_spares(world, count):
    """Returns once so many processes wait at the store, as it tells everybody."""
    command = [_server.binary(), "members", "--store", world.store_address]
    command += ["--job", world.job, "--json"]
    for _ in range(2000):  # Each takes some milliseconds.
        told = subprocess.run(command, capture_output=True, check=True, timeout=10)
        if sum(member["state"] == "spare" for member in json.loads(told.stdout)) == count:
            return
    raise AssertionError(f"there are not {count} spares: {told.stdout}")


def train(state, ran):
    """As that of test_shrink; before the commit of step GROW_AT all wait until they are told."""
    model = DistributedDataParallel(state.model, bucket_cap_mb=0.0001)
    for batch in BatchSampler(state.sampler, 2, drop_last=False):
        ran.append((state.step, dist.get_world_size()))
        learn(state, model, batch)
        if state.step == GROW_AT:
            tell("before the commit")
            hear()
        state.commit()
        while state.step == GROW_AT and dist.get_world_size() == 2:
            dist.barrier()  # Until it ends: a later commit that all had made would do as well.


def grown_run():
    dist.init_process_group("resilient")
    begun_as = dist.get_rank()
    state = training_state()
    ran = []
    elastic(train, max_world=3)(state, ran)
    number = begun_as, dist.get_rank(), dist.get_world_size()
    result = outcome_of(state), state.mine, ran, number
    dist.destroy_process_group()
    return result


def test_a_grown_run_ends_like_one_scripted_to_change_size(world):
    ranks = [world.start_rank(grown_run, rank, 3, env=SPARE) for rank in range(2)]
    for rank in ranks:
        assert rank.told() == "before the commit"
    ranks.append(world.start_rank(grown_run, 2, 3, env=SPARE))
    await_spares(world, 1)
    for rank in ranks[:2]:
        rank.say("go")
    ended = [rank.value(60) for rank in ranks]
    world.job += "-scripted"
    [(_, kept), *_] = world.run(scripted_run, 2, GROW_AT, None)
    world.job += "-on"
    scripted = world.run(scripted_run, 3, -1, kept)
    assert [result for result, *_ in ended] == [result for result, _ in scripted]
    (_, used, steps), *_ = ended[0]
    assert sorted(used) == list(range(SAMPLES))
    for number, (_, mine, ran, numbers) in enumerate(ended):
        assert numbers == (number, number, 3)
        assert set(mine) <= set(used)
        assert [step for step, size in ran if size == 3] == list(range(GROW_AT, steps))
        before = [step for step, size in ran if size == 2]
        assert before == ([] if number == 2 else list(range(GROW_AT)))
    # The newcomer has its own part of the state, the others went on with theirs.
    assert [len(mine) > 2 * GROW_AT for _, mine, *_ in ended] == [True, True, False]


def shrink_and_grow(newcomer, keep):
    """Rank 1 is killed in the first step; the others go on without it, and with who replaces it."""
    dist.init_process_group("resilient")
    own = {"name": f"{os.getpid()}"}
    state = State(step=0, sizes=[], per_rank=own, keep_per_rank=keep)

    def run(state):
        state.sizes = [*state.sizes, dist.get_world_size()]
        assert state.name == f"{os.getpid()}"
        if dist.get_world_size() == 3 and len(state.sizes) == 1:
            tell("ready")
            if dist.get_rank() == 1:
                signal.pause()
            dist.barrier()
            raise AssertionError("nobody was lost")
        if dist.get_world_size() == 2:
            tell("two")
            hear()
        state.step += 1
        state.commit()
        while dist.get_world_size() == 2:
            dist.barrier()
        return state.sizes, dist.get_rank(), dist.get_world_size()

    result = elastic(run, min_world=2, max_world=3)(state)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("keep", ["store", "buddy"])
def test_who_replaces_a_rank_that_was_given_up_is_taken_in_again(world, keep):
    ranks = world.start(shrink_and_grow, 3, False, keep)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for number in (0, 2):
        assert ranks[number].told() == "two"
    replacement = world.start_rank(
        shrink_and_grow, 1, 3, True, keep, env={"RESILIENT_REPLACES": "1"}
    )
    await_spares(world, 1)
    for number in (0, 2):
        ranks[number].say("go")
    ended = [rank.value(30) for rank in (ranks[0], ranks[2], replacement)]
    assert ended == [([2, 3], number, 3) for number in range(3)]


def take_in(count):
    dist.init_process_group("resilient")
    model = nn.Linear(2, 2)
    state = State(model=model)

    def run(state):
        if dist.get_world_size() == 1:
            tell("ready")
            hear()
            state.commit()
            with pytest.raises(torch_resilient.GrowthError) as caught:
                while True:
                    dist.barrier()
            tell(str(caught.value))
            raise caught.value
        return dist.get_world_size()

    size = elastic(run, max_world=1 + count)(state)
    fence_token = torch_resilient.membership()["fence_token"]
    dist.destroy_process_group()
    return size, fence_token > 0


def test_several_are_taken_in_at_once_and_the_error_says_who(world):
    first = world.start_rank(take_in, 0, 3, 2, env={"RESILIENT_SPARES": "2"})
    assert first.told() == "ready"
    others = [
        world.start_rank(take_in, rank, 3, 2, env={"RESILIENT_SPARES": "2"}) for rank in (1, 2)
    ]
    await_spares(world, 2)
    first.say("go")
    text = first.told()
    assert text.startswith("[resilient:GROWTH] the world grows from 1 to 3 ranks at commit ")
    assert "which all have made: the spare on host " in text and "and 1 more, takes part" in text
    assert [rank.value(30) for rank in (first, *others)] == [(3, True)] * 3


def without_room():
    dist.init_process_group("resilient")
    if dist.get_rank() == 0:
        tell("ready")
        hear()
    state = State(step=0)

    def run(state):
        for _ in range(5):
            state.step += 1
            state.commit()
            dist.barrier()
        return dist.get_world_size()

    size = elastic(run)(state)
    dist.destroy_process_group()
    return size


@pytest.mark.slow
def test_a_spare_is_not_taken_in_where_nobody_wants_more(quick_world):
    ranks = quick_world.start(without_room, 3, env=SPARE)
    assert ranks[0].told() == "ready"
    await_spares(quick_world, 1)
    ranks[0].say("go")
    assert [rank.value(30) for rank in ranks[:2]] == [2, 2]
    error = ranks[2].error()
    assert isinstance(error, SystemExit) and error.code == 0 == ranks[2].wait(10)


def bad_wishes():
    for size in (0, -1, "3", True, 2.5):
        with pytest.raises(torch_resilient.ConfigError, match="largest number of ranks"):
            elastic(lambda state: None, max_world=size)


def test_bad_wishes_are_refused(world):
    world.run(bad_wishes, 1)


# What each rank holds of one commit: its number and the size of its world then, or nothing.
SEATS = {
    "as it was": ([(0, 2), (1, 2)], [0, 1]),
    "one was replaced": ([(0, 2), None], [0, 1]),
    "two more": ([(0, 2), (1, 2), None, None], [0, 1, None, None]),
    "two more, and one was replaced": ([(0, 2), None, None, None], [0, 1, None, None]),
    "one less": ([(0, 3), (2, 3)], [0, 2]),
    "one less, the last": ([(0, 3), (1, 3)], [0, 1]),
    "one less, and one was replaced": ([(0, 3), None], None),
    "one less, then one more": ([(0, 3), (2, 3), None], None),
}


@pytest.mark.parametrize("case", SEATS)
def test_whose_part_each_rank_has(case):
    places, seats = SEATS[case]
    held = [{} if at is None else {"commit": _state._Place(*at, None)} for at in places]
    assert _state._seats(held, "commit") == seats
