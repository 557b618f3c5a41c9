"""Tensors on CUDA devices, without a GPU: the fake CUDA devices and the fake NCCL of tests/support.

Where the module fake_cuda is not built, only what needs no device is tested.
"""

import atexit
import os
import signal
import sys
import time
import types
from datetime import timedelta

import fake_device
import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from tensors import joined, same, values

import torch_resilient

NEEDS_FAKE = pytest.mark.skipif(
    fake_device.refusal() is not None, reason=fake_device.refusal() or ""
)
LATER = timedelta(seconds=30)


def barrier_that_names_a_device():
    """No CUDA here: such a barrier is the host's, as with gloo."""
    _, size = joined()
    dist.barrier(device_ids=[0])
    options = dist.BarrierOptions()
    options.device_ids = [0]
    dist.group.WORLD._get_backend(torch.device("cpu")).barrier(options).wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    if "fake_cuda" not in sys.modules:
        assert not torch.cuda.is_initialized()
    dist.destroy_process_group()


def test_a_barrier_that_names_a_device_works_without_any(world):
    world.run(barrier_that_names_a_device, 2)


def faked():
    """(fake_cuda, rank, world size) of a rank whose device is the fake cuda:rank."""
    fake_cuda = fake_device.load()
    rank, size = joined()
    fake_cuda.set_device(rank)
    return fake_cuda, rank, size


def fetched(cuda, tensor):
    """The values behind all that is under way."""
    cuda.synchronize()
    return cuda.host(tensor)


def libraries():
    path = str(fake_device.LIBRARY)
    return {"RESILIENT_NCCL_LIBRARY": path, "RESILIENT_CUDA_RUNTIME": path}


def fake_run(world, function, size=2, *args):
    return world.run(function, size, *args, env=libraries())


def stream_goes_on():
    """wait() does not wait for the device, and what follows in the stream does."""
    cuda, rank, size = faked()
    tensor = cuda.tensor(values(rank, 1000), device=rank)
    copy = cuda.tensor(torch.zeros(1000), device=rank)
    with cuda.hold() as held:  # Nobody's all_reduce can begin.
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed()
        cuda.copy(copy, tensor)  # Behind it, in the same stream.
        held.release()
    same(fetched(cuda, copy), sum(values(other, 1000) for other in range(size)))
    work.get_future().wait()
    assert work.is_completed()
    with cuda.stream():  # Another stream: the operation begins behind what is in that one.
        dist.all_reduce(tensor)
    dist.barrier()  # On the device by now; waits for it.
    dist.destroy_process_group()


@NEEDS_FAKE
def test_the_stream_goes_on_behind_an_operation(world):
    fake_run(world, stream_goes_on)


def refusals():
    cuda, rank, _ = faked()
    group = dist.group.WORLD
    here = cuda.tensor(torch.ones(4), device=rank)
    other = cuda.tensor(torch.ones(8), device=rank + 1)
    with pytest.raises(RuntimeError, match=f"not on cuda:{rank} and cpu"):
        group._allgather_base(torch.ones(8), here)
    with pytest.raises(RuntimeError, match=f"not on cuda:{rank} and cuda:{rank + 1}"):
        group._allgather_base(other, here)
    with pytest.raises(RuntimeError, match="UNIMPLEMENTED"):
        dist.recv(here)
    dist.all_reduce(here)
    dist.destroy_process_group()


@NEEDS_FAKE
def test_tensors_of_two_devices_are_refused(world):
    fake_run(world, refusals)


def not_contiguous():
    """The result is there when wait() returns."""
    cuda, rank, size = faked()
    tensor = cuda.tensor(torch.zeros(10, 2), device=rank)[:, 0]
    tensor.copy_(cuda.tensor(values(rank, 10), device=rank))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    same(fetched(cuda, tensor.contiguous()), sum(values(other, 10) for other in range(size)))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_results_are_put_in_place(world):
    fake_run(world, not_contiguous)


def batches():
    cuda, rank, _ = faked()
    peer = 1 - rank
    for count in (5, 70_000):
        received = cuda.tensor(torch.zeros(count), device=rank)
        sent = cuda.tensor(values(rank, count), device=rank)
        # Send first on both: one after the other they would wait for each other.
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(fetched(cuda, received), values(peer, count), count)
    manager = dist.distributed_c10d._coalescing_manager
    with manager(device=sent.device, async_ops=True) as batch:
        first = dist.isend(sent, peer)
        with pytest.raises(RuntimeError, match="in a batch that has not ended"):
            first.wait()
        second = dist.irecv(received, peer)
    batch.wait()
    first.wait(LATER)
    second.wait(LATER)
    assert first.is_success() and second.is_success()
    same(fetched(cuda, received), values(peer, count))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_messages_of_a_batch_are_submitted_together(world):
    fake_run(world, batches)


def barriers():
    cuda, rank, size = faked()
    dist.barrier()  # The host's: no device is in use.
    tensor = cuda.tensor(torch.ones(3), device=rank)
    dist.all_reduce(tensor)
    dist.barrier()
    same(fetched(cuda, tensor), torch.full((3,), float(size)))
    dist.barrier(device_ids=[rank])
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_barrier_waits_for_the_device(world):
    fake_run(world, barriers)


def futures():
    cuda, rank, size = faked()
    tensor = cuda.tensor(values(rank, 100), device=rank)
    with cuda.hold():
        work = dist.all_reduce(tensor, async_op=True)
        seen = work.get_future().then(lambda future: (future.value()[0], cuda.device()))
        assert not seen.done()
    result, device = seen.wait()
    assert device == rank
    same(fetched(cuda, result), sum(values(other, 100) for other in range(size)))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_future_ends_with_the_operation_on_the_device(world):
    fake_run(world, futures)


def two_steps():
    """A callback reduces again on the device, beside what the program starts there."""
    cuda, rank, size = faked()
    totals = []

    def again(tag):
        def start(future):
            total = cuda.tensor(fetched(cuda, future.value()[0]), device=rank)
            dist.all_reduce(total, async_op=True).get_future().wait()
            return fetched(cuda, total)[0].item() / tag

        return start

    for tag in range(1, 21):
        tensor = cuda.tensor(torch.full((4,), float(tag)), device=rank)
        work = dist.all_reduce(tensor, async_op=True)
        if tag % size == rank:
            work.wait(LATER)
        totals.append(work.get_future().then(again(tag)))
        dist.all_reduce(cuda.tensor(torch.full((4,), 100.0 * tag), device=rank), async_op=True)
    assert {total.wait() for total in totals} == {float(size * size)}
    dist.destroy_process_group()


@NEEDS_FAKE
def test_what_callbacks_start_on_a_device_is_matched_among_themselves(world):
    fake_run(world, two_steps)


def profiled():
    """The launch is shown, and wait() is none for the device because of it."""
    cuda, rank, _ = faked()
    tensor = cuda.tensor(torch.ones(4), device=rank)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, cuda.hold():
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed()
    work.wait(LATER)
    assert "resilient:all_reduce" in {event.name for event in profile.events()}
    dist.destroy_process_group()


@NEEDS_FAKE
def test_the_profiler_does_not_wait_for_the_device(world):
    fake_run(world, profiled)


def block_that_raises():
    """Nothing of it is submitted, and the next block works."""
    cuda, rank, _ = faked()
    peer = 1 - rank
    sent = cuda.tensor(values(rank, 10), device=rank)
    received = cuda.tensor(torch.zeros(10), device=rank)
    manager = dist.distributed_c10d._coalescing_manager
    with pytest.raises(KeyError), manager(device=sent.device):
        lost = dist.isend(sent, peer)
        raise KeyError
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    with manager(device=sent.device):
        dist.isend(sent, peer)
        dist.irecv(received, peer)
    same(fetched(cuda, received), values(peer, 10))
    with pytest.raises(torch_resilient.ResilientError, match="was never ended"):
        lost.wait()
    dist.barrier()
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_block_that_raises_submits_nothing(world):
    fake_run(world, block_that_raises)


def commit_over_a_loss():
    """What wait() has gone on from is waited for: no step is kept which the loss has touched."""
    cuda, rank, _ = faked()
    tensor = cuda.tensor(torch.ones(4), device=rank)
    dist.all_reduce(tensor)
    dist.barrier()
    torch.cuda.get_rng_state = lambda: torch.zeros(1)  # The fake has no generators.
    state = torch_resilient.State(tensor=tensor)
    state.commit()
    if rank == 1:
        tell("ready")
        signal.pause()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()  # Nobody knows yet that it cannot end.
    tell("ready")
    with pytest.raises(torch_resilient.RankLostError):
        state.commit()
    assert state.commits == 1
    with pytest.raises(torch_resilient.RankLostError):
        work.wait()
    dist.destroy_process_group()


@NEEDS_FAKE
def test_no_commit_is_made_of_what_a_loss_has_touched(world):
    survivor, victim = world.start(commit_over_a_loss, 2, env=libraries())
    for rank in (survivor, victim):
        assert rank.told() == "ready"
    victim.signal()
    assert victim.wait() == -signal.SIGKILL
    survivor.value()


def replaced(before):
    cuda, rank, size = faked()
    tensor = cuda.tensor(torch.ones(4), device=rank)
    if before:
        dist.all_reduce(tensor)
        dist.barrier()  # The device's.
        tell("ready")
        if rank == 1:
            signal.pause()
        with pytest.raises(torch_resilient.RankLostError):
            dist.barrier()
        torch_resilient.rebuild()
        tensor = cuda.tensor(torch.ones(4), device=rank)
    dist.barrier()  # The host's on both: who has come now has seen no operation on a device.
    dist.all_reduce(tensor)
    dist.barrier()
    same(fetched(cuda, tensor), torch.full((4,), float(size)))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_barriers_meet_behind_a_replacement(world):
    env = {**libraries(), "RESILIENT_SEAT_WAIT": "60"}
    survivor, victim = world.start(replaced, 2, True, env=env)
    for rank in (survivor, victim):
        assert rank.told() == "ready"
    victim.signal()
    assert victim.wait() == -signal.SIGKILL
    successor = world.start_rank(replaced, 1, 2, False, env=env)
    survivor.value()
    successor.value()


def healed():
    """A rank is killed in the midst of an operation on devices; the group is rebuilt in place."""
    cuda, rank, size = faked()
    group = dist.group.WORLD
    tensor = cuda.tensor(torch.ones(4), device=rank)
    dist.all_reduce(tensor)
    dist.barrier()
    tell("ready")
    if rank == 1:
        signal.pause()
    with pytest.raises(torch_resilient.RankLostError) as caught:
        for _ in range(1000):
            dist.all_reduce(tensor)
            dist.barrier()
    assert caught.value.rank == 1
    torch_resilient.rebuild()
    assert dist.group.WORLD is group
    again(cuda, rank, size)


def again(cuda, rank, size):
    for _ in range(3):
        tensor = cuda.tensor(values(rank, 1000), device=rank)
        dist.all_reduce(tensor)
        same(fetched(cuda, tensor), sum(values(other, 1000) for other in range(size)))
    dist.barrier()
    counts = cuda.counts()
    assert counts["misuse"] == [], counts
    dist.destroy_process_group()


def joins_again():
    cuda, rank, size = faked()
    again(cuda, rank, size)


@NEEDS_FAKE
def test_a_killed_rank_is_raised_and_the_group_rebuilt(world):
    env = {**libraries(), "RESILIENT_SEAT_WAIT": "60"}
    ranks = world.start(healed, 3, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert ranks[1].wait() == -signal.SIGKILL
    successor = world.start_rank(joins_again, 1, 3, env=env)
    for rank in (ranks[0], ranks[2], successor):
        rank.value()


def mismatched():
    cuda, rank, size = faked()
    tensor = cuda.tensor(torch.ones(4 + rank), device=rank)
    with pytest.raises(torch_resilient.MismatchError) as caught:
        dist.all_reduce(tensor, async_op=True).wait(LATER)
    assert "all_reduce(float32[4], sum)" in str(caught.value)
    assert "all_reduce(float32[5], sum)" in str(caught.value)
    assert "mismatched" in str(caught.value)  # The function that called.
    torch_resilient.rebuild()
    tensor = cuda.tensor(torch.ones(4), device=rank)
    dist.all_reduce(tensor)
    same(fetched(cuda, tensor), torch.full((4,), float(size)))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_different_sizes_are_a_mismatch_on_every_rank(world):
    fake_run(world, mismatched)


def leaves_behind_wait():
    """What wait() has let the program go on from is not taken back by the goodbye."""
    cuda, rank, size = faked()
    tensors = [cuda.tensor(values(rank, 50_000), device=rank) for _ in range(10)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    for tensor in tensors:
        same(fetched(cuda, tensor), sum(values(other, 50_000) for other in range(size)))


@NEEDS_FAKE
def test_a_goodbye_waits_for_what_was_launched(world):
    fake_run(world, leaves_behind_wait, 3)


def until_it_says_for_whom_it_waits(rank):
    deadline = time.monotonic() + 30
    while "all_reduce" not in rank.stderr():
        assert rank.alive() and time.monotonic() < deadline, rank.stderr()


def leaves_ahead_of_the_others(turns):
    cuda, rank, size = faked()
    tensors = [cuda.tensor(values(rank, 100), device=rank) for _ in range(turns)]
    dist.all_reduce(cuda.tensor(torch.ones(1), device=rank))  # They are connected.
    if rank > 0:
        tell("late")
        hear()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank == 0:
        tell("leaves")
    dist.destroy_process_group()
    assert len(works) == turns
    for tensor in tensors:
        same(fetched(cuda, tensor), sum(values(other, 100) for other in range(size)))


@NEEDS_FAKE
@pytest.mark.parametrize("turns", [1, 300])  # More than are launched at once.
def test_a_goodbye_waits_for_a_rank_that_is_late(world, turns):
    environment = {**libraries(), "RESILIENT_WAIT_LOG": "1"}
    ranks = world.start(leaves_ahead_of_the_others, 3, turns, env=environment)
    for rank in ranks[1:]:
        assert rank.told() == "late"
    assert ranks[0].told() == "leaves"
    until_it_says_for_whom_it_waits(ranks[0])
    for rank in ranks[1:]:
        rank.say("go on")
    for rank in ranks:
        rank.value()


def leaves_with_an_operation():
    cuda, rank, _ = faked()
    dist.all_reduce(cuda.tensor(torch.ones(1), device=rank))
    if rank == 0:
        dist.all_reduce(cuda.tensor(torch.ones(1), device=rank))
    tell("there")
    hear()
    dist.destroy_process_group()
    tell("out")


@NEEDS_FAKE
def test_a_goodbye_waits_no_longer_for_a_rank_that_is_lost(world):
    leaver, lost = world.start(leaves_with_an_operation, 2, env=libraries())
    assert (leaver.told(), lost.told()) == ("there", "there")
    leaver.say("leave")
    lost.signal()
    assert leaver.told(10) == "out"
    leaver.value()


@NEEDS_FAKE
def test_a_goodbye_waits_no_longer_for_a_rank_that_leaves_too(world):
    ranks = world.start(leaves_with_an_operation, 2, env=libraries())
    for rank in ranks:
        assert rank.told() == "there"
    for rank in ranks:
        rank.say("leave")
    for rank in ranks:
        assert rank.told(10) == "out"
        rank.value()


def leaves_until_it_is_interrupted():
    cuda, rank, _ = faked()
    dist.all_reduce(cuda.tensor(torch.ones(1), device=rank))
    if rank == 0:
        dist.all_reduce(cuda.tensor(torch.ones(1), device=rank))
        try:
            dist.destroy_process_group()
        except KeyboardInterrupt:
            tell("interrupted")
    hear()


@NEEDS_FAKE
def test_ctrl_c_ends_a_goodbye_that_waits(world):
    environment = {**libraries(), "RESILIENT_WAIT_LOG": "1"}
    leaver, other = world.start(leaves_until_it_is_interrupted, 2, env=environment)
    until_it_says_for_whom_it_waits(leaver)
    leaver.signal(signal.SIGINT)
    assert leaver.told(3) == "interrupted"
    for rank in (leaver, other):
        rank.say("end")
        rank.wait()


def bound():
    """The group is connected for the device that it is bound to, before its first operation."""
    cuda = fake_device.load()
    rank = int(os.environ["RANK"])
    cuda.set_device(rank)
    # The fake has no properties. A UUID for each, as ranks that share a device are refused.
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        uuid=f"fake-{device}", name="fake"
    )
    dist.init_process_group(
        "resilient", device_id=torch.device("cuda", rank), timeout=timedelta(seconds=60)
    )
    assert cuda.wait("communicators", 1)
    dist.barrier()  # On the device, as the group is bound to one.
    tensor = cuda.tensor(torch.ones(2), device=rank)
    dist.all_reduce(tensor)
    same(fetched(cuda, tensor), torch.full((2,), 2.0))
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_group_that_is_bound_to_a_device_connects_as_it_is_made(world):
    fake_run(world, bound)


def in_groups_of_other_ranks():
    cuda, rank, _ = faked()
    group = dist.new_group([0, 1] if rank == 0 else [1, 2])
    tensor = cuda.tensor(torch.ones(4), device=rank)
    with pytest.raises(torch_resilient.MismatchError) as caught:
        dist.all_reduce(tensor, group=group, async_op=True).wait(LATER)
        dist.all_reduce(tensor, async_op=True).wait(LATER)
    for ranks in ("[0,1]", "[1,2]"):
        assert f"of ranks {ranks} at test_cuda.py:" in str(caught.value)
    torch_resilient.rebuild()
    dist.destroy_process_group()


@NEEDS_FAKE
def test_a_group_of_other_ranks_is_a_mismatch_on_every_rank(world):
    world.run(in_groups_of_other_ranks, 3, env=libraries())


def ends_with_an_abort_that_hangs(blocked):
    cuda, rank, _ = faked()
    dist.all_reduce(cuda.tensor(torch.ones(4), device=rank))
    cuda.synchronize()
    if blocked:
        cuda.hold(cuda.new_stream())  # The device never comes back to whoever waits for it at exit.
        atexit.register(cuda.synchronize)
    cuda.change("hang_abort=1")
    tensor = cuda.tensor(torch.ones(5 + rank), device=rank)
    with pytest.raises(torch_resilient.MismatchError):
        dist.all_reduce(tensor, async_op=True).wait(LATER)


@NEEDS_FAKE
@pytest.mark.parametrize("blocked", [True, False])
def test_an_abort_that_hangs_does_not_keep_a_process_from_its_end(world, blocked):
    env = {**libraries(), "RESILIENT_BUDGET": "6"}
    for rank in world.start(ends_with_an_abort_that_hangs, 2, blocked, env=env):
        assert rank.outcome()[0] == "returned", rank.outcome()[2]
        began = time.monotonic()
        assert rank.wait() == (86 if blocked else 0)
        assert time.monotonic() - began < 15
        told = [line for line in rank.stderr().splitlines() if "exit code 86" in line]
        assert len(told) == blocked
        if blocked:
            assert "the abort of the NCCL communicator of group 'world/cuda'" in told[0]
