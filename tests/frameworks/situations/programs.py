"""What the ranks of a situation run: `python programs.py NAME` runs the function of that name.

Functions are here, in uses.py (what a program does with torch.distributed) and in ends.py. A rank
says by a file that it has trained or failed, for its output may be closed.
"""

import importlib
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BACKEND = os.environ["SITUATION_BACKEND"]
FOLDER = Path(os.environ["SITUATION_FOLDER"])
TIMEOUT = timedelta(seconds=30)
MODULES = ("uses", "ends", "starters")


def mark(kind, text=""):
    """Says something to whoever runs the situation."""
    path = FOLDER / f"{kind}-{time.time_ns()}-{os.getpid()}"
    unfinished = FOLDER / f".{path.name}"
    unfinished.write_text(text)
    unfinished.rename(path)


def marks(kind):
    return len(list(FOLDER.glob(f"{kind}-*")))


def await_marks(kind, number, seconds=50):
    """Until so many have said so."""
    deadline = time.monotonic() + seconds
    while marks(kind) < number:
        assert time.monotonic() < deadline, f"no {number} x {kind} in {seconds} s"
        time.sleep(0.02)


def init(*arguments, **options):
    dist.init_process_group(*(arguments or (BACKEND,)), **{"timeout": TIMEOUT, **options})


def add_up(group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = torch.tensor([rank + 1.0], dtype=torch.float32, device="cpu")
    dist.all_reduce(total, group=group)
    assert total.item() == size * (size + 1) / 2, total


def steps():
    """Two steps of data parallel training by hand; all ranks hold the same afterwards."""
    add_up()
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1, dtype=torch.float32)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for _ in range(2):
        model(torch.randn(3, 4, dtype=torch.float32)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
    mine = model.weight.detach().clone()
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(mine, other) for other in all_of_them)
    mark("trained", dist.group.WORLD._get_backend(torch.device("cpu")).name())


def world(*arguments, **options):
    """A whole world: its init, its steps, its end."""
    init(*arguments, **options)
    steps()
    dist.destroy_process_group()


def train():
    world()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_of(rank, size, port=None, **more):
    """As a launcher would, for a process that became a rank only now."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), **more)
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE=str(size))
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)


def train_as(rank, size):
    """For processes that a program starts itself."""
    rank_of(rank, size)
    run("train")


def find(name):
    for module in ("programs", *MODULES):
        if function := getattr(importlib.import_module(module), name, None):
            return function
    raise SystemExit(f"there is no program {name}")


def run(name, *arguments):
    function = find(name)
    try:
        function(*arguments)
    except Exception as error:
        lines = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()
        try:
            mark("failed", lines[0])
        except OSError:
            pass
        raise


def main():
    run(*sys.argv[1:])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # An isolated interpreter leaves it out.
    import programs  # Under its own name, as the modules that import it know it.

    programs.main()
