"""Programs on pipelines of stages that send to each other; see frameworks.py."""

import copy

import torch
import torch.distributed as dist
from frameworks import batch, die, join, lost, ready
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

CPU = torch.device("cpu")
WIDTH = 20
MICROBATCHES = 8
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return torch.tanh(self.layer(inputs))


def loss_of(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def data(step):
    return batch(0, step, rows=2 * MICROBATCHES, inputs=WIDTH, outputs=WIDTH)


def stages_of(rank, size, schedule):
    """Which stages the rank has."""
    if schedule in ("GPipe", "1F1B"):
        return [rank]
    if schedule == "interleaved":
        return [rank, rank + size]
    return [rank, 2 * size - 1 - rank]  # Down and up again.


def made(rank, size, schedule):
    """(schedule, its stages' numbers and modules)"""
    numbers = stages_of(rank, size, schedule)
    count = size * len(numbers)
    parts = [Part(number) for number in numbers]
    stages = [
        PipelineStage(part, number, count, CPU) for part, number in zip(parts, numbers, strict=True)
    ]
    kind = SCHEDULES[schedule]
    run = kind(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    return run, dict(zip(numbers, parts, strict=True)), count


def train(run, parts, last, steps):
    """The losses of all microbatches, where the last stage is."""
    optimizer = torch.optim.SGD(
        [value for part in parts.values() for value in part.parameters()], lr=0.1
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = data(step)
        arguments = [inputs] if 0 in parts else []
        if last in parts:
            run.step(*arguments, target=targets, losses=losses)
        else:
            run.step(*arguments)
        optimizer.step()
    return torch.stack(losses).detach() if losses else torch.zeros(0)


def train_alone(count, steps):
    """The parts after the same steps, on one rank."""
    parts = [Part(number) for number in range(count)]
    whole = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = data(step)
        for rows, wanted in zip(
            inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True
        ):
            (loss_of(whole(rows), wanted) / MICROBATCHES).backward()
        optimizer.step()
    return parts


def schedules(backend, meeting, names):
    rank, size = join(backend, meeting)
    results = {}
    for name in names:
        run, parts, count = made(rank, size, name)
        results[f"{name} losses"] = train(run, parts, count - 1, 3)
        expected = train_alone(count, 3)
        for number, part in parts.items():
            for key, value in part.named_parameters():
                wanted = dict(expected[number].named_parameters())[key]
                torch.testing.assert_close(value, wanted)
                results[f"{name} {number} {key}"] = value.detach()
    dist.destroy_process_group()
    return results


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(0), Part(1)

    def forward(self, inputs):
        return self.second(self.first(inputs))


def traced(backend, meeting):
    """A model that torch cuts into stages by itself, forward only."""
    rank, size = join(backend, meeting)
    model = Whole()
    inputs, _ = data(0)
    pipe = pipeline(
        copy.deepcopy(model),
        mb_args=(inputs.chunk(MICROBATCHES)[0],),
        split_spec={"second": SplitPoint.BEGINNING},
    )
    run = ScheduleGPipe(pipe.build_stage(rank, CPU), MICROBATCHES)
    output = run.step(inputs) if rank == 0 else run.step()
    result = {"size": size}
    if rank == size - 1:
        torch.testing.assert_close(output, model(inputs))
        result["output"] = output.detach()
    dist.destroy_process_group()
    return result


def ring(backend, meeting):
    """Exchanges of many tensors with both neighbours, as attention over a ring does."""
    rank, size = join(backend, meeting)
    before, after = (rank - 1) % size, (rank + 1) % size
    mine = [torch.full((count,), float(rank)) for count in (1, 1000, 100_000)]
    for turn in range(1, size + 1):
        received = [torch.empty_like(tensor) for tensor in mine]
        operations = [dist.P2POp(dist.isend, tensor, after) for tensor in mine]
        operations += [dist.P2POp(dist.irecv, tensor, before) for tensor in received]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        mine = received
        for tensor in mine:
            assert torch.equal(tensor, torch.full_like(tensor, float((rank - turn) % size)))
    dist.destroy_process_group()
    return {str(tensor.numel()): tensor for tensor in mine[:2]}


def loses_a_rank(victim, schedule):
    """The victim ends in the midst of a step, in its third forward."""
    rank, size = join("resilient", None)
    run, parts, count = made(rank, size, schedule)
    train(run, parts, count - 1, 1)
    ready(rank, victim)
    if rank == victim:
        forwards = []

        def end(module, inputs):
            forwards.append(None)
            if len(forwards) == 3:
                die()

        parts[rank].register_forward_pre_hook(end)
    return lost(victim, train, run, parts, count - 1, 100)
