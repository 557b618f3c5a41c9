"""What recovery_program.py trains, as one replica group of torchft: recovery_bench.py starts four.

Gradients go through the manager one by one. torchft's DistributedDataParallel would be the same
training as in the other forms, but in 0.2.0 its hook ends a survivor whose all_reduce fails
(`assert fut._fut`), which happens if one is under way when a rank is killed.
"""

import argparse
import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo


def tell(**message):
    # One write: all groups have one pipe.
    line = json.dumps({**message, "pid": os.getpid(), "time": time.time()})
    os.write(1, (line + "\n").encode())


def managed(model, optimizer, rank, gloo_seconds):
    """The manager of this group, which has the store that torchrun would bring."""

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=gloo_seconds)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        timeout=timedelta(seconds=30),
        replica_id=f"recovery_{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    return manager, store


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gloo-seconds", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    tell(event="begins", seat=rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    plain = torch.optim.AdamW(model.parameters())
    manager, _store = managed(model, plain, rank, args.gloo_seconds)
    optimizer = Optimizer(manager, plain)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        # Not told: a step that an error has discarded.
        if manager.current_step() > step:
            size = manager.num_participants()
            tell(event="step", step=manager.current_step(), rank=rank, size=size)


if __name__ == "__main__":
    main()
