"""CUDA graphs with operations of ranks on a GPU: replays, and a loss in the midst of one."""

import signal
import time

import gpu_device
import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, joined
from rank_server import tell

import torch_resilient
from torch_resilient import _worlds


def captured():
    """(tensor, a graph that sums it over the ranks); the tensor has been summed once."""
    tensor = torch.ones(1 << 16, device=DEVICE)
    dist.all_reduce(tensor)  # NCCL connects.
    torch.cuda.synchronize()
    return tensor, gpu_device.Graph(lambda: dist.all_reduce(tensor))


def values(tensor):
    torch.cuda.synchronize()
    return tensor.cpu().unique().tolist()


def captured_by_survivor():
    """As captured, on rank 0; the other rank stays here until it is killed."""
    rank, _ = joined()
    found = captured()
    tell("ready")
    if rank == 1:
        signal.pause()
    return found


def value_of_survivor(world, program, word):
    """What rank 0 returns; rank 1 is killed when that has told `word`."""
    survivor, victim = world.start(program, 2)
    for rank in (survivor, victim):
        assert rank.told(60) == "ready"
    assert survivor.told(60) == word
    victim.signal()
    return survivor.value(60)


def rebuilt_alone():
    """Returns how long it took until this rank had a graph again, which then runs."""
    began = time.monotonic()
    torch_resilient.rebuild(mode="shrink")
    tensor, graph = captured()
    rebuilt = time.monotonic() - began
    graph.replay()
    assert values(tensor) == [1.0]
    return rebuilt


def replays():
    _, size = joined()
    tensor, graph = captured()
    assert values(tensor) == [float(size)]
    for power in (2, 3):
        graph.replay()
        assert values(tensor) == [float(size) ** power]
    dist.all_reduce(tensor)
    assert values(tensor) == [float(size) ** 4]
    dist.destroy_process_group()  # While the graph is there.


def test_replays_sum(world):
    world.run(replays, 2)


def outlives():
    """Returns how long the replay took to end, and the rebuild while its graph is there."""
    tensor, graph = captured_by_survivor()
    graph.replay()
    tell("replays")
    began = time.monotonic()
    torch.cuda.synchronize()
    ended = time.monotonic() - began
    with pytest.raises(torch_resilient.RankLostError):
        dist.all_reduce(tensor)
    rebuilt = rebuilt_alone()
    del graph
    dist.destroy_process_group()
    return ended, rebuilt


def test_a_loss_ends_a_replay_and_no_graph_is_waited_for(world, figures):
    ended, rebuilt = value_of_survivor(world, outlives, "replays")
    figures("kill in a replay: it has ended after s", round(ended, 3))
    figures("kill in a replay: rebuilt and captured again in s", round(rebuilt, 3))


def captures_on():
    """Returns how long the rebuild behind the capture took."""
    tensor, graph = captured_by_survivor()

    def held_open():
        dist.all_reduce(tensor)
        tell("captured")
        assert _worlds.registry.current().session.await_failure(60) is not None
        with pytest.raises(torch_resilient.RankLostError):
            dist.all_reduce(tensor)

    cut = gpu_device.Graph(held_open)
    rebuilt = rebuilt_alone()
    del graph, cut
    dist.destroy_process_group()
    return rebuilt


def test_a_loss_while_a_capture_is_open(world, figures):
    rebuilt = value_of_survivor(world, captures_on, "captured")
    figures("kill in a capture: rebuilt and captured again in s", round(rebuilt, 3))
