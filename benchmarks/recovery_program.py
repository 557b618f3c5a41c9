"""The training that recovery_bench.py kills: a small model, a step, a checkpoint on disk, a step.

Each rank tells on stdout, one JSON object a line, when it begins and when it has made a step.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Plain:
    """The values without commits, for backends that do not heal."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def commit(self):
        pass


def tell(**message):
    # One write: a launcher may have one pipe for all ranks.
    line = json.dumps({**message, "pid": os.getpid(), "time": time.time()})
    os.write(1, (line + "\n").encode())


def save(state, path):
    content = {name: getattr(state, name).state_dict() for name in ("model", "optimizer")}
    torch.save({**content, "step": state.step}, f"{path}.part")
    os.replace(f"{path}.part", path)


def load(state, path):
    if os.path.exists(path):
        content = torch.load(path)
        state.model.load_state_dict(content["model"])
        state.optimizer.load_state_dict(content["optimizer"])
        state.step = content["step"]


def train(state, checkpoint):
    """Until it is ended from outside."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if state.step == 0:
        load(state, checkpoint)
    model = DistributedDataParallel(state.model)
    while True:
        state.optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        if rank == 0:
            save(state, checkpoint)
        tell(event="step", step=state.step, rank=rank, size=size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--backend", default="resilient", choices=("resilient", "gloo"))
    parser.add_argument("--min-world", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tell(event="begins", seat=int(os.environ["RANK"]))
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    values = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
    if args.backend == "gloo":
        train(Plain(**values), args.checkpoint)
    else:
        import torch_resilient

        run = torch_resilient.elastic(train, min_world=args.min_world)
        run(torch_resilient.State(**values), args.checkpoint)


if __name__ == "__main__":
    main()
