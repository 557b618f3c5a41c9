"""Multi-scale training with accelerate: batches of one aspect ratio each, incomplete ones dropped.

Each rank has a range of the samples, so the ranks have different numbers of batches unless there
is one ratio only.
"""

import argparse
import json
import random
import time

import program
import torch

BATCH = 4
SAMPLES = 240
EPOCHS = 2

parser = argparse.ArgumentParser()
parser.add_argument("--backend")
parser.add_argument("--ratios", type=int, default=7)
parser.add_argument("--timeout", type=float, default=600)
parser.add_argument("--leave", action="store_true", help="end without waiting for everyone")
args = parser.parse_args()


def batches(rank, size):
    ratios = [random.Random(sample).randrange(args.ratios) for sample in range(SAMPLES)]
    return program.batches_of_one_ratio(ratios, rank, size, BATCH)


def train(accelerator):
    torch.manual_seed(1)
    model = torch.nn.Conv2d(1, 2, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    steps = []
    for epoch in range(1 if args.leave else EPOCHS):
        count = 0
        for ratio, samples in batches(accelerator.process_index, accelerator.num_processes):
            optimizer.zero_grad()
            images = torch.full((BATCH, 1, 8 + ratio, 16 - ratio), float(len(samples)))
            loss = model(images).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.gather(loss.detach().reshape(1))
            count += 1
        program.tell("epoch", epoch, count, time.time())
        steps.append(count)
        if not args.leave:
            accelerator.wait_for_everyone()
    return steps


def main():
    accelerator = program.accelerator(args.backend, args.timeout)
    with program.telling_failure():
        steps = train(accelerator)
    program.tell("result", json.dumps({"steps": steps}))
    accelerator.end_training()


main()
