"""State and elastic: runs that go on after the loss of any rank, to the same result."""

import contextlib
import gc
import os
import random
import signal

import harness
import numpy
import pytest
import store_support
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_resilient
from torch_resilient import State, elastic

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
SIZE = 3
STEPS = 12


def make_state(rank):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    numpy.random.seed(rank)
    return State(
        model=model,
        optimizer=optimizer,
        step=0,
        mean=torch.zeros(3),
        history=[],
        per_rank={"seen": []},
    )


def step_of(state, model):
    """One step with random numbers of every kind: they must come back with the state."""
    noise = torch.randn(4, 8) + random.random() + numpy.random.rand()
    state.optimizer.zero_grad()
    model(noise).square().mean().backward()
    state.optimizer.step()
    state.mean += 1.0
    state.step += 1
    state.history = [*state.history, state.step]
    state.seen = [*state.seen, round(float(noise.sum()), 4)]


def train(state, die):
    model = DistributedDataParallel(state.model, bucket_cap_mb=0.001)
    dist.new_group([0, 1])
    while state.step < STEPS:
        die(state)
        step_of(state, model)
        state.commit()
    return "done"


class Death:
    """Ends this process at a step, once in the job: a replacement does not die again."""

    def __init__(self, where, step, replaced):
        self.where, self.step, self.replaced = where, step, replaced

    def __call__(self, state):
        if self.replaced or state.step != self.step:
            return
        if self.where == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.where == "backward":
            weight = state.model[0].weight
            weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def run_rank(victim, where, step, replaced):
    rank = int(os.environ["RANK"])
    dist.init_process_group("resilient")
    state = make_state(rank)
    if where == "before the first commit" and rank == victim and not replaced:
        os.kill(os.getpid(), signal.SIGKILL)
    death = Death(where if rank == victim else "never", step, replaced)
    assert elastic(train)(state, death) == "done"
    values = [value.numpy().tobytes() for value in state.model.state_dict().values()]
    result = values, state.step, state.mean.tolist(), state.history, state.seen
    dist.destroy_process_group()
    return result


def run_all(world, victim=None, where="never", step=5):
    world.job = f"{world.job}-{where}"
    ranks = world.start(run_rank, SIZE, victim, where, step, False, env=WAIT)
    if victim is not None:
        assert ranks[victim].wait(30) == -signal.SIGKILL, ranks[victim].stderr()
        ranks[victim] = world.start_rank(
            run_rank, victim, SIZE, victim, where, step, True, env=WAIT
        )
    return [rank.value(60) for rank in ranks]


@pytest.fixture(scope="module")
def undisturbed(rank_server, store):
    with contextlib.closing(harness.World(rank_server, store)) as world:
        return run_all(world)


def backward_then_restore():
    dist.init_process_group("resilient")
    model = nn.Linear(2, 1)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    state.commit()
    for bring_back in (state.restore, state.sync):
        model(torch.ones(2)).backward()
        bring_back()
        assert all(parameter.grad is None for parameter in model.parameters())
    dist.destroy_process_group()


def test_what_a_failed_backward_has_left_is_not_added_to(world):
    world.run(backward_then_restore, 2)


def test_the_undisturbed_run(undisturbed):
    for values, step, mean, history, seen in undisturbed:
        assert values == undisturbed[0][0]
        assert (step, mean, history) == (STEPS, [STEPS] * 3, list(range(1, STEPS + 1)))
        assert len(seen) == STEPS
    assert undisturbed[0][4] != undisturbed[1][4]


@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("where", ["step", "backward", "before the first commit"])
def test_killed_and_replaced_the_result_is_the_same(world, undisturbed, victim, where):
    assert run_all(world, victim, where) == undisturbed


def test_killed_in_the_first_step(world, undisturbed):
    assert run_all(world, 1, "step", 0) == undisturbed


def not_a_failure():
    dist.init_process_group("resilient")
    calls = []

    def broken(state):
        calls.append(state.step)
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        elastic(broken)(State(step=0))
    dist.destroy_process_group()
    return len(calls)


def destroys_inside():
    dist.init_process_group("resilient")

    def step(state):
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()

    with pytest.raises(torch_resilient.ConfigError, match="after elastic has returned"):
        elastic(step)(State(step=0))


def test_a_world_that_is_destroyed_inside_is_told(world):
    world.run(destroys_inside, 2)


def test_a_bug_is_raised_once(world):
    assert world.run(not_a_failure, 2) == [1, 1]


def looks_at_the_collector(own):
    """What was there before elastic is frozen in it, if the program has not done so itself."""
    dist.init_process_group("resilient")
    gc.unfreeze()  # What the server of the ranks has frozen.
    if own == "before":
        gc.freeze()
    before = gc.get_freeze_count()
    made = []

    def run(state):
        frozen = gc.get_freeze_count()
        assert frozen == before if own == "before" else frozen > 100_000
        if own == "inside":
            made.extend([] for _ in range(100_000))
            gc.freeze()
        if own == "no":
            raise KeyError("a bug")

    with contextlib.suppress(KeyError):
        elastic(run)(State(step=0))
    after = gc.get_freeze_count()
    dist.destroy_process_group()
    return before, after


def test_a_recovery_does_not_go_through_what_was_there_before(world):
    assert world.run(looks_at_the_collector, 1, "no") == [(0, 0)]
    [(before, after)] = world.run(looks_at_the_collector, 1, "before")
    assert before == after > 0
    [(before, after)] = world.run(looks_at_the_collector, 1, "inside")
    assert before == 0 and after > 100_000


def mismatch():
    dist.init_process_group("resilient")
    calls = []

    def broken(state):
        calls.append(1)
        dist.all_reduce(torch.ones(1 + dist.get_rank()))

    with pytest.raises(torch_resilient.MismatchError):
        elastic(broken)(State(step=0))
    return len(calls)


def test_a_mismatch_is_a_bug(world):
    assert world.run(mismatch, 2) == [1, 1]


def without_session():
    with pytest.raises(torch_resilient.ConfigError, match="init_process_group"):
        elastic(lambda state: None)(State(step=0))
    with pytest.raises(torch_resilient.ConfigError):
        State(step=0).commit()


def test_without_a_session(world):
    world.run(without_session, 1)


def stale_copies():
    """commit() raises the first cause when a fence is pending, and keeps nothing."""
    dist.init_process_group("resilient")
    state = State(step=0)
    state.commit()
    outlive(1)
    state.step = 5
    with pytest.raises(torch_resilient.RankLostError):
        state.commit()
    assert state.commits == 1
    state.restore()
    return state.step


def test_no_commit_behind_a_fence(world):
    ranks = world.start(stale_copies, 2)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert ranks[0].value(20) == 0


def too_large():
    dist.init_process_group("resilient")
    state = State(step=0, per_rank={"big": torch.zeros(9 * 1024 * 1024, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"per-rank part of the state has 94.* bytes"):
        state.commit()
    limit = State(step=0, per_rank={"big": torch.zeros(8_000_000, dtype=torch.uint8)})
    limit.commit()
    dist.destroy_process_group()


def test_the_limit_of_the_per_rank_part(world):
    world.run(too_large, 1)


def aborts_its_group():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    calls = []

    @elastic
    def work(state):
        calls.append(state.step)
        if len(calls) == 1:
            tell("ready")
            hear()
            if rank == 0:
                tell("aborts")
                dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    value = work(State(step=0))
    dist.destroy_process_group()
    return value, len(calls)


def test_the_word_of_a_store_that_is_silent_for_a_while_is_waited_for(world):
    with store_support.ResilientServer() as server:
        ranks = world.start(aborts_its_group, 2, env={"RESILIENT_STORE": server.address})
        for rank in ranks:
            assert rank.told() == "ready"
        server.signal(signal.SIGSTOP)
        for rank in ranks:
            rank.say("go")
        assert ranks[0].told() == "aborts"
        with pytest.raises(AssertionError, match="said nothing"):
            ranks[0].told(3)
        server.signal(signal.SIGCONT)
        assert [rank.value(30) for rank in ranks] == [(2.0, 2)] * 2


def newcomer_gets_everything(first):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    state = State(value=rank, tensor=torch.full((3,), float(rank)), per_rank={"mine": rank * 10})
    if first:
        state.sync()
        assert (state.value, state.mine) == (0, rank * 10)
        state.value, state.mine = 42, 100 + rank
        state.tensor.fill_(7)
        state.commit()
        outlive(1)
        hear()
        torch_resilient.rebuild()
    state.sync()
    dist.destroy_process_group()
    return state.value, state.tensor.tolist(), state.mine


def test_without_elastic_rebuild_and_sync_do(world):
    ranks = world.start(newcomer_gets_everything, SIZE, True, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    ranks[1] = world.start_rank(newcomer_gets_everything, 1, SIZE, False, env=WAIT)
    for rank in (ranks[0], ranks[2]):
        rank.say("go")
    values = [rank.value(30) for rank in ranks]
    assert values == [(42, [7.0] * 3, 100 + rank) for rank in range(SIZE)]


def test_names_of_values():
    with pytest.raises(ValueError, match="both"):
        State(a=1, per_rank={"a": 2})
    for name in ("commit", "_x", "not a name"):
        with pytest.raises(ValueError):
            State(**{name: 1})
    state = State(a=1)
    with pytest.raises(AttributeError, match="State\\(b="):
        state.b = 2
    with pytest.raises(AttributeError):
        _ = state.b
    state.a += 1
    assert state.a == 2
    with pytest.raises(ValueError, match="nothing was committed"):
        state.restore()
