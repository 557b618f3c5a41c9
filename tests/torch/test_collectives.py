"""Every form of every collective, through torch.distributed, against what it must give."""

import warnings

import pytest
import rank_server
import torch
import torch.distributed as dist
from tensors import joined, same, values

COUNT = 1000


def total(size, count=COUNT, dtype=torch.float32):
    return sum(values(rank, count, dtype) for rank in range(size))


def check_reduce(rank, size):
    for root in range(size):
        tensor = values(rank, COUNT)
        dist.reduce(tensor, dst=root)
        same(tensor, total(size) if rank == root else values(rank, COUNT), root)
    strided = values(rank, 2 * COUNT)[::2]
    dist.reduce(strided, dst=0)
    if rank == 0:
        same(strided, total(size, 2 * COUNT)[::2], "strided")


def check_gather(rank, size):
    for root in range(size):
        outputs = [torch.empty(COUNT) for _ in range(size)] if rank == root else None
        dist.gather(values(rank, COUNT), outputs, dst=root)
        for other, output in enumerate(outputs or []):
            same(output, values(other, COUNT), other)
    # Columns of a matrix: not contiguous on either side.
    matrix = torch.zeros(COUNT, size)
    columns = [matrix[:, other] for other in range(size)] if rank == 0 else None
    dist.gather(values(rank, 2 * COUNT)[::2], columns, dst=0)
    for other, column in enumerate(columns or []):
        same(column, values(other, 2 * COUNT)[::2], other)


def check_gather_uneven(rank, size):
    outputs = [torch.empty(other + 1) for other in range(size)] if rank == 0 else None
    dist.gather(values(rank, rank + 1), outputs, dst=0)
    for other, output in enumerate(outputs or []):
        same(output, values(other, other + 1), other)


def check_gather_single(rank, size):
    if not hasattr(dist, "gather_single"):
        return
    output = torch.empty(size * COUNT) if rank == size - 1 else None
    dist.gather_single(values(rank, COUNT), output, dst=size - 1)
    if output is not None:
        same(output, torch.cat([values(other, COUNT) for other in range(size)]))


def check_scatter(rank, size):
    for root in range(size):
        inputs = [values(other, COUNT) for other in range(size)] if rank == root else None
        output = torch.empty(COUNT)
        dist.scatter(output, inputs, src=root)
        same(output, values(rank, COUNT), root)


def check_all_gather_uneven(rank, size):
    outputs = [torch.empty(100 * other) for other in range(size)]  # Of rank 0: nothing.
    dist.all_gather(outputs, values(rank, 100 * rank))
    for other, output in enumerate(outputs):
        same(output, values(other, 100 * other), other)


def check_all_gather_in_place(rank, size):
    whole = torch.zeros(size * COUNT)
    mine = whole[rank * COUNT : (rank + 1) * COUNT]
    mine.copy_(values(rank, COUNT))
    dist.all_gather_into_tensor(whole, mine)
    same(whole, torch.cat([values(other, COUNT) for other in range(size)]))


def check_all_gather_coalesced(rank, size):
    inputs = [values(rank, 10), values(rank, 20)]
    outputs = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(outputs, inputs)
    for other, (first, second) in enumerate(outputs):
        same(first, values(other, 10), other)
        same(second, values(other, 20), other)


def check_reduce_scatter(rank, size):
    inputs = [values(rank + part, COUNT) for part in range(size)]
    expected = sum(values(other + rank, COUNT) for other in range(size))
    output = torch.empty(COUNT)
    dist.reduce_scatter(output, inputs)
    same(output, expected, "list")
    output = torch.empty(COUNT)
    dist.reduce_scatter_tensor(output, torch.cat(inputs))
    same(output, expected, "tensor")
    whole = torch.cat(inputs)
    mine = whole[rank * COUNT : (rank + 1) * COUNT]
    dist.reduce_scatter_tensor(mine, whole)
    same(mine, expected, "in place")
    averaged = torch.empty(COUNT, 2)[:, 0]
    dist.reduce_scatter_tensor(averaged, torch.cat(inputs), op=dist.ReduceOp.AVG)
    torch.testing.assert_close(averaged, expected / size)


def check_reduce_scatter_uneven(rank, size):
    output = torch.empty(10 * (rank + 1))
    dist.reduce_scatter(output, [values(rank, 10 * (part + 1)) for part in range(size)])
    same(output, total(size, 10 * (rank + 1)))


def check_all_to_all(rank, size):
    inputs = [values(rank * size + peer, rank + peer + 1) for peer in range(size)]
    outputs = [torch.empty(rank + peer + 1) for peer in range(size)]
    dist.all_to_all(outputs, inputs)
    for peer, output in enumerate(outputs):
        same(output, values(peer * size + rank, rank + peer + 1), peer)


def check_all_to_all_single(rank, size):
    matrix = torch.arange(2 * size * 3).reshape(2 * size, 3) + 1000 * rank
    output = torch.empty_like(matrix)
    dist.all_to_all_single(output, matrix)
    rows = [
        torch.arange(2 * size * 3).reshape(2 * size, 3)[2 * rank : 2 * rank + 2] + 1000 * peer
        for peer in range(size)
    ]
    same(output, torch.cat(rows), "even")
    sent = [peer for peer in range(size)]  # Nothing to rank 0.
    received = [rank] * size
    source = torch.cat([torch.full((peer, 3), float(rank)) for peer in range(size)])
    output = torch.empty(rank * size, 3)
    dist.all_to_all_single(output, source, received, sent)
    same(output, torch.cat([torch.full((rank, 3), float(peer)) for peer in range(size)]), "uneven")


def check_broadcast_strided(rank, size):
    matrix = torch.full((4, 6), float(rank))
    dist.broadcast(matrix.t(), src=size - 1)
    same(matrix, torch.full((4, 6), float(size - 1)))


def check_empty(rank, size):
    nothing = torch.empty(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, src=0)
    dist.reduce(nothing, dst=0)
    dist.all_gather([torch.empty(0, 3) for _ in range(size)], nothing)
    dist.reduce_scatter_tensor(torch.empty(0, 3), torch.empty(0, 3))
    dist.all_to_all_single(torch.empty(0, 3), nothing)
    dist.scatter(nothing, [torch.empty(0, 3)] * size if rank == 0 else None, src=0)
    works = [dist.all_reduce(torch.empty(0), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def check_sparse(rank, size):
    if rank == 0 and size > 1:
        mine = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), [], (5,))
    else:
        mine = torch.sparse_coo_tensor([[rank, rank, 4]], [1.0, 2.0, float(rank)], (5,))
    expected = mine.to_dense()
    dist.all_reduce(expected)
    dist.all_reduce(mine)
    assert mine.is_coalesced()
    same(mine.to_dense(), expected, "one sparse dimension")
    rows = torch.sparse_coo_tensor([[rank]], values(rank, 4).reshape(1, 4), (size, 4))
    work = dist.all_reduce(rows, async_op=True)
    work.wait()
    expected = torch.stack([values(other, 4) for other in range(size)])
    same(rows.to_dense(), expected, "a dense dimension")
    same(work.get_future().wait()[0].to_dense(), expected, "future")


def check_objects(rank, size):
    received = [None]
    objects = [{"for": other} for other in range(size)] if rank == 0 else None
    dist.scatter_object_list(received, objects, src=0)
    assert received == [{"for": rank}]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object("x" * rank, gathered, dst=0)
    assert rank != 0 or gathered == ["x" * other for other in range(size)]


def check_asynchronous(rank, size):
    """All forms at once, waited for in the opposite order, with their futures."""
    reduced = values(rank, COUNT)
    gathered = torch.empty(size, COUNT)
    scattered = torch.empty(COUNT)
    exchanged = torch.empty(size)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.all_gather_into_tensor(gathered, values(rank, COUNT), async_op=True),
        dist.reduce_scatter_tensor(scattered, values(rank, COUNT).repeat(size), async_op=True),
        dist.all_to_all_single(exchanged, torch.full((size,), float(rank)), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed() and work.is_success()
    same(works[0].get_future().wait()[0], total(size), "all_reduce")
    same(gathered, torch.stack([values(other, COUNT) for other in range(size)]), "all_gather")
    same(scattered, total(size), "reduce_scatter")
    same(exchanged, torch.arange(size, dtype=torch.float32), "all_to_all")
    assert works[0]._get_duration() > 0
    assert works[0].get_future_result().wait() == 0  # SUCCESS


CHECKS = {name: value for name, value in globals().items() if name.startswith("check_")}


MODES = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,  # What is made there may be written there only.
}


def run_checks(names, mode):
    rank, size = joined()
    for name in names:
        with MODES[mode]():
            CHECKS[name](rank, size)
        rank_server.tell(name)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size", "mode"), [(1, "plain"), (2, "plain"), (3, "plain"), (2, "no_grad"), (2, "inference")]
)
def test_forms(world, size, mode):
    ranks = world.start(run_checks, size, list(CHECKS), mode)
    for name in CHECKS:  # One by one, so that a failure has a name.
        for rank in ranks:
            assert rank.told() == name
    for rank in ranks:
        rank.value()


def modes_of_callbacks():
    """What a callback does depends on the modes of the call that it belongs to."""
    rank, _ = joined()
    other = dist.new_group()
    seen = []

    def look(future):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return future.value()

    for mode in MODES.values():
        if rank == 1:
            dist.barrier(other)  # Rank 0's futures have callbacks before their operations end.
        with mode():
            future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(look)
        if rank == 0:
            dist.barrier(other)
        future.wait()
    dist.destroy_process_group()
    return seen


def test_a_callback_has_the_modes_of_its_call(world):
    expected = [(True, False), (False, False), (False, True)]
    assert world.run(modes_of_callbacks, 2) == [expected] * 2


FLUSHED = 2854495  # The bits of 4e-39, which a thread that flushes subnormals takes for zero.


def sums_of_small_numbers(rounds):
    """The thread of the caller or one of the group's runs a reduction, whichever is free, and
    torch.set_flush_denormal is for the calling thread and those that it makes later."""
    rank, _ = joined()
    dist.all_reduce(torch.ones(1 << 16), async_op=True).wait()
    tiny = torch.full((8,), FLUSHED, dtype=torch.int32).view(torch.float32)
    sparse = torch.sparse_coo_tensor([list(range(8))], tiny, (8,)).coalesce()
    assert torch.set_flush_denormal(True)
    assert not (tiny * 1).view(torch.int32).any()  # The setting is in force here.
    seen = set()
    for turn in range(rounds):
        large, sums, total = torch.ones(1 << 16), tiny.clone(), sparse.clone()
        work = dist.all_reduce(large, async_op=True)
        if (turn + rank) % 2:
            sum(range(20_000))  # One rank is a little later.
        dist.all_reduce(sums)
        work.wait()
        also = tiny.clone()
        if (turn + rank) % 2:
            dist.all_reduce(also)
        else:
            dist.all_reduce(also, async_op=True).wait()
        if turn % 10 == 0:
            dist.all_reduce(total)
            seen.update(total._values().view(torch.int32).tolist())
        seen.update(sums.view(torch.int32).tolist() + also.view(torch.int32).tolist())
    assert not (tiny * 1).view(torch.int32).any()  # And was put back.
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize(
    ("policy", "shm_limit"), [("liveness", "256MiB"), ("strict", "256MiB"), ("liveness", "0")]
)
def test_a_sum_is_the_same_on_every_rank_whichever_thread_adds(world, policy, shm_limit):
    env = {"RESILIENT_TIMEOUT_POLICY": policy, "RESILIENT_SHM_LIMIT": shm_limit}
    assert world.run(sums_of_small_numbers, 2, 100, env=env) == [{2 * FLUSHED}] * 2


def refused_calls():
    """Each raises before anything is submitted, so the next call works."""
    rank, size = joined()
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    one, two = torch.ones(4), torch.ones(5)
    calls = {
        "2 ranks: pass input_split_sizes": lambda: dist.all_to_all_single(one, two),
        "not those of 4 rows": lambda: dist.all_to_all_single(one, one, [1, 1], [2, 2]),
        "needs an output of 8": lambda: group._allgather_base(two, one),
        "a list of 2 output tensors": lambda: group.allgather([[one] * 3], [one]),
        "this rank's output 5": lambda: group.allgather([[two, two]], [one]),
        "one dtype": lambda: group._reduce_scatter_base(one, torch.ones(8).long()),
        "needs an input of 8": lambda: group._reduce_scatter_base(one, two),
        "one tensor, not 2": lambda: group.allreduce([one, two]),
        "bit_and of Float": lambda: dist.all_reduce(one, op=dist.ReduceOp.BAND),
        "root 2 is not a rank": lambda: group.broadcast(one, 2),
        "is not another rank": lambda: group.send([one], rank, 0),
        "tag -1": lambda: group.send([one], 1 - rank, -1),
        "sparse tensors can be all-reduced only": lambda: backend.broadcast(
            [one.to_sparse()], dist.BroadcastOptions()
        ),
        "is on meta, and this version serves tensors on the CPU and on CUDA": lambda: (
            backend.broadcast([one.to("meta")], dist.BroadcastOptions())
        ),
        "2, 5.* share one place in memory": lambda: dist.all_reduce(torch.ones(5).expand(2, 5)),
        "share one place in memory, as": lambda: dist.all_gather(
            [torch.ones(1).expand(4), torch.empty(4)], one
        ),
        "peer 2 is not another rank of a group of 2": lambda: dist.send(one, 2),
        "peer 7 is not another rank": lambda: dist.recv(one, 7),
        "SUM and AVG only": lambda: dist.all_reduce(one.to_sparse(), op=dist.ReduceOp.MAX),
    }
    for text, call in calls.items():
        with pytest.raises(RuntimeError, match=text) as raised:
            call()
        # As torch's own refusals, where it is the arguments that are wrong.
        invalid = "[resilient:INVALID_ARGUMENT]" in str(raised.value)
        assert isinstance(raised.value, ValueError) == invalid
    # Complex numbers have no order, and torch asks no further when the group is called directly.
    with pytest.raises(RuntimeError, match="no order"):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        group.allreduce([torch.ones(4, dtype=torch.complex64)], options)
    dist.all_reduce(one)
    assert one[0].item() == size
    dist.destroy_process_group()


def test_what_cannot_be_is_refused_and_loses_nothing(world):
    world.run(refused_calls, 2)


def sparse_shapes_differ():
    rank, _ = joined()
    tensor = torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,))
    with pytest.raises(RuntimeError, match="another shape"):
        dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()


def test_sparse_tensors_of_other_shapes_are_refused_everywhere(world):
    world.run(sparse_shapes_differ, 2)


def nested_groups():
    rank, size = joined()
    half = [other for other in range(size) if other // 2 == rank // 2]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    alone = [dist.new_group([other]) for other in range(size)][rank]
    for group, members in [(mine, half), (alone, [rank]), (dist.group.WORLD, range(size))]:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)
    # Group ranks in another order than those of the world.
    turned = dist.new_group([3, 2, 1, 0], sort_ranks=False) if _sorts() else dist.new_group()
    gathered = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=turned)
    order = dist.get_process_group_ranks(turned)
    assert [tensor.item() for tensor in gathered] == order
    dist.broadcast(tensor.fill_(rank), src=3, group=turned)
    assert tensor.item() == 3
    dist.destroy_process_group()


def _sorts():
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def test_groups_of_some_ranks(world):
    world.run(nested_groups, 4)


def threads_and_groups():
    """Threads that use a group each do not disturb each other."""
    import threading

    rank, size = joined()
    groups = [dist.new_group() for _ in range(4)]
    wrong = []

    def work(number):
        try:
            for turn in range(50):
                tensor = torch.full((number * 100 + 1,), float(rank + turn))
                dist.all_reduce(tensor, group=groups[number])
                if tensor[-1].item() != sum(other + turn for other in range(size)):
                    wrong.append((number, turn))
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    dist.destroy_process_group()


def test_threads_with_a_group_each(world):
    world.run(threads_and_groups, 3)
