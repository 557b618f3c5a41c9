"""Programs that use torch.distributed in other ways than the plain one."""

import asyncio
import errno
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import programs
import torch
import torch.distributed as dist
from programs import BACKEND
from torch.distributed.device_mesh import init_device_mesh


def url(host):
    return f"tcp://{host}:{int(os.environ['MASTER_PORT'])}"


def numbers():
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def impatient():
    """For what cannot come about."""
    programs.world(timeout=timedelta(seconds=5))


def tcp_six():
    programs.world(init_method=url("[::1]"), **numbers())


def by_scheduler():
    """Rank and size are those of a scheduler's variables that the situation names."""
    rank, size = (int(os.environ[os.environ[name]]) for name in ("RANK_FROM", "SIZE_FROM"))
    programs.world(init_method=url("127.0.0.1"), rank=rank, world_size=size)


def twice():
    programs.world()
    programs.world()


def blocked_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    programs.world()


def without_pidfd():
    """The kernel refuses pidfds: what an old container runtime does."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "torch"))
    from refused_calls import refuse_pidfds

    refuse_pidfds(errno.EPERM)
    programs.world()


# ---- How the world is made.


def tcp_numbers():
    programs.world(init_method=url("127.0.0.1"), **numbers())


def tcp_query():
    given = numbers()
    query = f"?rank={given['rank']}&world_size={given['world_size']}"
    programs.world(init_method=url("127.0.0.1") + query)


def by_file():
    programs.world(init_method=f"file://{programs.FOLDER}/meeting", **numbers())


def tcp_store():
    given = numbers()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, given["world_size"], given["rank"] == 0)
    programs.world(store=store, **given)


def prefix_store():
    given = numbers()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, given["world_size"], given["rank"] == 0)
    programs.world(store=dist.PrefixStore("mine", store), **given)


def file_store():
    given = numbers()
    store = dist.FileStore(f"{programs.FOLDER}/meeting", given["world_size"])
    programs.world(store=store, **given)


def hash_store():
    programs.world(store=dist.HashStore(), rank=0, world_size=1)


def positional():
    """As old tutorials write it."""
    dist.init_process_group(BACKEND, "env://", programs.TIMEOUT, 2, int(os.environ["RANK"]))
    programs.steps()
    dist.destroy_process_group()


def upper_case():
    programs.world(BACKEND.upper())


def by_device():
    programs.world(f"cpu:{BACKEND}")


def default_timeout():
    dist.init_process_group(BACKEND)
    programs.steps()
    dist.destroy_process_group()


def longest_timeout():
    programs.world(timeout=timedelta.max)


def timeout_of_an_int():
    programs.world(timeout=60)


def late_rank():
    """The last rank comes after the timeout of the first operation."""
    programs.init(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(5)
    programs.steps()
    dist.destroy_process_group()


def late_init():
    """The last rank comes after the timeout of init."""
    if os.environ["RANK"] == "1":
        programs.await_marks("waits", 1)
        time.sleep(5)
    programs.mark("waits")
    programs.world(timeout=timedelta(seconds=3))


def after_a_failed_init():
    try:
        programs.init(
            init_method="tcp://127.0.0.1:1", rank=1, world_size=2, timeout=timedelta(0, 2)
        )
    except Exception:
        programs.mark("refused")
    programs.world()


def two_ports():
    programs.world()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    programs.world()


def ten_worlds():
    for _ in range(10):
        programs.init()
        programs.add_up()
        dist.destroy_process_group()
    programs.world()


def rpc_beside():
    """torch's rpc over the same variables as the world."""
    from torch.distributed import rpc

    programs.init()
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(1), 1)).item() == 2
    rpc.shutdown()
    programs.steps()
    dist.destroy_process_group()


# ---- Threads, forks and what else a process does.


def in_a_thread():
    thread = threading.Thread(target=programs.world)
    thread.start()
    thread.join()


def in_asyncio():
    asyncio.run(asyncio.to_thread(programs.world))


def threads_with_groups():
    """Two threads, each with a group of its own."""
    programs.init()
    groups = [dist.new_group() for _ in range(2)]

    def add(group):
        for _ in range(20):
            programs.add_up(group)

    threads = [threading.Thread(target=add, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    programs.steps()
    dist.destroy_process_group()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index**2])


def loader_workers():
    """DataLoader's workers, forked and spawned, while the world runs."""
    programs.init()
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Squares(), num_workers=1, multiprocessing_context=method
        )
        assert sum(batch.item() for batch in loader) == 140
        programs.add_up()
    programs.steps()
    dist.destroy_process_group()


def signals_while_training():
    """A timer interrupts every 5 ms."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    programs.world()
    signal.setitimer(signal.ITIMER_REAL, 0)


def traced():
    """A tracing function and a profile of torch's."""
    sys.settrace(lambda *_: None)
    with torch.profiler.profile():
        programs.world()


def strange_defaults():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_flush_denormal(True)
    programs.world()


def warnings_are_errors():
    import warnings

    warnings.simplefilter("error")
    programs.world()


def main_thread_returns():
    def train():
        threading.main_thread().join()
        programs.world()

    threading.Thread(target=train).start()


# ---- Groups and operations.


def groups():
    programs.init()
    programs.add_up(dist.new_subgroups(2)[0])
    programs.add_up(dist.new_subgroups_by_enumeration([[1, 0]])[0])
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    programs.add_up(own)
    mine = [dist.get_rank()]
    programs.add_up(dist.new_group(mine, use_local_synchronization=True))
    programs.steps()
    dist.destroy_process_group()


def gloo_beside():
    programs.init()
    programs.add_up(dist.new_group(backend="gloo"))
    programs.steps()
    dist.destroy_process_group()


def thirty_groups():
    programs.init()
    for group in [dist.new_group() for _ in range(30)]:
        programs.add_up(group)
        dist.destroy_process_group(group)
    programs.steps()
    dist.destroy_process_group()


def meshes():
    programs.init()
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
        programs.add_up(mesh["a"].get_group())
        programs.add_up(mesh["b"].get_group())
    programs.steps()
    dist.destroy_process_group()


def distributed_data_parallel():
    """With an optimizer of torch's and a hook that compresses."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    programs.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    programs.steps()
    dist.destroy_process_group()


def sharded():
    from torch.distributed.fsdp import fully_shard

    programs.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    programs.steps()
    dist.destroy_process_group()


def zero_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    programs.init()
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    programs.steps()
    dist.destroy_process_group()


def objects():
    programs.init()
    rank = dist.get_rank()
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    told = [rank, "text"]
    dist.broadcast_object_list(told, src=1)
    assert told[0] == 1
    given = [None]
    dist.scatter_object_list(given, ["a", "b"] if rank == 0 else None, src=0)
    assert given == ["ab"[rank]]
    programs.steps()
    dist.destroy_process_group()


def point_to_point():
    programs.init()
    other = 1 - dist.get_rank()
    there, here = torch.full((5,), float(other)), torch.empty(5)
    calls = [dist.P2POp(dist.isend, there, other), dist.P2POp(dist.irecv, here, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    assert here.eq(1 - other).all()
    programs.steps()
    dist.destroy_process_group()


def asynchronous():
    """Operations that are waited for in other ways, and in another order."""
    programs.init()
    tensors = [torch.ones(3) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda done: done.value()[0]) for work in works[::2]]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)
    assert all(future.wait()[0] == 2 for future in futures)
    programs.steps()
    dist.destroy_process_group()


def types():
    """Tensors without elements, of no dimension, of other strides and types."""
    programs.init()
    for kind in (torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.double):
        tensor = torch.ones(3, 2, dtype=kind).t()
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
    dist.all_reduce(torch.empty(0))
    dist.broadcast(torch.tensor(1.0), 0)
    dist.broadcast(torch.ones(2, dtype=torch.complex64), 0)
    dist.monitored_barrier()
    programs.steps()
    dist.destroy_process_group()


def checkpoints():
    import torch.distributed.checkpoint as checkpoint

    programs.init()
    path = programs.FOLDER / "checkpoint"
    state = {"weight": torch.arange(4.0)}
    checkpoint.save(state, checkpoint_id=path)
    state["weight"].zero_()
    checkpoint.load(state, checkpoint_id=path)
    assert state["weight"].sum() == 6
    programs.steps()
    dist.destroy_process_group()


def uneven_inputs():
    programs.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with model.join():
        for _ in range(2 + dist.get_rank()):
            model(torch.randn(3, 4)).square().mean().backward()
    programs.steps()
    dist.destroy_process_group()
