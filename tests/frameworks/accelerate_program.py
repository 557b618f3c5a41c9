"""An ordinary accelerate program: the main process caches, then all train. Knows nothing of us."""

import argparse
import json
import os
import time
from datetime import timedelta

import late
import program
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
parser.add_argument("--busy", type=float, default=0)
parser.add_argument("--timeout", type=float, default=10)
parser.add_argument("--lazy", action="store_true", help="the others wait where a group is made")
args = parser.parse_args()


def wait_for_main_process(accelerator):
    if accelerator.is_main_process and args.busy:
        program.tell("caching", os.getpid())
        late.work(args.busy)
    program.tell("waiting", time.time())
    if args.lazy:
        group = torch.distributed.new_group(timeout=timedelta(seconds=args.timeout))
        torch.distributed.all_reduce(torch.ones(1), group=group)
    accelerator.wait_for_everyone()


accelerator = program.accelerator(args.backend, args.timeout)
with program.telling_failure():
    wait_for_main_process(accelerator)

torch.manual_seed(1)
inputs = torch.randn(64, 4)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(data, batch_size=4)
)
losses = []
for features, targets in loader:
    optimizer.zero_grad()
    loss = (model(features) - targets).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
backend = torch.distributed.get_backend()
program.tell("result", json.dumps({"backend": backend, "losses": losses}))
accelerator.end_training()
