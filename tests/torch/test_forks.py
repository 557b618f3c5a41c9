"""A process that has had a world forks, and the child has a world of its own.

Whatever this process was doing, the child's world works and ends, and what the child opens is its
own: nothing of the parent's is read, written or waited for by the numbers and locks that are left.
"""

import contextlib
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import torch_resilient
from torch_resilient import ulfm

CHILD_SECONDS = 60  # Of a child that hangs: it ends by SIGALRM, whatever it waits for.
FILES = 30
CONTENT = b"written by the child"
QUESTION = b"question"


def forked(child):
    """The exit code of a child that runs the function; negative: the signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        try:
            child()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_world(job, rank, size):
    if dist.is_initialized():
        dist.destroy_process_group()  # The parent's.
    os.environ.update(RESILIENT_JOB=job, RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("resilient")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


def have_world(job, rank, size):
    open_world(job, rank, size)
    dist.barrier()
    dist.destroy_process_group()


class Calls:
    """The public calls, in an order in which a program could make them."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.group = self.store = self.handle = self.state = None
        self.x = torch.ones(4)
        self.parts = [torch.zeros(4) for _ in range(size)]
        self.wide = torch.zeros(4 * size)

    def all(self):
        return [
            *(self.init_process_group, self.barrier, self.monitored_barrier, self.all_reduce),
            *(self.all_reduce_async, self.all_reduce_callback, self.all_reduce_large),
            *(self.broadcast, self.reduce, self.gather, self.all_gather),
            *(self.all_gather_into_tensor, self.scatter, self.reduce_scatter),
            *(self.reduce_scatter_tensor, self.all_to_all, self.all_to_all_single),
            *(self.send_and_recv, self.batch_isend_irecv, self.objects, self.new_group),
            *(self.collective_of_group, self.destroy_group, self.store_of_world),
            *(self.standalone_store, self.status, self.whereabouts, self.on_event),
            *(self.expect_slow, self.agree, self.ulfm_agree, self.join, self.elastic),
            *(self.state_commit, self.failure, self.rebuild, self.destroy_process_group),
            *(self.init_process_group, self.abort),
        ]

    def init_process_group(self):
        dist.init_process_group("resilient")

    def barrier(self):
        dist.barrier()

    def monitored_barrier(self):
        dist.monitored_barrier(timeout=timedelta(seconds=30))

    def all_reduce(self):
        dist.all_reduce(self.x)

    def all_reduce_async(self):
        dist.all_reduce(self.x, async_op=True).wait()

    def all_reduce_callback(self):
        dist.all_reduce(self.x, async_op=True).get_future().then(lambda _: None).wait()

    def all_reduce_large(self):
        dist.all_reduce(torch.ones(1 << 18))

    def broadcast(self):
        dist.broadcast(self.x, 0)

    def reduce(self):
        dist.reduce(self.x, 0)

    def gather(self):
        dist.gather(self.x, self.parts if self.rank == 0 else None, 0)

    def all_gather(self):
        dist.all_gather(self.parts, self.x)

    def all_gather_into_tensor(self):
        dist.all_gather_into_tensor(self.wide, self.x)

    def scatter(self):
        dist.scatter(self.x, self.parts if self.rank == 0 else None, 0)

    def reduce_scatter(self):
        dist.reduce_scatter(self.x, self.parts)

    def reduce_scatter_tensor(self):
        dist.reduce_scatter_tensor(self.x, self.wide)

    def all_to_all(self):
        dist.all_to_all(self.parts, [self.x] * self.size)

    def all_to_all_single(self):
        dist.all_to_all_single(torch.empty_like(self.wide), self.wide)

    def send_and_recv(self):
        dist.send(self.x, 1) if self.rank == 0 else dist.recv(self.x, 0)

    def batch_isend_irecv(self):
        other = 1 - self.rank
        sent, received = self.x.clone(), torch.empty(4)
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def objects(self):
        dist.broadcast_object_list([self.rank], 0)
        dist.all_gather_object([None] * self.size, self.rank)

    def new_group(self):
        self.group = dist.new_group([0, 1])

    def collective_of_group(self):
        dist.all_reduce(self.x, group=self.group)

    def destroy_group(self):
        dist.destroy_process_group(self.group)

    def store_of_world(self):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key {self.rank}", "value")
        store.wait([f"key {1 - self.rank}"])
        store.add("count", 1)
        assert store.get("key 0") == b"value"

    def standalone_store(self):
        job = os.environ["RESILIENT_JOB"]
        self.store = torch_resilient.Store(os.environ["RESILIENT_STORE"], job=job)
        self.store.set("key", "value")
        assert self.store.get("key") == b"value"

    def status(self):
        text = str(torch_resilient.status())
        assert text and torch_resilient.membership() and torch_resilient.op_log()
        assert torch_resilient.last_incident() is None

    def whereabouts(self):
        from torch_resilient import _native

        _native.load().whereabouts()

    def on_event(self):
        self.handle = torch_resilient.on_event(lambda event: None)

    def expect_slow(self):
        with torch_resilient.expect_slow("a checkpoint", seconds=30):
            dist.barrier()

    def agree(self):
        torch_resilient.agree(self.rank)

    def ulfm_agree(self):
        ulfm.agree(True)

    def join(self):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with torch_resilient.join(model):
            for _ in range(1 + self.rank):
                model(torch.ones(1, 2)).sum().backward()

    def elastic(self):
        self.state = torch_resilient.State(step=0)
        torch_resilient.elastic(take_a_step)(self.state)

    def state_commit(self):
        self.state.commit()

    def failure(self):
        if self.rank == 0:
            ulfm.revoke("by the test")
        with pytest.raises(torch_resilient.ResilientError):
            dist.barrier()
        assert torch_resilient.failure() is not None

    def rebuild(self):
        torch_resilient.rebuild()

    def destroy_process_group(self):
        dist.destroy_process_group()

    def abort(self):
        dist.distributed_c10d._abort_process_group()


def take_a_step(state):
    state.step += 1
    state.commit()


def forks_after_each_call(rank, size, rounds):
    """Which children did not do as they should, as (call, exit code); and the number of calls."""
    bad, job = [], os.environ["RESILIENT_JOB"]
    for _ in range(rounds):
        calls = Calls(rank, size)
        for number, call in enumerate(calls.all()):
            call()
            code = forked(lambda at=number: have_world(f"{job}-{at}", rank, size))
            if code != 0:
                bad.append((call.__name__, code))
    return bad, number + 1


def test_a_child_forked_after_any_call_has_a_world(world):
    run_forks(world, 1)


@pytest.mark.soak
def test_a_child_forked_after_any_call_has_a_world_many_times(world):
    run_forks(world, 20)


def run_forks(world, rounds):
    ranks = [world.start_rank(forks_after_each_call, rank, 2, rank, 2, rounds) for rank in (0, 1)]
    assert [rank.value(120 * rounds)[0] for rank in ranks] == [[], []]


def child_with_files(folder, end):
    """Opens files and a pipe, writes, has a world; ends as `end` says."""
    paths = [f"{folder}/{number}" for number in range(FILES)]
    files = [open(path, "wb", buffering=0) for path in paths]  # noqa: SIM115
    reader, writer = os.pipe()
    os.write(writer, QUESTION)
    for file in files:
        file.write(CONTENT)
    open_world(f"{os.environ['RESILIENT_JOB']}-child", 0, 1)
    if end == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            signal.pause()
    dist.destroy_process_group()
    os.set_blocking(reader, False)
    assert os.read(reader, 1024) == QUESTION


def forks_a_writer(folder, before, end):
    dist.init_process_group("resilient")
    dist.barrier()
    if before == "destroyed":
        dist.destroy_process_group()
    code = forked(lambda: child_with_files(folder, end))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(f"{folder}/{at}", "rb")) for at in range(FILES)]
        contents = {file.read() for file in files}
    if before == "open":
        dist.barrier()
        dist.destroy_process_group()
    return code, contents


@pytest.mark.parametrize("end", ["destroy", "sigterm"])
@pytest.mark.parametrize("before", ["destroyed", "open"])
def test_what_a_child_opens_is_its_own(world, tmp_path, before, end):
    [(code, contents)] = world.run(forks_a_writer, 1, str(tmp_path), before, end)
    assert contents == {CONTENT}
    assert code == (0 if end == "destroy" else -signal.SIGTERM)


def notebook(before):
    """One cell trains alone, the next one calls notebook_launcher."""
    dist.init_process_group("resilient")
    dist.barrier()
    if before == "destroyed":
        dist.destroy_process_group()
    job = os.environ["RESILIENT_JOB"] + "-launched"
    torch.multiprocessing.start_processes(launched, (job, 2), nprocs=2, start_method="fork")
    if before == "open":
        dist.barrier()
        dist.destroy_process_group()


def launched(rank, job, size):
    signal.alarm(CHILD_SECONDS)
    have_world(job, rank, size)


@pytest.mark.parametrize("before", ["destroyed", "open"])
def test_ranks_are_forked_from_a_process_that_has_had_a_world(world, before):
    world.run(notebook, 1, before, seconds=CHILD_SECONDS + 30)


def forks_a_rank_with_a_helper():
    dist.init_process_group("resilient")
    code = forked(child_with_a_helper)
    dist.barrier()
    dist.destroy_process_group()
    return code


def child_with_a_helper():
    open_world(f"{os.environ['RESILIENT_JOB']}-child", 0, 1)
    assert forked(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
    dist.barrier()
    dist.destroy_process_group()


def test_a_helper_of_a_child_with_a_world_ends_at_once(world):
    assert world.run(forks_a_rank_with_a_helper, 1) == [0]
