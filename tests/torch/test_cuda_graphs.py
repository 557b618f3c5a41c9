"""Operations that CUDA graphs hold: captured, replayed, and given up with their generation.

Method: real ranks over the fake CUDA devices and the fake NCCL of tests/support, whose graphs the
ranks capture themselves. As with NCCL, a communicator is freed when its graphs are gone.
"""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from tensors import same
from test_cuda import NEEDS_FAKE, fake_run, faked, fetched, libraries

import torch_resilient

pytestmark = NEEDS_FAKE


class Step:
    """A graph of one rank that sums `tensor` over the ranks."""

    def __init__(self, cuda, rank):
        self.stream = cuda.new_stream(rank)
        self.tensor = cuda.tensor(torch.ones(4), device=rank)
        dist.all_reduce(self.tensor)  # As torch's own warm-up.
        cuda.synchronize()
        self.graph = cuda.Graph(self.stream)
        with self.graph:
            dist.all_reduce(self.tensor)


def replays():
    cuda, rank, size = faked()
    step = Step(cuda, rank)
    same(fetched(cuda, step.tensor), torch.full((4,), float(size)))  # A capture runs nothing.
    for power in (2, 3):
        step.graph.replay()
        same(fetched(cuda, step.tensor), torch.full((4,), float(size) ** power))
    dist.all_reduce(step.tensor)
    same(fetched(cuda, step.tensor), torch.full((4,), float(size) ** 4))
    assert cuda.counts()["misuse"] == []
    dist.destroy_process_group()  # With its graph: nobody waits for that.
    assert cuda.counts()["communicators"] == 1
    step.graph.destroy()
    assert cuda.wait("destroyed", 1)


def test_a_graph_runs_what_was_captured(world):
    fake_run(world, replays)


def all_forms():
    """Async, bounded, coalesced, lists in one block, messages: all in one graph."""
    cuda, rank, size = faked()
    stream = cuda.new_stream(rank)
    ones = [cuda.tensor(torch.ones(4), device=rank) for _ in range(4)]
    gathered = cuda.tensor(torch.zeros(4 * size), device=rank)
    received = cuda.tensor(torch.zeros(4), device=rank)
    sent = cuda.tensor(torch.full((4,), float(rank)), device=rank)
    peer = (rank + 1) % size
    graph = cuda.Graph(stream)
    with graph:
        works = [dist.all_reduce(ones[0], async_op=True)]
        works.append(dist.all_gather_into_tensor(gathered, sent, async_op=True))
        for work in works:
            work.wait()
        with dist._coalescing_manager(device=sent.device):
            for one in ones[1:3]:
                dist.all_reduce(one)
        dist.all_reduce_coalesced([ones[3]])
        messages = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        works += dist.batch_isend_irecv(messages)
        for work in works[-2:]:
            work.wait()
    for work in works:
        work.wait()  # Again, right behind the capture: there is nothing to be waited for.
    for power in (1, 2):
        graph.replay()
        for one in ones:
            same(fetched(cuda, one), torch.full((4,), float(size) ** power))
        same(fetched(cuda, received), torch.full((4,), float(peer)))
        same(fetched(cuda, gathered), torch.arange(size).repeat_interleave(4).float())
    graph.destroy()
    assert cuda.counts()["misuse"] == []
    dist.destroy_process_group()


def test_all_forms_of_operations_can_be_captured(world):
    fake_run(world, all_forms)


def refusals():
    """What ends on the host cannot be in a graph; nothing of it breaks the capture."""
    cuda, rank, _ = faked()
    step = Step(cuda, rank)
    gaps = cuda.tensor(torch.zeros(4, 2), device=rank)[:, 0]
    again = cuda.Graph(step.stream)
    with again:
        with pytest.raises(
            torch_resilient.ResilientError, match="its end is waited for on the host"
        ):
            dist.barrier(device_ids=[rank])
        with pytest.raises(torch_resilient.ResilientError, match="with contiguous tensors"):
            dist.all_reduce(gaps)
        dist.all_reduce(step.tensor)
    again.replay()
    same(fetched(cuda, step.tensor), torch.full((4,), 4.0))
    again.destroy()
    step.graph.destroy()
    dist.destroy_process_group()


def test_what_ends_on_the_host_is_refused(world):
    fake_run(world, refusals)


def interrupted():
    """Ctrl-C in the midst of a launch: the program does not go on beside it."""
    cuda, rank, _ = faked()
    step = Step(cuda, rank)

    def let_go(*_):
        cuda.change("hang_launch=0")
        raise KeyboardInterrupt

    def press():
        cuda.wait("user_objects", 2)  # One of the graph before.
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, let_go)
    graph = cuda.Graph(step.stream)
    with graph:
        cuda.change("hang_launch=1")
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(step.tensor)
        presser.join()
        dist.all_reduce(step.tensor)  # Joins what the interrupted call has left in the stream.
    assert cuda.counts()["misuse"] == []
    for one in (graph, step.graph):
        one.destroy()
    dist.destroy_process_group()


def test_an_interrupt_waits_for_the_launch(world):
    fake_run(world, interrupted, 1)


def loss():
    cuda, rank, size = faked()
    step = Step(cuda, rank)
    step.graph.replay()
    same(fetched(cuda, step.tensor), torch.full((4,), float(size) ** 2))
    tell("has replayed")
    if rank == 1:
        signal.pause()
    step.graph.replay()  # Rank 1 does not.
    tell("replays")
    cuda.synchronize()  # The fence ends it.
    with pytest.raises(torch_resilient.RankLostError, match="rank 1"):
        dist.all_reduce(step.tensor)
    torch_resilient.rebuild(mode="shrink")
    # While the graph of the last generation still holds its communicator.
    again = Step(cuda, rank)
    again.graph.replay()
    same(fetched(cuda, again.tensor), torch.full((4,), 1.0))
    assert (cuda.counts()["communicators"], cuda.counts()["aborts_ended"]) == (2, 0)
    step.graph.destroy()
    assert cuda.wait("aborts_ended", 1)
    again.graph.destroy()
    dist.destroy_process_group()


def test_a_loss_ends_the_replay_and_the_next_generation_captures_again(world):
    survivor, victim = world.start(loss, 2, env=libraries())
    for rank in (survivor, victim):
        assert rank.told() == "has replayed"
    assert survivor.told() == "replays"
    victim.signal()
    assert victim.wait() == -signal.SIGKILL
    survivor.value()
