"""digits.py that survives the loss of any rank, at any time.

    resilient-run --nproc 4 digits_elastic.py

What differs from digits.py: what must survive is named in a State, the training is a function of
it, which wraps the model itself and commits after each step.
"""

import argparse

import torch
import torch.distributed as dist
from digits import accuracy, digest, make_data, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import torch_resilient

BATCH_SIZE = 16


def remaining(train_set, seed, epoch, first_batch):
    """This rank's batches of the epoch, without those that were trained before a restart."""
    sampler = DistributedSampler(train_set, seed=seed)
    sampler.set_epoch(epoch)
    mine = list(sampler)[first_batch * BATCH_SIZE :]
    return DataLoader(Subset(train_set, mine), batch_size=BATCH_SIZE)


def train(state, train_set, args):
    model = DistributedDataParallel(state.model, bucket_cap_mb=0.05)
    while state.epoch < args.epochs:
        for images, labels in remaining(train_set, args.seed, state.epoch, state.batch):
            state.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            state.optimizer.step()
            state.batch += 1
            state.step += 1
            state.commit()
            if dist.get_rank() == 0 and state.step % args.log_every == 0:
                print(f"step {state.step} loss {loss.item():.4f}", flush=True)
            if args.steps and state.step >= args.steps:
                return
        state.epoch += 1
        state.batch = 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--save", metavar="PATH", help="where rank 0 writes the final parameters")
    args = parser.parse_args()

    dist.init_process_group("resilient")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    train_set, test_images, test_labels = make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = torch_resilient.State(model=model, optimizer=optimizer, epoch=0, batch=0, step=0)

    torch_resilient.elastic(train)(state, train_set, args)

    if dist.get_rank() == 0:
        result = accuracy(model, test_images, test_labels)
        print(f"test accuracy {result:.4f}", flush=True)
        print(f"parameters {digest(model)}", flush=True)
        if args.save:
            torch.save(model.state_dict(), args.save)
        assert args.steps or result >= 0.95, f"the accuracy {result:.4f} is below 0.95"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
