"""An accelerate program as multi-scale image trainers are: each rank has a contiguous part of the
images, puts them in batches of one aspect ratio, and drops what is left of each ratio. So the
ranks have different numbers of batches."""

import argparse
import contextlib
import json

import program
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

RATIOS = 7
IMAGES = 223
BATCH = 4

parser = argparse.ArgumentParser()
parser.add_argument("--join", action="store_true")
args = parser.parse_args()


def batches_of(rank, size):
    ratios = torch.randint(RATIOS, (IMAGES,), generator=torch.Generator().manual_seed(5)).tolist()
    return program.batches_of_one_ratio(ratios, rank, size, BATCH)


def load(ratio, images):
    generator = torch.Generator().manual_seed(images[0])
    return torch.randn(len(images), 3, 8 + ratio, 8 + RATIOS - ratio, generator=generator)


accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="resilient")])
torch.manual_seed(1)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 3)
)
model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-3))
mine = list(batches_of(accelerator.process_index, accelerator.num_processes))
program.tell("batches", len(mine))


def uneven():
    if not args.join:
        return contextlib.nullcontext()
    import torch_resilient

    return torch_resilient.join(model, optimizer=optimizer)


for _ in range(2):
    with uneven():
        for ratio, images in mine:
            optimizer.zero_grad()
            loss = model(load(ratio, images)).mean((1, 2, 3)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
    accelerator.wait_for_everyone()
weights = [float(parameter.sum()) for parameter in model.parameters()]
program.tell("result", json.dumps({"batches": len(mine), "weights": weights}))
accelerator.end_training()
