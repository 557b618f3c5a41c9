"""An ordinary DeepSpeed program on the CPU: a rank comes late to init, then all train."""

import argparse
import json
import os
import time
from datetime import timedelta

import deepspeed
import late
import program
import torch
from deepspeed.comm.torch import build_shm_op

parser = argparse.ArgumentParser()
parser.add_argument("--backend", help="without it deepspeed.initialize() takes its own")
parser.add_argument("--late-rank", type=int)
parser.add_argument("--late", type=float, default=0)
parser.add_argument("--timeout", type=float, default=10)
parser.add_argument("--compile-only", action="store_true")
args = parser.parse_args()


def build():
    if args.backend:
        timeout = timedelta(seconds=args.timeout)
        deepspeed.init_distributed(dist_backend=args.backend, timeout=timeout)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine):
    losses = []
    for _ in range(3):
        loss = engine(torch.randn(4, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = engine.module.weight.tolist()
    backend = torch.distributed.get_backend()
    result = {"backend": backend, "losses": losses, "weights": weights}
    program.tell("result", json.dumps(result))


def main():
    if args.compile_only:  # What the first init of a machine would do.
        build_shm_op()
        return
    program.tell("imported")
    if int(os.environ["RANK"]) == args.late_rank:
        late.work(args.late)
    program.tell("init", time.time())
    with program.telling_failure():
        train(build())
    torch.distributed.destroy_process_group()


main()
