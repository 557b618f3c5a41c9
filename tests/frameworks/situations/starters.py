"""Programs that start the ranks themselves: multiprocessing, pools, notebooks, actors."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import programs
import torch.multiprocessing
from programs import BACKEND, train_as

SIZE = 2


def spawned():
    torch.multiprocessing.spawn(train_as, (SIZE,), nprocs=SIZE)


def forked():
    torch.multiprocessing.start_processes(train_as, (SIZE,), nprocs=SIZE, start_method="fork")


def forkserver():
    torch.multiprocessing.start_processes(train_as, (SIZE,), nprocs=SIZE, start_method="forkserver")


def ended(children):
    for child in children:
        child.join()
        assert child.exitcode == 0, child.exitcode


def processes(method, **options):
    context = multiprocessing.get_context(method)
    children = [
        context.Process(target=train_as, args=(rank, SIZE), **options) for rank in range(SIZE)
    ]
    for child in children:
        child.start()
    ended(children)


def daemons():
    processes("spawn", daemon=True)


def pool():
    """ProcessPoolExecutor: its workers end when the pool is shut down."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(SIZE, mp_context=context) as executor:
        list(executor.map(train_as, range(SIZE), [SIZE] * SIZE))


def multiprocessing_pool():
    """Its workers are ended by SIGTERM."""
    with multiprocessing.get_context("spawn").Pool(SIZE) as executor:
        executor.starmap(train_as, [(rank, SIZE) for rank in range(SIZE)], chunksize=1)


def loky():
    import joblib

    joblib.Parallel(SIZE)(joblib.delayed(train_as)(rank, SIZE) for rank in range(SIZE))


def parent_is_rank_0():
    """The program forks the other rank, and is one itself."""
    child = multiprocessing.get_context("fork").Process(target=train_as, args=(1, SIZE))
    child.start()
    train_as(0, SIZE)
    ended([child])


def own_subprocess():
    """A rank is a process that a process starts which a process starts."""
    depth = int(os.environ.get("DEPTH", "2"))
    if depth == 0:
        programs.train()
        return
    environment = {**os.environ, "DEPTH": str(depth - 1)}
    subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


def by_exec():
    """A rank starts a program of the same process, as wrapper scripts do."""
    if "AGAIN" in os.environ:
        programs.train()
        return
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "AGAIN": "1"})


def by_exec_after_a_world():
    """The process has had a world before."""
    if "AGAIN" not in os.environ:
        programs.world()
        port = str(int(os.environ["MASTER_PORT"]) + 1)
        environment = {**os.environ, "AGAIN": "1", "MASTER_PORT": port}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    programs.train()


def daemonized():
    """A rank leaves its parent by a double fork."""
    if os.fork() != 0:
        os.wait()
        programs.await_marks("done", 2)
        return
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    programs.train()
    programs.mark("done")


def actor(channel):
    """As an actor of Ray: a process that lives on, called from outside."""
    while (call := channel.recv()) is not None:
        rank, size, port = call
        programs.rank_of(rank, size, port)
        programs.world()
        channel.send("done")


def actors():
    """Two actors: three worlds, the ranks change places, the ports are others."""
    context = multiprocessing.get_context("forkserver")
    pairs = [context.Pipe() for _ in range(SIZE)]
    children = [context.Process(target=actor, args=(theirs,)) for _, theirs in pairs]
    for child in children:
        child.start()
    for round_ in range(3):
        port = programs.free_port()
        for index, (ours, _) in enumerate(pairs):
            ours.send(((index + round_) % SIZE, SIZE, port))
        for ours, _ in pairs:
            assert ours.recv() == "done"
    for ours, _ in pairs:
        ours.send(None)
    ended(children)


def after_a_world_of_one():
    """A notebook: one cell trains alone, the next one forks ranks."""
    programs.rank_of(0, 1)
    programs.world()
    os.environ["MASTER_PORT"] = str(programs.free_port())
    forked()


def elastic_launch():
    """torchrun's own function, called from a program."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=SIZE,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="job",
        monitor_interval=0.1,
    )
    elastic_launch(config, programs.run)("train")


def notebook_launcher():
    from accelerate import notebook_launcher as launcher

    port = str(programs.free_port())
    launcher(programs.run, ("train",), num_processes=SIZE, use_port=port)


def debug_launcher():
    from accelerate import debug_launcher as launcher

    launcher(accelerated, num_processes=SIZE)


def accelerated():
    """accelerate makes the world."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    named = [InitProcessGroupKwargs(backend=BACKEND, timeout=programs.TIMEOUT)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[] if BACKEND == "gloo" else named)
    accelerator.wait_for_everyone()
    programs.steps()
    accelerator.end_training()


def fabric():
    """Lightning Fabric starts the other ranks as processes of its own."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=BACKEND, timeout=programs.TIMEOUT)
    started = Fabric(accelerator="cpu", devices=SIZE, strategy=strategy)
    started.launch()
    programs.steps()
    started.barrier()


def deepspeed():
    """DeepSpeed's init, by plain variables or its launcher."""
    import deepspeed as library

    # It would compile operations of its own first, for a minute.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed(dist_backend=BACKEND, timeout=programs.TIMEOUT)
    programs.steps()
    torch.distributed.destroy_process_group()
