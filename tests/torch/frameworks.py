"""What the tests of frameworks share: a program is run by us and by Gloo, and its results compared.

A program is a function of (backend, meeting, ...) that returns {name: tensor or plain value} on
each rank. It is fed the same numbers on both.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from tensors import same
from torch import nn

SECONDS = 60


def join(backend, meeting):
    """(rank, world size) after init; Gloo's ranks find each other in the file `meeting`."""
    if backend == "resilient":
        dist.init_process_group(backend)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=size
        )
    return dist.get_rank(), dist.get_world_size()


def same_as_gloo(world, tmp_path, program, size, *args, exact, seconds=SECONDS):
    """Runs the program by both and compares rank by rank: bit for bit, or, where not `exact`, up to
    rounding (Gloo does not add in the order of ranks). Returns our results."""
    ours = world.run(program, size, "resilient", None, *args, seconds=seconds)
    theirs = world.run(program, size, "gloo", str(tmp_path / "meeting"), *args, seconds=seconds)
    for rank, (result, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert result and result.keys() == expected.keys()
        for name in result:
            compare(result[name], expected[name], f"{name} of rank {rank}", exact)
    return ours


def compare(ours, expected, what, exact):
    if not isinstance(expected, torch.Tensor):
        assert ours == expected, what
    elif exact:
        same(ours, expected, what)
    else:
        torch.testing.assert_close(ours, expected, msg=lambda text: f"{what}: {text}")


def batch(rank, step, rows=6, inputs=20, outputs=5):
    """(inputs, targets) that differ by rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    targets = torch.randn(rows, outputs, generator=generator)
    return torch.randn(rows, inputs, generator=generator), targets


class Layers(nn.Module):
    """Three linear layers. With a forward of its own: Dynamo leaves that of nn.Sequential alone."""

    def __init__(self, width, inputs, outputs):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, inputs):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


def layers(seed=0, width=32, inputs=20, outputs=5):
    """A small network, the same on every rank."""
    torch.manual_seed(seed)
    return Layers(width, inputs, outputs)


def parameters(module, prefix=""):
    return {f"{prefix}{name}": value.detach().clone() for name, value in module.named_parameters()}


@contextlib.contextmanager
def ended_by(victim):
    """For the survivors of the death of `victim`: what ends the block names it. The class may be
    one of the framework's, which then keeps our text."""
    import torch_resilient

    try:
        yield
    except Exception as error:
        ours = error
        while not isinstance(ours, torch_resilient.RankLostError) and ours.__cause__ is not None:
            ours = ours.__cause__
        assert isinstance(ours, torch_resilient.RankLostError), repr(error)
        assert str(ours).startswith("[resilient:RANK_LOST]"), str(ours)
        assert ours.rank == victim, str(ours)
    else:
        raise AssertionError("nothing was raised")
