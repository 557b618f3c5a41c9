"""Trains a small network on the UCI handwritten digits with DistributedDataParallel.

An ordinary script: it names its backend and knows nothing else about it.

    torchrun --nproc-per-node 4 digits.py --backend resilient
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    """1,797 images of 8 x 8 pixels; every fifth is kept for the test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32)
    labels = torch.tensor(labels)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), images[test], labels[test]


def make_model():
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def digest(model):
    """SHA-256 of all parameters: equal means bit for bit."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.cpu().numpy().tobytes())
    return sha.hexdigest()


def accuracy(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="resilient")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    train_set, test_images, test_labels = make_data()
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    # Small buckets, so that a step has several all-reduces under way while backward still runs.
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        result = accuracy(model.module, test_images, test_labels)
        print(f"test accuracy {result:.4f}", flush=True)
        print(f"parameters {digest(model.module)}", flush=True)
        assert result >= 0.95, f"the accuracy {result:.4f} is below 0.95"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
