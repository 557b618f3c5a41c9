"""Uneven batches: MISMATCH or LEFT without torch_resilient.join, the right training with it."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

EPOCHS = 2
RATE = 0.05


class Net(nn.Module):
    """Several buckets, a buffer that forward changes, and a layer that some batches skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 32)
        self.skipped = nn.Linear(32, 32)
        self.last = nn.Linear(32, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs, skip=False):
        self.seen += 1
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        if not skip:
            hidden = hidden + self.skipped(hidden)
        return self.last(hidden)


def net():
    torch.manual_seed(3)
    return Net()


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def reference(counts, average_over):
    """The same training in one process: gradients of those that have data, averaged."""
    model = net()
    optimizer = make_optimizer(model)
    for _ in range(EPOCHS):
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if step < count]
            divisor = len(active) if average_over == "active" else len(counts)
            optimizer.zero_grad()
            for rank in active:
                (model(batch(rank, step)).square().sum() / divisor).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(counts, options, average_over="active", situation="plain"):
    """What each rank has in the end; and the number of steps that changed its buffer."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002, **options)
    if situation == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = make_optimizer(model)
    for _ in range(EPOCHS):
        with torch_resilient.join(model, optimizer=optimizer, average_over=average_over):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                skip = situation == "unused" and (rank + step) % 2 == 0
                if situation == "accumulate":
                    with model.no_sync():
                        model(batch(rank, step)).square().sum().backward()
                model(batch(rank, step), skip).square().sum().backward()
                optimizer.step()
    assert not model._join_config.enable, "a forward outside communicates no more than before"
    model(batch(rank, 0))
    dist.barrier()
    return [parameter.detach() for parameter in model.parameters()], model.module.seen.item()


SITUATIONS = {
    "plain": {},
    "hook": {},
    "accumulate": {},
    "unused": {"find_unused_parameters": True},
    "no buffers": {"broadcast_buffers": False},
    "views": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("counts", [(5, 3), (0, 4, 2, 3)])
def test_all_ranks_end_with_one_model(world, counts, situation):
    options = SITUATIONS[situation]
    results = world.run(train, len(counts), counts, options, "active", situation, seconds=60)
    for parameters, _ in results[1:]:
        for ours, theirs in zip(parameters, results[0][0], strict=True):
            assert torch.equal(ours, theirs)
    assert not torch.equal(results[0][0][0], next(net().parameters()).detach())


@pytest.mark.parametrize("average_over", ["active", "all"])
@pytest.mark.parametrize("counts", [(5, 3), (0, 4, 2, 3), (3, 3)])
def test_it_trains_as_one_process_would_with_the_same_batches(world, counts, average_over):
    results = world.run(train, len(counts), counts, {}, average_over, seconds=60)
    for ours, expected in zip(results[0][0], reference(counts, average_over), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def train_without(counts, last):
    """The same loop as it is without join; `last`: what a rank does behind its batches."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
    try:
        for step in range(counts[rank]):
            model(batch(rank, step)).square().sum().backward()
        started = time.time()
        if last == "barrier":
            dist.barrier()
        else:
            dist.destroy_process_group()
            return None
    except torch_resilient.ResilientError as error:
        return str(error), time.time(), None
    raise AssertionError(f"nothing was raised in {time.time() - started} s")


@pytest.mark.parametrize("counts", [(3, 2), (4, 4, 3, 4)])
def test_without_it_every_rank_is_told_at_once_what_differs_and_what_to_do(world, counts):
    started = time.monotonic()
    results = world.run(train_without, len(counts), counts, "barrier", seconds=30)
    assert time.monotonic() - started < 10
    ends = [ended for _, ended, _ in results]
    assert max(ends) - min(ends) < 2
    for text, _, _ in results:
        assert text.startswith("[resilient:MISMATCH]"), text
        assert ("barrier" in text and "all_reduce" in text) or "broadcast" in text, text
        assert text.count("test_join.py:") == 2, text
        assert "torch_resilient.join(model)" in text and "drop_last" in text, text
        assert "operations on each" in text or "has gone on to operation" in text, text


def test_a_rank_that_leaves_early_is_named_with_the_same_advice(world):
    results = world.run(train_without, 2, (3, 2), "leave", seconds=30)
    assert results[1] is None
    text = results[0][0]
    assert text.startswith("[resilient:LEFT] rank 1 "), text
    assert "torch_resilient.join(model)" in text, text


def lose_inside(victim, counts):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = DistributedDataParallel(net(), bucket_cap_mb=0.002)
    try:
        with torch_resilient.join(model):
            for step in range(counts[rank]):
                if rank == victim and step == 3:
                    tell("dies")
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch(rank, step)).square().sum().backward()
    except torch_resilient.RankLostError as error:
        assert not model._join_config.enable
        return error.code, error.rank
    raise AssertionError("nothing was raised")


def test_a_rank_killed_inside_is_raised_by_those_with_data_and_those_without(world):
    victim = 2
    ranks = world.start(lose_inside, 4, victim, (1, 50, 50, 0))
    assert ranks[victim].wait() == -signal.SIGKILL
    for number, rank in enumerate(ranks):
        if number != victim:
            assert rank.value(10) == ("RANK_LOST", victim)


def refusals_and_warnings():
    dist.init_process_group("resilient")
    texts = []
    for wrong in (net(), torch.optim.SGD(net().parameters(), lr=1), None):
        try:
            with torch_resilient.join(wrong):
                raise AssertionError("it was let in")
        except torch_resilient.ConfigError as error:
            texts.append(str(error))
    model = DistributedDataParallel(net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        for _ in range(2):
            with torch_resilient.join(model):
                try:
                    with torch_resilient.join(model):
                        raise AssertionError("it was let in")
                except torch_resilient.ConfigError as error:
                    texts.append(str(error))
        assert warnings.filters == before
    found = [(str(w.message), w.filename) for w in caught if "join" in str(w.message)]
    return texts, found


def test_what_it_is_not_for_and_the_warning(world):
    results = world.run(refusals_and_warnings, 2)
    for texts, _ in results:
        assert len(texts) == 5
        for text, name in zip(texts, ("Net", "SGD", "NoneType"), strict=False):
            assert text.startswith("[resilient:SETTING]") and name in text
            assert "DistributedDataParallel" in text and "drop_last" in text
        assert "already" in texts[3]
    assert results[1][1] == []
    [(text, filename)] = results[0][1]
    assert "averaged over the ranks that still have data" in text
    assert os.path.basename(filename) == "test_join.py"
