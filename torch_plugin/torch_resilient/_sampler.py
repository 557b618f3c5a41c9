"""ElasticSampler: one shuffled pass over a data set by a number of ranks that may change."""

import hashlib
import numbers
import operator

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from torch_resilient import _errors

_CHUNK = 4096  # Indices that become Python numbers at a time.
_KEPT = ("length", "shuffle", "seed")  # What must be the same where a state is loaded.


class ElasticSampler(Sampler):
    """Which samples of a data set this rank uses: in each epoch every sample once by some rank,
    also when ranks are lost, replaced, or become fewer or more in the midst of it.

        sampler = ElasticSampler(len(data))
        state = State(model=model, sampler=sampler)
        # in the function that elastic runs:
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...
                optimizer.step()
                if sampler.advance(32):
                    state.commit()

    The order of an epoch is drawn from `seed` and its number alone. `consumed` is how many samples
    of it all ranks together have used. Iterating deals what is behind it to the ranks of that
    moment, one sample each in turn, so that any number of steps with batches of one size uses the
    next samples of the order and no other. As loaders fetch ahead, iterating uses nothing up:
    `advance` does, once for each step of the optimizer, behind it and before the commit. After a
    failure, and whenever the ranks have changed, iterate anew.

    The last samples of an epoch may be fewer than the ranks. With `drop_last` they are left out (of
    a DataLoader it would leave out more, by rank; use this one). Otherwise the first ranks have
    one sample more, and perhaps one batch, which the others do not have: such a step needs
    `torch_resilient.join`, and as `advance` returns False for it, it is committed with the next.

    A program that calls no set_epoch is in the next epoch when it iterates with nothing left.

    `data`: the data set, or its length. Ranks are those of torch.distributed while it is
    initialised, else there is one; `place` says otherwise. A value for the replicated part of a
    State. Used by one thread; processes of a DataLoader do not need it.
    """

    def __init__(self, data, *, shuffle=True, seed=0, drop_last=False):
        self.length = _count(
            data if isinstance(data, numbers.Integral) else len(data), "the length of the data"
        )
        self.shuffle = bool(shuffle)
        self.seed = operator.index(seed)
        self.drop_last = bool(drop_last)
        self._epoch = 0
        self._consumed = 0
        self._place = None  # (rank, number of ranks) if they were given.
        self._dealt_to = None  # How many ranks there were when this process iterated last.
        self._told_epoch = False  # The program calls set_epoch.

    @property
    def epoch(self):
        return self._epoch

    @property
    def consumed(self):
        return self._consumed

    def place(self, rank, ranks):
        """The ranks that share the data, where these are not all of torch.distributed: those of one
        dimension of a mesh. To be called again whenever they have changed."""
        rank, ranks = _count(rank, "the rank"), _count(ranks, "the number of ranks")
        if rank >= ranks:
            raise _errors.ConfigError(f"ElasticSampler: there is no rank {rank} of {ranks}")
        self._place = rank, ranks

    def set_epoch(self, epoch):
        """To the beginning of this epoch; where it is in it already, it stays where it is."""
        epoch = _count(epoch, "the epoch")
        if epoch < self._epoch:
            raise _errors.ConfigError(
                f"set_epoch({epoch}): this sampler is in epoch {self._epoch}, and going back would"
                " repeat samples. Begin where it is: for epoch in range(sampler.epoch, EPOCHS)"
            )
        self._told_epoch = True
        if epoch > self._epoch:
            self._begin(epoch)

    def advance(self, batch_size):
        """All ranks have used their next `batch_size` samples, or what they had left. The same
        number on every rank: of the loader's batches, times those that are accumulated, also where
        the last one was smaller. True when every rank had a sample in this step."""
        batch_size = _count(batch_size, "the batch size")
        _, ranks = self._here()
        if self._dealt_to not in (None, ranks):
            raise _errors.ConfigError(
                f"ElasticSampler.advance: there are {ranks} ranks, and there were {self._dealt_to}"
                " when this rank began to iterate: iterate anew after such a change"
            )
        left = self._left(ranks)
        if not batch_size or not left:
            raise _errors.ConfigError(
                f"ElasticSampler.advance({batch_size}): {left} of {self.length} samples are left in"
                f" epoch {self._epoch}. It is called once for each step, with the size of a batch"
            )
        used = min(left, batch_size * ranks)
        self._consumed += used
        return used >= ranks

    def __iter__(self):
        rank, ranks = self._here()
        if self._ends_by_itself(ranks):
            self._begin(self._epoch + 1)
        left = self._left(ranks)
        if left and not self._told_epoch and rank >= left and self._dealt_to == ranks:
            raise _errors.ConfigError(
                f"ElasticSampler: other ranks have the last {left} samples of epoch {self._epoch},"
                " this one has none, and cannot know when they are through: use set_epoch(), or"
                " drop_last=True"
            )
        self._dealt_to = ranks
        order = self._order()
        return _numbers(order[self._consumed : self._consumed + left][rank::ranks])

    def __len__(self):
        """How many samples iterating gives now, on this rank."""
        rank, ranks = self._here()
        samples = self.length if self._ends_by_itself(ranks) else self.length - self._consumed
        left = self._usable(samples, ranks)
        return max(0, -(-(left - rank) // ranks))

    def state_dict(self):
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**kept, "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state):
        for name in _KEPT:
            if state[name] != getattr(self, name):
                raise _errors.ConfigError(
                    f"ElasticSampler: the state is of one with {name}={state[name]}, this one has"
                    f" {getattr(self, name)}: with another order samples would be lost and repeated"
                )
        self._epoch, self._consumed = state["epoch"], state["consumed"]
        self._dealt_to = None

    def _here(self):
        if self._place is not None:
            return self._place
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def _left(self, ranks):
        return self._usable(self.length - self._consumed, ranks)

    def _usable(self, samples, ranks):
        return samples - samples % ranks if self.drop_last else samples

    def _ends_by_itself(self, ranks):
        return not self._told_epoch and self._consumed > 0 and not self._left(ranks)

    def _begin(self, epoch):
        self._epoch, self._consumed = epoch, 0
        self._dealt_to = None

    def _order(self):
        if not self.shuffle:
            return range(self.length)
        # Not their sum, by which seed 1 would have in each epoch the order of seed 0 in the next.
        digest = hashlib.sha256(f"{self.seed}/{self._epoch}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(
            int.from_bytes(digest[:8], "big") >> 1
        )
        return torch.randperm(self.length, generator=generator, dtype=torch.int64, device="cpu")


def _numbers(share):
    for begin in range(0, len(share), _CHUNK):
        part = share[begin : begin + _CHUNK]
        yield from part.tolist() if isinstance(part, torch.Tensor) else part


def _count(value, what):
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise _errors.ConfigError(f"ElasticSampler: {what} is {value!r} and must be a whole number")
    return number
