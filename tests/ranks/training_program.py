"""A training with what real ones have, that survives the loss of any rank; training_run.py kills
its ranks and compares what comes out.

    resilient-run --nproc 4 training_program.py --result result.json
    torchrun --nproc-per-node 4 --max-restarts 3 training_program.py --checkpoint c.pt ...

Several DDP buckets with a communication hook, BatchNorm, dropout, AMP with a scaler, accumulated
gradients, a loader in a spawned process, a mesh of 2 x 2 whose results enter a parameter, and an
asynchronous checkpoint. At the end rank 0 writes a digest of everything that all ranks hold.

With --min-world it goes on with fewer ranks, with --max-world with more. The same by hand:
--until-step N --checkpoint c, then --seats 0,2,3 --checkpoint c with as many ranks; those beyond
the seats begin with their own part.
"""

import argparse
import contextlib
import copy
import fcntl
import hashlib
import itertools
import json
import os
import pickle
import socket
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torch_resilient

BATCH_SIZE = 6
ACCUMULATED = 2
STEPS_PER_EPOCH = 10
RANKS = 4
# Whatever three ranks find of an epoch that four have begun, each has as many of it, and its last
# batch is never a single sample, which BatchNorm refuses.
SAMPLES = RANKS * BATCH_SIZE * ACCUMULATED * STEPS_PER_EPOCH
CHECKPOINT_EVERY = 3


class Samples(Dataset):
    """Each sample follows from its number; the number comes with it, for the books."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(32, generator=generator)
        return index, inputs, (inputs[:10] + inputs[10:20]).argmax()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 48),
            nn.BatchNorm1d(48),
            nn.ReLU(),
            nn.Linear(48, 10),
        )
        # Set from what the groups of the mesh reduce, not from gradients.
        self.sharpness = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, inputs):
        return self.layers(inputs) * self.sharpness


class Statistics:
    """The running statistics of the BatchNorms as a value of their own. Each rank has seen other
    batches, so they belong to the per-rank part: DDP is told not to broadcast them, and after a
    loss each seat has its own again."""

    def __init__(self, model):
        self._model = model

    def state_dict(self):
        return dict(self._model.named_buffers())

    def load_state_dict(self, kept):
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(kept[name])


class Plain:
    """The values without commits, for backends that do not heal."""

    def __init__(self, *, per_rank, **values):
        self.__dict__.update(values | per_rank)

    def commit(self):
        pass


class Checkpoint:
    """Rank 0 writes what was gathered from all, on a thread; nobody waits for it but the end."""

    def __init__(self, path):
        self._path = path
        self._writer = None

    def save(self, state):
        """Collective. What is written is the state of this moment."""
        if not self._path:
            return
        own = (state.statistics.state_dict(), torch.get_rng_state())
        parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, parts)
        if dist.get_rank():
            return
        token = torch_resilient.membership()["fence_token"] if dist.get_backend() != "gloo" else 0
        content = {"parts": parts, "token": token, "step": state.step, "scaler": state.scaler}
        content |= {"seen": state.seen.clone()}
        for name in ("model", "optimizer", "sampler"):
            content[name] = copy.deepcopy(getattr(state, name).state_dict())
        self.finish()
        self._writer = threading.Thread(target=self._write, args=(content,))
        self._writer.start()

    def finish(self):
        if self._writer is not None:
            self._writer.join()

    def _write(self, content):
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            present = self._read()
            if present and present["token"] > content["token"]:
                return  # This rank was fenced meanwhile, and its successor has written already.
            with open(f"{self._path}.part", "wb") as file:
                torch.save(content, file)
                os.fsync(file.fileno())
            os.replace(f"{self._path}.part", self._path)

    def _read(self):
        if self._path and os.path.exists(self._path):
            return torch.load(self._path, weights_only=False)
        return None

    def load(self, state, seat):
        """Brings the state to what was written last, if anything was; `seat`: the rank that this
        one was when it was written, None: it was none."""
        content = self._read()
        if content is None:
            return
        own = copy.deepcopy(state.statistics.state_dict()), torch.get_rng_state()
        for name in ("model", "optimizer", "sampler"):
            getattr(state, name).load_state_dict(content[name])
        state.seen.copy_(content["seen"])
        state.step, state.scaler = content["step"], content["scaler"]
        statistics, generator = own if seat is None else content["parts"][seat]
        state.statistics.load_state_dict(statistics)
        torch.set_rng_state(generator)


class Step:
    """One attempt at the training: what is bound to the groups of this moment."""

    def __init__(self, state):
        self.state = state
        # A communication hook and the buckets belong to this DDP, and a newcomer begins with the
        # buckets of a first backward: all ranks wrap anew. Small buckets, so that there are many.
        self.model = DistributedDataParallel(
            state.model, bucket_cap_mb=0.004, broadcast_buffers=False
        )
        self.model.register_comm_hook(None, fp16_compress_hook)
        self.row, self.column = make_mesh()
        # A scaler that was interrupted between unscale_() and update() refuses the retry of that
        # step, whatever is loaded into it: a new one has the state of the commit.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        if state.scaler:
            self.scaler.load_state_dict(state.scaler)

    def run(self, batches):
        state = self.state
        state.optimizer.zero_grad()
        loss = 0
        for number, (_, inputs, labels) in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = self.model(inputs)
                    part = nn.functional.cross_entropy(outputs.float(), labels) / ACCUMULATED
                self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(state.optimizer)
        self._sharpen(loss)
        self.scaler.step(state.optimizer)
        self.scaler.update()
        state.scaler = self.scaler.state_dict()
        indices = torch.cat([index for index, _, _ in batches])
        everyones = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, indices)
        state.seen.index_add_(0, torch.cat(everyones), torch.ones(len(everyones) * len(indices)))

    def _sharpen(self, loss):
        """Between unscale_ and step, so that a loss of a rank may come here."""
        pooled = loss.reshape(1).clone()
        dist.all_reduce(pooled, group=self.row)
        pooled = torch.tanh(pooled)
        dist.all_reduce(pooled, group=self.column)
        with torch.no_grad():
            self.state.model.sharpness.mul_(0.9).add_(0.05 * pooled)


def make_mesh():
    """The groups of its rows and columns. An odd number of ranks has no such mesh: then it is all
    ranks twice."""
    columns, odd = divmod(dist.get_world_size(), 2)
    if odd:
        return dist.group.WORLD, dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, columns), mesh_dim_names=("row", "column"))
    return mesh.get_group("row"), mesh.get_group("column")


def train(state, loader, checkpoint, args):
    rank, size = dist.get_rank(), dist.get_world_size()
    if state.step == 0:
        # Here and not before: where nothing is committed yet, elastic begins with rank 0's values
        # everywhere, and the statistics are part of the model as well.
        checkpoint.load(state, dict(enumerate(args.seats or range(size))).get(rank))
        if state.step and rank == 0:
            os.write(1, f"begins at step {state.step} of the checkpoint\n".encode())
    if rank == 0:
        os.write(1, f"goes on from step {state.step} with {size} ranks\n".encode())
    step = Step(state)
    for batches in steps_left(state.sampler, loader, args.epochs):
        if state.step == args.until_step:
            break
        step.run(batches)
        state.step += 1
        state.sampler.advance(BATCH_SIZE * len(batches))
        state.commit()
        if rank == 0:
            os.write(1, f"step {state.step} at {time.time()}\n".encode())
            if state.step == args.wait_behind:
                open(args.wait_at).close()
        if state.step == args.until_step or state.step % CHECKPOINT_EVERY == 0:
            checkpoint.save(state)
    checkpoint.finish()
    report(state, step.model, args)


def steps_left(sampler, loader, epochs):
    """What is left of the epochs: for each step its batches. The last one of an epoch may have
    fewer, where the number of ranks has changed in it."""
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        left = iter(loader)
        while batches := list(itertools.islice(left, ACCUMULATED)):
            yield batches


def report(state, model, args):
    """Collective. Not behind the elastic function: a rank may be lost here as well."""
    values = (
        [state.model.state_dict(), state.optimizer.state_dict(), state.scaler],
        [state.seen, state.step, torch.get_rng_state()],
    )
    own = hashlib.sha256(_bytes(values)).hexdigest()
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own)
    if dist.get_rank() == 0 and args.result:
        result = {
            "digest": hashlib.sha256("".join(digests).encode()).hexdigest(),
            "ranks": digests,
            "steps": state.step,
            "seen": [int(state.seen.min()), int(state.seen.max())],
            "buckets": len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")),
            "scale": state.scaler["scale"],
        }
        with open(f"{args.result}.part", "w") as file:
            json.dump(result, file)
        os.replace(f"{args.result}.part", args.result)


def _bytes(value):
    """The same for equal bits, whatever shares memory or was loaded."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(pickle.dumps(key) + _bytes(value[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return b"".join(map(_bytes, value))
    return repr(value).encode()


def make_state(rank, backend):
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(1 + rank)  # Dropout is another one on each rank.
    kind = Plain if backend == "gloo" else torch_resilient.State
    return kind(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        sampler=torch_resilient.ElasticSampler(SAMPLES),
        seen=torch.zeros(SAMPLES),
        scaler={},
        step=0,
        per_rank={"statistics": Statistics(model)},
    )


def seats(text):
    return [int(seat) for seat in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--until-step", type=int, metavar="N", help="ends there, with a checkpoint")
    parser.add_argument("--min-world", type=int, metavar="N", help="goes on with so many ranks")
    parser.add_argument("--max-world", type=int, metavar="N", help="takes in spares, up to N ranks")
    parser.add_argument("--wait-behind", type=int, metavar="N", help="rank 0 waits behind step N")
    parser.add_argument("--wait-at", metavar="FIFO", help="until somebody opens it for writing")
    parser.add_argument("--workers", type=int, default=1, help="processes of each loader")
    parser.add_argument("--backend", default="resilient", choices=("resilient", "gloo"))
    parser.add_argument("--checkpoint", metavar="PATH", help="written, and read at the start")
    parser.add_argument("--seats", type=seats, help="whose parts of the checkpoint the ranks take")
    parser.add_argument("--result", metavar="PATH")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    # One write: where a launcher has one pipe for all ranks, parts of lines would mix.
    host = socket.gethostname()
    os.write(1, f"rank {dist.get_rank()} is process {os.getpid()} on {host}\n".encode())
    state = make_state(dist.get_rank(), args.backend)
    checkpoint = Checkpoint(args.checkpoint)
    # The loader outlives a recovery with its process. Its own generator: an iterator draws a seed
    # when it begins, and how often it begins must not change what dropout draws.
    loader = DataLoader(
        Samples(),
        batch_size=BATCH_SIZE,
        sampler=state.sampler,
        num_workers=args.workers,
        multiprocessing_context="spawn" if args.workers else None,
        persistent_workers=args.workers > 0,
        generator=torch.Generator(),
    )
    run = train
    if args.backend != "gloo":
        sizes = {"min_world": args.min_world, "max_world": args.max_world}
        run = torch_resilient.elastic(train, **sizes)
    run(state, loader, checkpoint, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
