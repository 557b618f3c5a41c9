"""What a State brings back, and in which form.

Goal: after a loss every rank has the values of the commit, with their types, shapes and parameter
groups, whatever the program has put in their places since or not yet; or all ranks get a
ConfigError that names the value. Replicated values that differ are reported once. No tensor of ours
follows the defaults that the program has set for its own. Method: programs that replace
values in training and are killed at each commit, in every mode that torch has for a program.
"""

import contextlib
import copy
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from test_state_places import WAIT, lost_at, refusals, slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_resilient
from torch_resilient import ElasticSampler, State, _errors, _restore, _snapshot, elastic, ulfm

STEPS = 4
SIZE = 3


def first_values():
    return {
        "best": torch.tensor(0),
        "half": torch.zeros(3),
        "window": torch.zeros(4),
        "grows": torch.zeros(0),
        "late": None,
        "number": 1,
        "frozen": nn.Parameter(torch.zeros(2)),
        "leaf": torch.zeros(2),
        "plain": [nn.Parameter(torch.zeros(1), requires_grad=False)] * 2,
        "seen": torch.zeros(1).expand(3),
    }


def step_values(values, step):
    """As a program does it: a value gets another one, often of another kind."""
    values.best = values.best + 0.25
    values.half = values.half.double() + 1 / 3
    values.window = values.window.mean().reshape(1) + 1
    values.grows = torch.cat([values.grows, torch.tensor([step + 0.5])])
    values.late = torch.full((2,), float(step))
    values.number = torch.tensor(step, dtype=torch.int16)
    if step == 1:
        values.frozen = nn.Parameter(values.frozen.detach() + 1, requires_grad=False)
        values.leaf = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        values.seen = values.seen + 1  # As of an evaluation: it cannot be written to outside.


def described(value):
    if isinstance(value, list):
        return [*map(described, value), value[0] is value[-1]]
    if not isinstance(value, torch.Tensor):
        return value
    parameter = isinstance(value, nn.Parameter)
    return value.dtype, value.tolist(), parameter, value.requires_grad, value.device.type


def changes(*places):
    dist.init_process_group("resilient")
    entered = []

    def run(state):
        entered.append({name: described(getattr(state, name)) for name in first_values()})
        while state.step < STEPS:
            if state.step in places:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            step_values(state, state.step)
            state.step += 1
            state.commit()

    state = State(step=0, **first_values())
    elastic(run)(state)
    dist.destroy_process_group()
    return {name: described(getattr(state, name)) for name in first_values()}


class Values:
    def __init__(self):
        self.__dict__.update(first_values())


@pytest.mark.parametrize(
    ("step", "victim"),
    [(1, 1), (3, 0), *(slow(*place) for place in ((2, 1), (3, 1), (1, 0), (2, 0)))],
)
def test_a_value_has_the_form_of_the_commit(world, step, victim):
    expected = Values()
    for number in range(STEPS):
        step_values(expected, number)
    right = {name: described(value) for name, value in vars(expected).items()}
    values = [rank.value(30) for rank in lost_at(world, changes, step, victim=victim)]
    assert values == [right] * SIZE


def unfreezes(*places):
    """Layers that join the training later, in a group of their own."""
    dist.init_process_group("resilient")
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    body.requires_grad_(False)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)

    def run(state):
        while state.step < STEPS:
            if state.step >= 2 and len(state.optimizer.param_groups) == 1:
                body.requires_grad_(True)
                state.optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.1})
            ddp = DistributedDataParallel(state.model)
            state.optimizer.zero_grad()
            ddp(torch.ones(2, 4) + state.step + dist.get_rank()).square().mean().backward()
            if state.step in places:
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.step()
            state.step += 1
            state.commit()

    elastic(run)(State(optimizer=optimizer, model=model, step=0))
    dist.destroy_process_group()
    rates = [group["lr"] for group in optimizer.param_groups]
    return rates, [parameter.tolist() for parameter in model.parameters()]


# In step 2 the others have the group already, and lose it again.
@pytest.mark.parametrize("step", [slow(1), 2, 3])
def test_parameter_groups_that_are_added(world, step):
    undisturbed = world.run(unfreezes, SIZE)
    assert undisturbed[0][0] == [0.01, 0.1]
    world.job += "-killed"
    ranks = lost_at(world, unfreezes, step)
    assert [rank.value(30) for rank in ranks] == undisturbed


def replaces_its_model(*places):
    dist.init_process_group("resilient")

    def run(state):
        while state.step < STEPS:
            if state.step in places:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            state.model = nn.Linear(3, 5)
            state.step += 1
            state.commit()

    elastic(run)(State(step=0, model=nn.Linear(3, 4)))


def test_an_object_that_does_not_fit_is_named_on_all_ranks(world):
    text = refusals(lost_at(world, replaces_its_model, 2))
    assert "on rank 1: 'model' (Linear) does not take its state of the commit" in text
    assert "size mismatch for weight" in text and "on every start" in text


def loaded(values, into):
    misfits = _restore.load(into, _snapshot.take(values))
    return misfits, into


def test_objects_that_are_others():
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    adam = torch.optim.Adam(nn.Linear(1, 1).parameters())
    for into, text in (
        (adam, "Adam here and a torch.optim.sgd.SGD"),
        (None, "None here"),
        (3, "int here"),
    ):
        misfits, _ = loaded({"it": sgd}, {"it": into})
        assert len(misfits) == 1 and misfits[0].startswith("'it' is") and text in misfits[0]
    assert loaded({"it": 5}, {"it": sgd}) == ([], {"it": 5})
    added = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    _snapshot.note(added)
    added.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    misfits, _ = loaded({"it": added}, {"it": sgd})
    assert "'it' has 2 parameter groups in the commit and 1 here" in misfits[0]


def test_a_model_and_an_optimizer_have_the_dtypes_of_the_commit():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():  # A finer one than that of the parameters.
        optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1 / 3)
    other = nn.Linear(2, 2)
    weight = other.weight
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    misfits, _ = loaded(
        {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": theirs}
    )
    assert misfits == [] and other.weight is weight and torch.equal(weight, model.weight)
    assert torch.equal(
        theirs.state[weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"]
    )


def normalises(own):
    """Each rank's statistics of BatchNorm are of its own batches."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    per_rank = {"mean": model[1].running_mean, "var": model[1].running_var} if own else {}
    state = State(model=model, step=0, best=0.5, per_rank=per_rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.sync()
        for _ in range(6):
            dist.barrier()
            model[1](torch.full((3, 2), rank + 1.0) * torch.arange(3.0).reshape(3, 1))
            state.best = 0.5 + rank * (own == "plain")
            state.commit()
    dist.destroy_process_group()
    return [(str(each.message), each.filename) for each in caught]


def test_what_differs_between_ranks_is_named_once(world):
    (said,), *silent = world.run(normalises, SIZE, None)
    assert silent == [[], []] and said[1] == __file__
    assert "At commit 2 rank 0 and rank 1 have different values of model.1.running_mean," in said[0]
    assert "model.1.running_var (" in said[0] and "differ from rank 0: 1, 2" in said[0]
    assert "per_rank={...}" in said[0] and "weight" not in said[0]
    world.job += "-own"  # The way out that the text names.
    assert world.run(normalises, SIZE, "own") == [[]] * SIZE
    world.job += "-plain"
    (said,), *_ = world.run(normalises, SIZE, "plain")
    assert "different values of best (" in said[0]


@contextlib.contextmanager
def defaults_of(mode):
    """What a program may set for its own tensors."""
    if mode == "device":
        torch.set_default_device("meta")
    elif mode == "dtype":
        torch.set_default_dtype(torch.float16)
    elif mode == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif mode == "threads":
        torch.set_num_threads(1 + dist.get_rank())
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    with modes.get(mode, contextlib.nullcontext)():
        yield
    torch.set_default_device("cpu")


def samples(_):
    sampler = ElasticSampler(1000, seed=3)
    order = list(sampler)
    assert len(sampler) == len(order) and sampler.advance(10)
    other = ElasticSampler(1000, seed=3)
    other.load_state_dict(sampler.state_dict())
    return order[10:] == list(other) and order[:20]


def heals(keep):
    """All that a State does, and a generation that ends in between."""
    model = nn.Linear(2, 2, device="cpu", dtype=torch.float32)
    nn.init.constant_(model.weight, 1 + dist.get_rank())
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    mean = torch.zeros(2, device="cpu")
    state = State(
        model=model, optimizer=optimizer, step=0, mean=mean, late=None,
        per_rank={"mine": dist.get_rank()}, keep_per_rank=keep,
    )  # fmt: skip

    def run(state):
        while state.step < 4:
            ones = torch.ones(2, device="cpu", dtype=torch.float32)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter, requires_grad=False)
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            state.late = ones + state.step
            state.step += 1
            if state.step == 3 and ulfm.agree(True).value and not revoked:
                revoked.append(1)
                dist.barrier()
                ulfm.revoke("as a test")
                dist.barrier()
            state.commit()

    revoked = []
    elastic(run)(state)
    state.restore()
    assert state.mine == dist.get_rank() and not state.late.is_inference()
    model.weight.data.add_(0)  # Can be written to outside of what the State was used in.
    return model.weight.tolist(), state.late.tolist(), torch.get_rng_state().sum(dtype=int).item()


def joins(mode):
    if mode in ("inference", "no_grad"):  # There is nothing to train in them.
        return None
    model = nn.Linear(1, 1, bias=False, device="cpu", dtype=torch.float32)
    nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch_resilient.join(ddp, optimizer=optimizer):
            for _ in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                ddp(torch.ones(1, 1, device="cpu", dtype=torch.float32)).sum().backward()
                optimizer.step()
    return model.weight.item()


def looks(_):
    with torch_resilient.expect_slow("a test", seconds=5):
        seen = torch_resilient.on_event(print)
    seen.remove()
    size = len(torch_resilient.membership()["members"])
    assert torch_resilient.failure() is None and ulfm.failed() == []
    torch_resilient.last_incident(), torch_resilient.op_log(), str(torch_resilient.status())
    assert torch_resilient.rebuild() and ulfm.shrink()
    return size, torch_resilient.agree(6 | dist.get_rank())


CALLS = {
    "State, elastic": lambda _: heals("store"),
    "State(keep_per_rank='buddy')": lambda _: heals("buddy"),
    "ElasticSampler": samples,
    "join": joins,
    "agree, expect_slow, failure, last_incident, membership, on_event, op_log, rebuild, status,"
    " ulfm": looks,
}
NO_TENSORS = {"NcclOptions", "Store", "__version__", *_errors.PUBLIC}


def calls_everything(mode):
    dist.init_process_group("resilient")
    with defaults_of(mode):
        results = {name: call(mode) for name, call in CALLS.items()}
    dist.destroy_process_group()
    return results


def test_all_that_is_public_is_called_below():
    named = " ".join(CALLS).replace(",", " ").replace("(", " ").split()
    assert set(torch_resilient.__all__) - NO_TENSORS <= set(named)


@pytest.fixture(scope="module")
def without_modes(rank_server, store):
    import harness

    with contextlib.closing(harness.World(rank_server, store)) as world:
        return world.run(calls_everything, 2, "none")


@pytest.mark.parametrize(
    "mode", ["device", "dtype", "inference", "no_grad", slow("deterministic"), slow("threads")]
)
def test_nothing_of_ours_follows_the_programs_defaults(world, without_modes, mode):
    right = copy.deepcopy(without_modes)
    results = world.run(calls_everything, 2, mode)
    if mode in ("inference", "no_grad"):
        for result in right:
            result["join"] = None
    assert results == right


def counts(*places):
    dist.init_process_group("resilient")

    def run(state):
        while state.step < STEPS:
            if state.step in places:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            state.mean = state.mean + 1
            state.mine = state.mine + 1
            state.step += 1
            state.commit()

    with defaults_of(os.environ["MODE"]):
        cpu = {"device": "cpu", "dtype": torch.float32}
        mine = torch.full((1,), float(dist.get_rank()), **cpu)
        state = State(step=0, mean=torch.zeros(2, **cpu), per_rank={"mine": mine})
        elastic(run)(state)
    dist.destroy_process_group()
    return state.mean.tolist(), state.mine.tolist()


@pytest.mark.parametrize("step", [slow(1), 2, slow(3)])
@pytest.mark.parametrize("mode", ["device", "inference", slow("dtype"), slow("deterministic")])
def test_a_lost_rank_is_replaced_under_the_programs_defaults(world, mode, step):
    ranks = lost_at(world, counts, step, env={**WAIT, "MODE": mode})
    right = [([STEPS] * 2, [rank + STEPS]) for rank in range(SIZE)]
    assert [rank.value(30) for rank in ranks] == right
