"""DDP, the end of processes, and data loaders."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torch_resilient


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 5)
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 20, generator=generator), torch.randn(6, 5, generator=generator)


def train_with_ddp(steps):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    result = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    dist.destroy_process_group()
    return result


def train_alone(size, steps):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            inputs, targets = batch(rank, step)
            (nn.functional.mse_loss(model(inputs), targets) / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("size", [2, 4])
def test_ddp_equals_a_single_process(world, size):
    alone = train_alone(size, 10)
    for result in world.run(train_with_ddp, size, 10):
        for ours, expected in zip(result, alone, strict=True):
            assert torch.allclose(torch.from_numpy(ours), expected, rtol=1e-4, atol=1e-6)


def uneven_join():
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model())
    with model.join():
        for step in range(3 + rank):
            inputs, targets = batch(rank, step)
            nn.functional.mse_loss(model(inputs), targets).backward()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_ddp_join_with_uneven_inputs(world):
    world.run(uneven_join, 2)


def ends_with_work_in_flight(how):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    kept, future = [], None
    # Others may have left as soon as they are through the barrier, with operations in flight that
    # need them: from there on each rank may hear so.
    with contextlib.suppress(torch_resilient.RankLostError):
        dist.barrier()
        kept += [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(3)]
        future = kept[-1].get_future().then(lambda value: value)
        if rank == 0:
            kept.append(dist.irecv(torch.ones(10), 1))  # Never sent.
    if how == "destroy":
        dist.destroy_process_group()
    globals()["kept"] = (kept, future)  # Alive until the interpreter is torn down.


def end_cleanly(world, how, count):
    for number in range(count):
        # torch's recorder dumps its trace when a rank has left that is needed, which takes seconds.
        env = {"TORCH_FR_BUFFER_SIZE": "0"}
        ranks = world.start(ends_with_work_in_flight, 3, how, env=env)
        codes = [rank.wait(20) for rank in ranks]
        errors = "".join(rank.stderr() for rank in ranks)
        assert codes == [0, 0, 0], (number, errors)
        assert "terminate" not in errors and "Traceback" not in errors, errors


@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_a_clean_end_with_work_in_flight(world, how):
    end_cleanly(world, how, 10)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_a_hundred_clean_ends(world, how):
    end_cleanly(world, how, 100)


def raises_with_work_in_flight():
    dist.init_process_group("resilient")
    dist.barrier()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    raise ValueError("a bug of the program")


def test_an_exception_ends_the_process_with_its_own_text(world):
    ranks = world.start(raises_with_work_in_flight, 2)
    errors = [rank.error(20) for rank in ranks]
    # One that is still on its way out of the operation may hear of the other's end first.
    assert any(isinstance(error, ValueError) for error in errors), errors
    for rank, error in zip(ranks, errors, strict=True):
        assert isinstance(error, ValueError | torch_resilient.RankLostError), error
        assert rank.wait(30) == 1
        assert "a bug of the program" in rank.stderr()


def loader_user(method, victim):
    dist.init_process_group("resilient")
    data = TensorDataset(torch.arange(10_000.0))
    loader = DataLoader(
        data,
        batch_size=1,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    dist.barrier()
    tell([worker.pid for worker in batches._workers])
    if dist.get_rank() == victim:
        signal.pause()
    try:
        while True:
            next(batches)
            dist.all_reduce(torch.ones(1000))
    except torch_resilient.RankLostError as error:
        assert error.rank == victim
        return torch_resilient.last_incident()["known"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_killed_rank_is_found_while_its_loaders_live(world, method):
    victim = 1
    ranks = world.start(loader_user, 2, method, victim)
    workers = [rank.told(60) for rank in ranks]
    try:
        _, killed = ranks[victim].signal()
        assert ranks[1 - victim].outcome(20)
        for pid in workers[victim]:
            assert os.path.exists(f"/proc/{pid}")
        assert ranks[1 - victim].value(20) - killed < 0.5
    finally:
        for pid in workers[victim]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def detects(victim):
    dist.init_process_group("resilient")
    tensor = torch.ones(10_000)
    dist.all_reduce(tensor)
    tell("ready")
    if dist.get_rank() == victim:
        signal.pause()
    try:
        while True:
            dist.all_reduce(tensor)
    except torch_resilient.RankLostError:
        return torch_resilient.last_incident()["known"], time.time()


def test_how_soon_a_kill_is_known(world):
    latencies = []
    for number in range(10):
        victim = number % 4
        world.job = f"{world.job}x"
        ranks = world.start(detects, 4, victim)
        for rank in ranks:
            rank.told()
        _, killed = ranks[victim].signal()
        others = [rank.value(20) for index, rank in enumerate(ranks) if index != victim]
        latencies += [known - killed for known, _ in others]
    latencies.sort()
    assert latencies[-1] < 0.5
    assert latencies[len(latencies) // 2] < 0.1


def late_rank():
    dist.init_process_group("resilient")
    if dist.get_rank() == 1:
        tell("busy")
        hear()
    dist.barrier()
    dist.destroy_process_group()


def test_a_late_rank_is_waited_for(world):
    ranks = world.start(late_rank, 2)
    assert ranks[1].told() == "busy"
    assert ranks[0].outcome(1.5) is None
    ranks[1].say("go on")
    for rank in ranks:
        rank.value()
