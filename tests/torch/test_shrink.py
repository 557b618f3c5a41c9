"""A world that goes on with fewer ranks.

Goal: survivors that want it go on under new numbers, with torch's own objects, and a run that was
shrunk ends like one that was started anew with fewer ranks at the same step. Method: real ranks,
some of which are killed; nobody replaces them.
"""

import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

import torch_resilient
from torch_resilient import ElasticSampler, State, elastic


def survivor(victims):
    """The ranks that are left after each loss add up their first numbers."""
    dist.init_process_group("resilient")
    first = dist.get_rank()
    pair = dist.new_group([0, 2, 3])
    seen = []
    for victim in victims:
        tell("ready")
        if first == victim:
            signal.pause()
        with pytest.raises(torch_resilient.RankLostError):
            while True:
                dist.barrier()
        membership = torch_resilient.rebuild(mode="shrink")
        size = dist.get_world_size()
        rank = dist.get_rank()
        assert membership["rank"] == rank == dist.get_group_rank(dist.group.WORLD, rank)
        assert len(membership["members"]) == size
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))
        total = torch.tensor([float(first)])
        dist.all_reduce(total)
        gathered = [None] * size
        dist.all_gather_object(gathered, first)
        again = dist.new_group(list(range(size)))
        dist.barrier(again)
        seen.append((dist.get_rank(), size, total.item(), gathered))
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        with pytest.raises(RuntimeError, match="make the group anew"):
            dist.barrier(pair)
        dist.destroy_process_group(pair)
    assert torch_resilient.agree(True)
    dist.destroy_process_group()
    return seen


def leaves_or_shrinks(shrinks):
    """Rank 2 leaves, and no operation has missed it when `shrinks` ask for a new membership."""
    dist.init_process_group("resilient")
    first = dist.get_rank()
    others = dist.new_group([0, 1, 3])
    if first == 2:
        dist.destroy_process_group()
        return None
    tell("ready")
    hear()
    if first not in shrinks:
        with pytest.raises(torch_resilient.RankLostError, match="LEFT"):
            dist.barrier(others)
    members = torch_resilient.rebuild(mode="shrink")["members"]
    total = torch.tensor([float(first)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return len(members), total.item()


@pytest.mark.parametrize("shrinks", [(0, 1, 3), (1,)])
def test_a_member_that_has_left_is_in_no_membership(world, shrinks):
    ranks = world.start(leaves_or_shrinks, 4, shrinks)
    assert ranks[2].value(30) is None
    for rank in (0, 1, 3):
        assert ranks[rank].told(30) == "ready"
    for rank in (0, 1, 3):
        ranks[rank].say("go")
    assert [ranks[rank].value(30) for rank in (0, 1, 3)] == [(3, 4.0)] * 3


@pytest.mark.parametrize("victims", [(1,), (0,), (3,), (2, 0), (1, 3, 0)])
def test_survivors_go_on_under_new_numbers(world, victims):
    ranks = world.start(survivor, 4, victims)
    left = list(range(4))
    expected = {rank: [] for rank in left}
    for victim in victims:
        for rank in left:
            assert ranks[rank].told() == "ready"
        ranks[victim].signal()
        left.remove(victim)
        for number, rank in enumerate(left):
            expected[rank].append((number, len(left), float(sum(left)), left.copy()))
    for rank in reversed(left):
        assert ranks[rank].value(30) == expected[rank]


def waits_then_shrinks():
    dist.init_process_group("resilient")
    outlive(1)
    torch_resilient.rebuild(min_world=2)
    return dist.get_rank(), dist.get_world_size()


def test_replace_with_min_world_waits_for_the_seat_first(world):
    ranks = world.start(waits_then_shrinks, 3, env={"RESILIENT_SEAT_WAIT": "1s"})
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert [ranks[0].value(20), ranks[2].value(20)] == [(0, 2), (1, 2)]


def too_few():
    dist.init_process_group("resilient")
    lost = outlive(1)
    for wanted in ({"mode": "shrink", "min_world": 3}, {"min_world": 3}, {}):
        with pytest.raises(torch_resilient.RankLostError) as caught:
            torch_resilient.rebuild(**wanted)
        assert caught.value.rank == lost.rank == 1
    # One that still wanted three would have the others' wish refused.
    tell("refused")
    hear()
    return len(torch_resilient.rebuild(min_world=2)["members"])


def test_fewer_than_wanted_raises_the_first_cause_and_may_be_asked_again(world):
    ranks = world.start(too_few, 3)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    for number in (0, 2):
        assert ranks[number].told() == "refused"
    for number in (0, 2):
        ranks[number].say("go")
    assert [ranks[0].value(20), ranks[2].value(20)] == [2, 2]


def one_does_not(wants):
    dist.init_process_group("resilient")
    outlive(1)
    if not wants[int(os.environ["RANK"])]:
        with pytest.raises(torch_resilient.RankLostError):
            torch_resilient.rebuild()
        dist.destroy_process_group()
        return None
    torch_resilient.rebuild(mode="shrink")
    return dist.get_rank(), dist.get_world_size()


def test_one_that_leaves_instead_is_not_waited_for(world):
    ranks = world.start(one_does_not, 4, [True, True, False, True])
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert [ranks[rank].value(20) for rank in (0, 2, 3)] == [(0, 2), None, (1, 2)]


def bad_wishes():
    dist.init_process_group("resilient")
    for wanted in (
        {"mode": "grow up"},
        {"min_world": 0},
        {"min_world": "2"},
        {"min_world": True},
        {"mode": "shrink", "min_world": -1},
    ):
        with pytest.raises(torch_resilient.ConfigError):
            torch_resilient.rebuild(**wanted)
    with pytest.raises(torch_resilient.ConfigError):
        elastic(lambda state: None, min_world=0)
    dist.destroy_process_group()


def test_bad_wishes_are_refused(world):
    world.run(bad_wishes, 1)


SAMPLES = 40
DATA = torch.linspace(-1, 1, SAMPLES * 4).reshape(SAMPLES, 4)
SHRINK_AT = 4


def training_state():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    return State(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        sampler=ElasticSampler(SAMPLES, seed=5),
        step=0,
        used=[],
        per_rank={"mine": []},
    )


def learn(state, model, batch):
    """A step that is not committed; `used`: the samples of all ranks, in the order of the steps."""
    model(DATA[batch]).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    together = [None] * dist.get_world_size()
    dist.all_gather_object(together, batch)
    indices = [index for part in together for index in part]
    state.sampler.advance(2)
    state.used = [*state.used, *indices]
    state.mine = [*state.mine, *batch]
    state.step += 1


def train(state, until, die_at=None):
    """Batches of two on each rank."""
    model = DistributedDataParallel(state.model, bucket_cap_mb=0.0001)
    for batch in BatchSampler(state.sampler, 2, drop_last=False):
        if state.step == SHRINK_AT:
            dist.barrier()  # That commit is complete; without one rank of it the one before counts.
        if state.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == until:
            return
        learn(state, model, batch)
        state.commit()


def outcome_of(state):
    values = [value.numpy().tobytes() for value in state.model.state_dict().values()]
    return values, state.used, state.step


def shrunk_run(victim):
    rank = int(os.environ["RANK"])
    dist.init_process_group("resilient")
    state = training_state()
    elastic(train, min_world=2)(state, -1, SHRINK_AT if rank == victim else None)
    own = state.mine
    result = outcome_of(state)
    dist.destroy_process_group()
    return result, own


def scripted_run(until, before):
    """The same with the size changed by hand: some steps, or what is left after them."""
    dist.init_process_group("resilient")
    state = training_state()
    if before is not None:
        for name, value in pickle.loads(before).items():
            if hasattr(getattr(state, name), "load_state_dict"):
                getattr(state, name).load_state_dict(value)
            else:
                setattr(state, name, value)
    train(state, until)
    kept = {name: getattr(state, name) for name in ("step", "used")}
    for name in ("model", "optimizer", "sampler"):
        kept[name] = getattr(state, name).state_dict()
    dist.destroy_process_group()
    return outcome_of(state), pickle.dumps(kept)


@pytest.mark.parametrize("victim", range(3))
def test_a_shrunk_run_ends_like_one_scripted_to_change_size(world, victim):
    ranks = world.start(shrunk_run, 3, victim)
    assert ranks[victim].wait(30) == -signal.SIGKILL
    ended = [rank.value(60) for number, rank in enumerate(ranks) if number != victim]
    world.job += "-scripted"
    [(_, kept), *_] = world.run(scripted_run, 3, SHRINK_AT, None)
    world.job += "-on"
    scripted = world.run(scripted_run, 2, -1, kept)
    assert [result for result, _ in ended] == [result for result, _ in scripted]
    (_, used, _), _ = ended[0]
    assert sorted(used) == list(range(SAMPLES))
    # Each goes on with its own part of the state.
    for _, own in ended:
        assert set(own) <= set(used) and len(own) > 2 * SHRINK_AT


def replaced_after_the_shrink(newcomer, keep):
    """Rank 1 of 3 is lost for good; then rank 1 of the two that are left, which is replaced."""
    dist.init_process_group("resilient")
    own = {"name": f"first {os.environ['RANK']}"}
    state = State(step=0, per_rank=own, keep_per_rank=keep)
    sizes = []

    def run(state):
        sizes.append(dist.get_world_size())
        if dist.get_world_size() == 3 or (len(sizes) == 2 and not newcomer):
            tell((dist.get_rank(), state.name))
            hear()
            dist.barrier()
            raise AssertionError("nobody was lost")
        return dist.get_rank(), state.name

    result = elastic(run, min_world=2)(state)
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("keep", ["store", "buddy"])
def test_a_newcomer_after_the_shrink_gets_the_part_of_its_seat(world, keep):
    env = {"RESILIENT_SEAT_WAIT": "6s"}  # The first seat stays empty, the second is filled in it.
    ranks = world.start(replaced_after_the_shrink, 3, False, keep, env=env)
    for number, rank in enumerate(ranks):
        assert rank.told() == (number, f"first {number}")
    ranks[1].signal()
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    assert ranks[0].told() == (0, "first 0")
    assert ranks[2].told() == (1, "first 2")
    ranks[2].signal()
    ranks[0].say("go")
    newcomer = world.start_rank(replaced_after_the_shrink, 1, 2, True, keep, env=env)
    assert ranks[0].value(20) == (0, "first 0")
    assert newcomer.value(20) == (1, "first 2")
