"""Programs that end in other ways than by destroy_process_group() and a return."""

import atexit
import gc
import os
import signal
import sys
import threading
import time

import programs
import torch
import torch.distributed as dist


def without_destroy():
    programs.init()
    programs.steps()


def os_exit():
    programs.init()
    programs.steps()
    os._exit(0)


def os_exit_in_a_thread():
    programs.init()
    programs.steps()
    threading.Thread(target=os._exit, args=(0,)).start()
    threading.Event().wait()


def exit_in_finally():
    try:
        programs.init()
        programs.steps()
    finally:
        sys.exit(0)


def exit_in_a_thread():
    """It ends the thread alone."""
    programs.init()
    thread = threading.Thread(target=sys.exit, args=(1,))
    thread.start()
    thread.join()
    programs.steps()
    dist.destroy_process_group()


def exit_code_3():
    programs.world()
    sys.exit(3)


def at_exit_before():
    """Registered before init: it still communicates and destroys."""
    atexit.register(at_the_end)
    programs.init()
    programs.steps()


def at_exit_after():
    programs.init()
    atexit.register(at_the_end)
    programs.steps()


def at_the_end():
    dist.barrier()
    programs.add_up()
    dist.destroy_process_group()


class Owner:
    """Destroys the world in its finalizer."""

    def __init__(self):
        programs.init()
        self.destroy = dist.destroy_process_group

    def __del__(self):
        self.destroy()


def by_finalizer():
    owner = Owner()
    programs.steps()
    owner.itself = owner  # Collected with the interpreter.
    programs.owner = owner


def groups_without_destroy():
    programs.init()
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        programs.add_up(group)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    del groups, group, model
    gc.collect()
    programs.steps()


def thread_goes_on():
    """A thread works on after the main thread has returned, and destroys."""
    programs.init()
    programs.steps()

    def more():
        threading.main_thread().join()
        for _ in range(20):
            programs.add_up()
        dist.destroy_process_group()

    threading.Thread(target=more).start()


def daemon_thread():
    """A daemon thread goes on with operations while the process ends."""
    programs.init()
    group = dist.new_group()
    programs.steps()

    def more():
        while True:
            programs.add_up(group)

    threading.Thread(target=more, daemon=True).start()


def rank_0_goes_first():
    """It destroys at once, the other goes on for 2 s without it."""
    programs.init()
    programs.steps()
    if dist.get_rank() == 1:
        time.sleep(2)
    dist.destroy_process_group()


def rank_0_is_done():
    """Rank 0 of 3 ends by os._exit(0), the others go on in a group of their own."""
    programs.init()
    group = dist.new_group([1, 2])
    programs.steps()
    if dist.get_rank() == 0:
        os._exit(0)
    time.sleep(2)
    for _ in range(5):
        programs.add_up(group)
    os._exit(0)


def one_raises():
    programs.init()
    programs.add_up()
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    programs.add_up()


def one_exits():
    """Rank 1 takes sys.exit(0) for the end, the other wants one sum more."""
    programs.init()
    programs.add_up()
    if dist.get_rank() == 1:
        sys.exit(0)
    programs.add_up()


def one_is_killed():
    programs.init()
    programs.add_up()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    programs.add_up()


def one_aborts():
    programs.init()
    programs.add_up()
    if dist.get_rank() == 1:
        os.abort()
    programs.add_up()


def endless():
    """Trains until it is told to end."""
    programs.init()
    programs.steps()
    programs.mark("ready")
    while True:
        programs.add_up()


def waiting():
    """Rank 0 waits for an operation of rank 1, which does something else."""
    programs.init()
    programs.steps()
    programs.mark("ready")
    if dist.get_rank() == 1:
        signal.pause()
    programs.add_up()


def waiting_for_init():
    """No other rank comes."""
    programs.mark("ready")
    programs.world()


def ends_when_told():
    """SIGTERM sets a flag; the ranks agree on the end, as preemptible jobs do."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    programs.init()
    programs.steps()
    programs.mark("ready")
    flag = torch.zeros(1)
    while not flag.item():
        flag.fill_(len(told))
        dist.all_reduce(flag)
    dist.destroy_process_group()


def exits_when_told():
    """SIGTERM's handler calls sys.exit(0), wherever the program is."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    endless()


def stays():
    """Goes on until a mark says so, whatever signal comes."""
    signal.signal(signal.SIGUSR1, lambda *_: programs.mark("told"))
    programs.init()
    programs.mark("ready")
    flag = torch.zeros(1)
    while not flag.item():
        flag.fill_(programs.marks("go"))
        dist.all_reduce(flag)
    programs.steps()
    dist.destroy_process_group()
