"""ElasticSampler: each sample once, whatever happens to the ranks.

Goal: over any sequence of failures and changes of the number of ranks the committed steps of an
epoch use every sample once, in the order of the epoch. Method: ranks as samplers of one process
with random events between and inside of steps; and real ranks with loaders, one of them killed.
"""

import contextlib
import itertools
import os
import pickle
import random
import signal

import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import torch_resilient
from torch_resilient import ElasticSampler, State, elastic


def order_of(length, epoch=0, **options):
    sampler = ElasticSampler(length, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def place_all(samplers):
    for rank, sampler in enumerate(samplers):
        sampler.place(rank, len(samplers))
    return samplers


def make(count, length, **options):
    return place_all([ElasticSampler(length, **options) for _ in range(count)])


def test_the_order_is_that_of_seed_and_epoch():
    orders = [order_of(50, epoch, seed=seed) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert all(left != right for left, right in itertools.combinations(orders, 2))
    assert order_of(50, 2, seed=1) == orders[5]
    assert order_of(50, 7, shuffle=False) == list(range(50))
    assert order_of(10_000) != order_of(10_000, 1)  # Longer than what is converted at a time.


def test_it_does_not_touch_the_generators_of_the_program():
    before = torch.get_rng_state()
    order_of(100)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_prefix_of_steps_uses_the_next_samples(batch):
    samplers = make(3, 100)
    batches = [list(BatchSampler(sampler, batch, drop_last=False)) for sampler in samplers]
    order = order_of(100)
    for steps in range(100 // (3 * batch) + 1):
        used = [index for rank in batches for part in rank[:steps] for index in part]
        assert sorted(used) == sorted(order[: steps * batch * 3])


def test_lengths():
    for length, ranks, drop_last in itertools.product(range(12), range(1, 6), (False, True)):
        samplers = make(ranks, length, drop_last=drop_last)
        dealt = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(share) for share in dealt]
        together = sum(map(len, dealt))
        assert together == (length - length % ranks if drop_last else length)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= (0 if drop_last else 1)


class Run:
    """Ranks in one process. `used`: the samples of the present commit and of what came since."""

    def __init__(self, chance, length, batch, drop_last):
        self.chance, self.length, self.batch = chance, length, batch
        self.options = {"drop_last": drop_last, "seed": chance.randrange(100)}
        self.samplers = make(chance.randint(1, 5), length, **self.options)
        self.used = {}  # By epoch.
        self.changes = 0
        self.commit()

    def commit(self):
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        self.committed = pickle.dumps((states[0], self.used))

    def fail(self):
        """Other ranks, some of them new processes, go on from the commit."""
        state, self.used = pickle.loads(self.committed)
        count = self.chance.randint(1, 5)
        survivors = self.chance.sample(self.samplers, min(count, len(self.samplers)))
        new = make(count - len(survivors), self.length, **self.options) if count else []
        self.samplers = place_all(survivors + new)
        for sampler in self.samplers:
            sampler.load_state_dict(state)
        self.changes += 1

    def epoch(self, epoch, failing):
        """True when it ended; False when it has to be done again after a failure."""
        for sampler in self.samplers:
            sampler.set_epoch(epoch)
        self.commit()
        loaders = [BatchSampler(sampler, self.batch, drop_last=False) for sampler in self.samplers]
        batches = [iter(list(loader)) for loader in loaders]  # Fetched far ahead.
        while True:
            parts = [next(each, None) for each in batches]
            if parts[0] is None:
                return True
            if self.chance.random() < failing:
                self.fail()
                return False
            together = [
                sampler.advance(self.batch)
                for sampler, part in zip(self.samplers, parts, strict=True)
                if part is not None
            ]
            assert set(together) == {None not in parts}
            self.used.setdefault(epoch, []).extend(i for part in parts if part for i in part)
            if together[0]:
                self.commit()


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_once_over_failures_and_other_numbers_of_ranks(drop_last):
    changes = 0
    for seed in range(300):
        chance = random.Random(seed)
        run = Run(chance, chance.randint(1, 60), chance.randint(1, 7), drop_last)
        for epoch in range(3):
            while not run.epoch(epoch, failing=0.2):
                pass
            used = run.used.get(epoch, [])
            assert len(used) == len(set(used)), f"seed {seed}: repeated in epoch {epoch}"
            lost = run.length - len(used)
            assert lost < len(run.samplers) if drop_last else lost == 0, f"seed {seed}: lost"
            order = order_of(run.length, epoch, seed=run.options["seed"])
            assert sorted(used) == sorted(order[: len(used)])
        changes += run.changes
    assert changes > 300


def test_at_the_end_of_an_epoch_a_restart_stays_in_it():
    """What the program does behind the loop over an epoch belongs to no step: it is done again."""
    sampler = ElasticSampler(4)
    sampler.set_epoch(1)
    sampler.advance(4)
    again = ElasticSampler(4)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(again.epoch)
    assert (again.epoch, list(again), len(again)) == (1, [], 0)


def test_without_set_epoch_the_next_one_begins_by_itself():
    sampler = ElasticSampler(6, seed=3)
    seen = []
    for _ in range(3):
        assert len(sampler) == 6
        for _batch in BatchSampler(sampler, 4, drop_last=False):
            seen.extend(_batch)
            sampler.advance(4)
    assert seen == [i for epoch in range(3) for i in order_of(6, epoch, seed=3)]
    assert sampler.epoch == 2


def test_without_set_epoch_a_rank_that_has_none_of_the_last_samples_is_told():
    first, second = make(2, 3)
    assert [len(list(first)), len(list(second))] == [2, 1]
    assert (first.advance(1), second.advance(1)) == (True, True)
    assert first.advance(1) is False
    first.set_epoch(1)
    with pytest.raises(torch_resilient.ConfigError, match=r"last 1 samples of epoch 0.*set_epoch"):
        iter(second)
    second.set_epoch(1)
    assert second.state_dict() == first.state_dict()


def test_fewer_samples_than_ranks():
    samplers = make(4, 3)
    assert [len(list(sampler)) for sampler in samplers] == [1, 1, 1, 0]
    assert samplers[0].advance(2) is False
    assert [len(list(sampler)) for sampler in make(4, 3, drop_last=True)] == [0] * 4


def test_wrong_uses_are_refused():
    sampler = ElasticSampler(10)
    for wrong in (-1, 1.5, "3", None):
        with pytest.raises(torch_resilient.ConfigError):
            sampler.set_epoch(wrong)
    with pytest.raises(torch_resilient.ConfigError):
        ElasticSampler(-1)
    with pytest.raises(torch_resilient.ConfigError, match="no rank 2 of 2"):
        sampler.place(2, 2)
    with pytest.raises(torch_resilient.ConfigError, match="10 of 10 samples"):
        sampler.advance(0)
    sampler.set_epoch(3)
    with pytest.raises(torch_resilient.ConfigError, match=r"range\(sampler.epoch, EPOCHS\)"):
        sampler.set_epoch(2)
    with pytest.raises(torch_resilient.ConfigError, match="seed=0, this one has 1"):
        ElasticSampler(10, seed=1).load_state_dict(sampler.state_dict())
    sampler.advance(10)
    with pytest.raises(torch_resilient.ConfigError, match="0 of 10 samples are left in epoch 3"):
        sampler.advance(1)


def test_an_iterator_of_another_number_of_ranks_cannot_advance():
    sampler = ElasticSampler(10)
    sampler.place(0, 3)
    iter(sampler)
    sampler.place(0, 2)
    with pytest.raises(torch_resilient.ConfigError, match="2 ranks, and there were 3"):
        sampler.advance(1)
    iter(sampler)
    assert sampler.advance(1)


def test_data_sets_and_copies():
    data = TensorDataset(torch.arange(5.0))
    sampler = pickle.loads(pickle.dumps(ElasticSampler(data, shuffle=False)))
    assert [float(value) for (value,) in DataLoader(data, sampler=sampler)] == [0, 1, 2, 3, 4]


LENGTH, BATCH, EPOCHS = 53, 4, 2
DATA = TensorDataset(torch.arange(LENGTH))


def train(state, workers, die):
    model = DistributedDataParallel(state.model)
    loader = DataLoader(
        DATA,
        batch_size=BATCH,
        sampler=state.sampler,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        persistent_workers=bool(workers),
    )
    for epoch in range(state.sampler.epoch, EPOCHS):
        state.sampler.set_epoch(epoch)
        batches = iter(loader)
        if workers:
            tell([worker.pid for worker in batches._workers])
        for (samples,) in batches:
            if die and (epoch, state.sampler.consumed) == (0, 6 * BATCH):
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            model(samples.reshape(-1, 1) / LENGTH).square().mean().backward()
            state.optimizer.step()
            state.used = [*state.used, (epoch, samples.tolist())]
            if state.sampler.advance(BATCH):
                state.commit()


def run_rank(workers, die):
    dist.init_process_group("resilient")
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    state = State(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        sampler=ElasticSampler(DATA, seed=5, drop_last=True),
        per_rank={"used": []},
    )
    elastic(train)(state, workers, die)
    dist.destroy_process_group()
    return state.used, model.weight.item(), state.sampler.state_dict()


def end_workers(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_with_spawned_loaders_changes_nothing(world):
    undisturbed = world.run(run_rank, 2, 0, False)
    for epoch in range(EPOCHS):
        used = [i for ours, *_ in undisturbed for when, part in ours for i in part if when == epoch]
        assert sorted(used) == sorted(order_of(LENGTH, epoch, seed=5)[: LENGTH - LENGTH % 2])
    world.job += "-killed"
    wait = {"RESILIENT_SEAT_WAIT": "60s"}
    ranks = [world.start_rank(run_rank, rank, 2, 1, rank == 1, env=wait) for rank in range(2)]
    workers = ranks[1].told(60)
    try:
        assert ranks[1].wait(60) == -signal.SIGKILL, ranks[1].stderr()
        ranks[1] = world.start_rank(run_rank, 1, 2, 1, False, env=wait)
        assert [rank.value(120) for rank in ranks] == undisturbed
    finally:
        end_workers(workers)  # Of the killed rank: they look for their parent every 5 s.


def use_some(state, steps):
    dist.init_process_group("resilient")
    sampler = ElasticSampler(LENGTH, seed=9)
    if state is not None:
        sampler.load_state_dict(state)
    sampler.set_epoch(sampler.epoch)
    used = []
    for part in itertools.islice(BatchSampler(sampler, BATCH, drop_last=False), steps):
        used += part
        sampler.advance(BATCH)
    dist.destroy_process_group()
    return used, sampler.state_dict()


def test_another_number_of_ranks_goes_on_where_the_first_ended(world):
    used, state = [], None
    for size, steps in ((3, 2), (1, 1), (2, None)):
        world.job += "x"
        results = world.run(use_some, size, state, steps)
        used += [index for share, _ in results for index in share]
        state = results[0][1]
        # The last sample is one rank's: the other has not taken that step.
        assert steps is None or all(end == state for _, end in results)
    assert sorted(used) == list(range(LENGTH))
