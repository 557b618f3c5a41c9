"""RESILIENT_REPLAY=1: what a broken link has ended is run again, and the program sees nothing.

Links are cut in the process that has them: the socket is shut down, as by a reset on the way, with
both ranks alive. Shared memory is off, so that all links are TCP.
"""

import itertools
import os
import signal
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from rank_server import tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

SIZE = 3
STEPS = 24
REPLAY = {"RESILIENT_REPLAY": "1", "RESILIENT_SHM_LIMIT": "0"}
OFF = {"RESILIENT_SHM_LIMIT": "0"}


def cut_a_link():
    """Shuts down a TCP connection of this process to another rank, none to the store."""
    store = int(os.environ["RESILIENT_STORE"].rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                peer = sock.getpeername()
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if not inet or store in (peer[1], sock.getsockname()[1]):
                    continue
                sock.shutdown(socket.SHUT_RDWR)
                return True
        except OSError:  # No socket, or not connected.
            continue
    return False


def train(cuts):
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 8))
    model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        if cuts and step % SIZE == rank and step > 0:
            cut_a_link()
        inputs = torch.randn(16, 32, generator=data)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
    failure = torch_resilient.failure()
    generation = torch_resilient.membership()["generation"]
    values = [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]
    dist.destroy_process_group()
    return values, generation, failure is None


def test_a_training_ends_as_undisturbed(world):
    undisturbed = world.run(train, SIZE, False, env=REPLAY)
    cut = world.run(train, SIZE, True, env=REPLAY)
    assert [values for values, _, _ in cut] == [values for values, _, _ in undisturbed]
    assert all(healthy for _, _, healthy in cut)
    assert min(generation for _, generation, _ in cut) > 3  # The links were cut indeed.


def meet_the_failure():
    dist.init_process_group("resilient")
    dist.barrier()
    with pytest.raises(torch_resilient.CommError):
        for number in itertools.count():
            if number == 1 and dist.get_rank() == 0:
                assert cut_a_link()
            dist.all_reduce(torch.ones(4))
    torch_resilient.rebuild()
    ones = torch.ones(4)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones[0].item()


def test_off_the_program_sees_it(world):
    assert world.run(meet_the_failure, SIZE, env=OFF) == [SIZE] * SIZE


def abort_and_rebuild(group):
    """What was raised of the abort, by rank 0; all ranks have rebuilt and left since."""
    with pytest.raises(torch_resilient.CommError) as caught:
        for number in itertools.count():
            if number == 1 and dist.get_rank() == 0:
                # All have entered the first one: they are past what was before.
                group._get_backend(torch.device("cpu")).abort()
            dist.all_reduce(torch.ones(4))
    torch_resilient.rebuild()
    dist.barrier()
    dist.destroy_process_group()
    return str(caught.value)


def abort_on_purpose():
    dist.init_process_group("resilient")
    group = dist.new_group(list(range(SIZE)))
    dist.barrier()
    return "aborted" in abort_and_rebuild(group)


def test_an_abort_is_not_run_again(world):
    assert world.run(abort_on_purpose, SIZE, env=REPLAY) == [True] * SIZE


def rebuild_and_leave(rounds):
    for _ in range(rounds):
        dist.init_process_group("resilient")
        abort_and_rebuild(dist.group.WORLD)


def test_a_rank_that_leaves_after_a_rebuild_is_needed_by_nobody(world):
    """What ranks tell each other of replays after a rebuild may still be on its way then."""
    world.run(rebuild_and_leave, SIZE, 20, env=REPLAY)


def lose_one(victim, healed):
    """The victim takes no part in an operation whose link is cut; the others tell when that has
    begun, or when they are in the next generation, where it is run again."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    first = torch_resilient.membership()["generation"]

    def tell_of_next(event):
        if event["event"] == "running" and event["generation"] > first:
            tell("waits")

    if healed and rank != victim:
        torch_resilient.on_event(tell_of_next)
    if rank == victim:
        dist.barrier()
        tell("ready")
        signal.pause()
    # The link may be cut, and the loss be known, when some are still in the barrier.
    with pytest.raises(torch_resilient.ResilientError) as caught:
        dist.barrier()
        work = dist.all_reduce(torch.ones(4), async_op=True)
        if not healed:
            tell("waits")
        if rank == 0:
            assert cut_a_link() or not healed  # The loss may have ended all links before that.
        work.wait()
    return type(caught.value).__name__


@pytest.mark.parametrize("healed", [True, False])
def test_a_loss_meanwhile_is_told(world, healed):
    ranks = world.start(lose_one, SIZE, SIZE - 1, healed, env=REPLAY)
    assert ranks[-1].told() == "ready"
    assert [rank.told() for rank in ranks[:-1]] == ["waits"] * (SIZE - 1)
    ranks[-1].signal()
    ranks[-1].wait(10)
    told = {rank.value(60) for rank in ranks[:-1]}
    # Before the next generation has begun the first cause is that of the link.
    assert told == {"RankLostError"} if healed else told <= {"RankLostError", "CommError"}


def messages_and_threads():
    """Point-to-point in a ring, and collectives of a subgroup by another thread meanwhile."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    sums = []

    def reduce_in_pair():
        for number in range(50):
            value = torch.tensor([float(number + rank)])
            dist.all_reduce(value, group=pair)
            sums.append(value.item())

    thread = threading.Thread(target=reduce_in_pair) if rank < 2 else None
    if thread:
        thread.start()
    received = []
    for number in range(30):
        if number % 10 == 5 and rank == 2:
            cut_a_link()
        value = torch.tensor([float(number * 10 + rank)])
        dist.all_reduce(value)
        received.append(value.item())
    if thread:
        thread.join()
    generation = torch_resilient.membership()["generation"]
    dist.destroy_process_group()
    return received, sums, generation


def test_groups_and_threads(world):
    outcomes = world.run(messages_and_threads, SIZE, env=REPLAY)
    for rank, (received, sums, generation) in enumerate(outcomes):
        assert received == [30.0 * number + 3 for number in range(30)]
        assert sums == ([2.0 * number + 1 for number in range(50)] if rank < 2 else [])
        assert generation > 1


def next_generation():
    """Is set once this rank runs a later generation than now."""
    first = torch_resilient.membership()["generation"]
    begun = threading.Event()

    def look(event):
        if event["event"] == "running" and event["generation"] > first:
            begun.set()

    torch_resilient.on_event(look)
    return begun


def wait_for_keys_of_one_that_cuts():
    dist.init_process_group("resilient")
    store = dist.distributed_c10d._get_default_store()
    gone_on = next_generation()
    value = torch.ones(1)
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        assert cut_a_link()
        assert gone_on.wait(30)
        store.multi_set(["k", "l"], ["a", "b"])
    if dist.get_rank() == 0:
        store.wait(["k"])
    values = [store.get("k"), *store.multi_get(["k", "l"])]
    dist.all_reduce(value)
    healthy = torch_resilient.failure() is None
    dist.destroy_process_group()
    return values, value.item(), healthy


def test_who_waits_for_a_key_waits_on(world):
    outcomes = world.run(wait_for_keys_of_one_that_cuts, SIZE, env=REPLAY)
    assert outcomes == [([b"a", b"a", b"b"], float(SIZE * SIZE), True)] * SIZE


def agree_with_one_that_cuts():
    """The others are in agree(), which belongs to its generation, when it ends."""
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    state = torch_resilient.State(step=0, total=torch.zeros(1))
    runs = []

    @torch_resilient.elastic
    def run(state):
        runs.append(state.step)
        while state.step < 4:
            if state.step == 2 and len(runs) == 1:
                if rank == 1:
                    store.wait([f"agrees/{other}" for other in (0, 2)])
                    gone_on = next_generation()
                    assert cut_a_link()
                    assert gone_on.wait(30)
                else:
                    store.set(f"agrees/{rank}", "")
            assert torch_resilient.agree(True)
            value = torch.full((1,), float(rank))
            dist.all_reduce(value)
            state.total += value
            state.step += 1
            state.commit()

    run(state)
    dist.destroy_process_group()
    return state.step, state.total.item(), runs


def test_an_agreement_that_ends_with_its_link_is_met_by_all(world):
    outcomes = world.run(agree_with_one_that_cuts, SIZE, env=REPLAY)
    assert outcomes == [(4, 4.0 * 3, [0, 2])] * SIZE


def monitor_one_that_cuts():
    dist.init_process_group("resilient")
    store = dist.distributed_c10d._get_default_store()
    dist.monitored_barrier()
    if dist.get_rank() == 0:
        store.set("enters", "")
    else:
        store.wait(["enters"])
        gone_on = next_generation()
        assert cut_a_link()
        assert gone_on.wait(30)
    dist.monitored_barrier()
    dist.monitored_barrier()
    healthy = torch_resilient.failure() is None
    dist.destroy_process_group()
    return healthy


def test_a_monitored_barrier_over_a_cut(world):
    assert world.run(monitor_one_that_cuts, 2, env=REPLAY) == [True, True]
