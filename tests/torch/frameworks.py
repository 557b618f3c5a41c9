"""What the tests of frameworks share: a program is run by us and by Gloo, and its results compared.

A program is a function of (backend, meeting, ...) that returns {name: tensor or plain value} on
each rank. It is fed the same numbers on both.
"""

import os
import signal
import time
import warnings

import torch
import torch.distributed as dist
from harness import RankFailed
from rank_server import hear, tell
from tensors import same
from torch import nn

import torch_resilient

SECONDS = 60
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
GLOO_TRIES = 3
ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
ROUNDING_BF16 = {"rtol": 0.02, "atol": 2e-3}  # Of what was added up in bf16.


class GlooCrashedWarning(UserWarning):
    """A run of Gloo's did not count; see by_gloo."""


def join(backend, meeting):
    """(rank, world size) after init; Gloo's ranks find each other in the file `meeting`."""
    if backend == "resilient":
        dist.init_process_group(backend)
    else:
        assert not runs_our_code()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=size
        )
    return dist.get_rank(), dist.get_world_size()


def runs_our_code():
    """Whether this process has loaded the extension; Python alone spoils no memory."""
    with open("/proc/self/maps") as maps:
        return any("torch_resilient" in line and ".so" in line for line in maps)


def same_as_gloo(world, tmp_path, program, size, *args, exact, seconds=SECONDS):
    """Runs the program by both and compares rank by rank: bit for bit, or, where not `exact`, up to
    rounding (Gloo does not add in the order of ranks, nor bf16 in float). Returns our results."""
    more = {
        "env": {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        },
        "seconds": seconds,
    }
    ours = world.run(program, size, "resilient", None, *args, **more)
    theirs = by_gloo(world, tmp_path, program, size, *args, **more)
    for rank, (result, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert result and result.keys() == expected.keys()
        for name in result:
            compare(result[name], expected[name], f"{name} of rank {rank}", exact)
    return ours


def by_gloo(world, tmp_path, program, size, *args, env, seconds):
    """What the program returns on each rank with Gloo. It is run again when Gloo crashes, and only
    then: torch 2.15 spoils its own heap now and then, in processes without a line of ours (see
    "Bugs met" in docs/testing.md). What is tested here is never run a second time."""
    for number in range(GLOO_TRIES):
        meeting = str(tmp_path / f"meeting{number}")
        deadline = time.monotonic() + seconds
        ranks = world.start(program, size, "gloo", meeting, *args, env=env)
        for rank in ranks:
            rank.outcome(max(deadline - time.monotonic(), 1))
        codes = [rank.wait(max(deadline - time.monotonic(), 1)) for rank in ranks]
        if not any(code in CRASHES for code in codes):
            return [rank.value() for rank in ranks]
        stderr = "".join(rank.stderr() for rank in ranks)
        warnings.warn(f"exit codes {codes}:\n{stderr}", GlooCrashedWarning, stacklevel=2)
    raise RankFailed(f"Gloo crashed {GLOO_TRIES} times, with the exit codes {codes}:\n{stderr}")


def compare(ours, expected, what, exact):
    if not isinstance(expected, torch.Tensor):
        assert ours == expected, what
    elif exact:
        same(ours, expected, what)
    else:
        close = ROUNDING_BF16 if what.startswith("bf16") else ROUNDING
        torch.testing.assert_close(ours, expected, msg=lambda text: f"{what}: {text}", **close)


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


def ready(rank, victim):
    """All ranks call it before the end of one of them, which waits until all are here."""
    tell("ready")
    if rank == victim:
        hear()


def die():
    """Ends this rank as the kernel would; the test is told when."""
    tell(time.time())
    os.kill(os.getpid(), signal.SIGKILL)


def lost(victim, function, *args):
    """For the others: what `function` raises names the victim, even where the framework has put an
    exception of its own around it. When the loss was known, and when it was raised."""
    try:
        function(*args)
    except Exception as error:
        raised = time.time()
        ours = error
        while not isinstance(ours, torch_resilient.RankLostError) and ours.__cause__ is not None:
            ours = ours.__cause__
        assert isinstance(ours, torch_resilient.RankLostError), repr(error)
        assert str(ours).startswith("[resilient:RANK_LOST]"), str(ours)
        assert ours.rank == victim, str(ours)
        return torch_resilient.last_incident()["known"], raised
    raise AssertionError("nothing was raised")
