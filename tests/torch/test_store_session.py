"""The Store in rank processes: that of a session, forked children, Ctrl-C."""

import contextlib
import datetime
import os
import signal
import threading

import pytest
import rank_server
import torch.distributed as dist
from store_shell import until
from store_support import waits

import torch_resilient


def in_a_child(address, job):
    kv = torch_resilient.Store(address, timeout=20, job=job)
    assert kv.add("n", 1) == 1
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                kv.add("n", 1)
            except torch_resilient.ConfigError as error:
                assert error.code == "FORKED"
                code = 0 if kv.clone().add("n", 1) == 2 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return kv.add("n", 1)


def test_clone_in_a_forked_child(world):
    assert world.run(in_a_child, 1, world.store_address, world.job) == [3]


def interrupted_pop(address, job):
    kv = torch_resilient.Store(address, timeout=60, job=job)
    try:
        rank_server.tell("waiting")
        kv.queue_pop("q")
    except KeyboardInterrupt:
        kv.queue_push("q", "item")
        return kv.queue_pop("q")


def test_ctrl_c_ends_a_wait(world):
    rank = world.start_rank(interrupted_pop, 0, 1, world.store_address, world.job)
    assert rank.told() == "waiting"
    assert rank.outcome(0.5) is None
    rank.signal(signal.SIGINT)
    assert rank.value(20) == b"item"


def use_session_store(size):
    dist.init_process_group("resilient")
    kv = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    kv.multi_set([f"a{rank}", f"b{rank}"], [str(rank)] * 2)
    kv.append("order", str(rank))
    kv.queue_push("q", str(rank))
    assert sorted(kv.multi_get([f"b{r}" for r in range(size)])) == [b"0", b"1", b"2"]
    items = kv.queue_pop("q")
    kv.clone().set(f"done{rank}", items)
    values = kv.multi_get([f"done{r}" for r in range(size)])
    assert sorted(values) == [b"0", b"1", b"2"]
    assert "order" in kv.list_keys()
    under = kv
    while isinstance(under, dist.PrefixStore):
        under = under.underlying_store
    under.barrier("b", size)
    assert under.exchange("e", rank, size, bytes([rank])) == [b"\0", b"\1", b"\2"]
    dist.destroy_process_group()
    return size


def test_store_of_a_session(world):
    assert world.run(use_session_store, 3, 3) == [3, 3, 3]


def keeps_the_store():
    """Rank 0, as a library that has kept the store beyond the end of the world."""
    dist.init_process_group("resilient")
    kv = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    kv.set(f"of {rank}", "before")
    kv.wait([f"of {1 - rank}"])
    if rank == 1:
        assert rank_server.hear() == "left"
        kv.set("answer", kv.get("question"))
        assert rank_server.hear() == "answered"
        dist.destroy_process_group()
        return None
    dist.destroy_process_group()
    kv.set("question", "after")
    rank_server.tell("left")
    return kv.get("answer"), kv.get("of 1"), kv.add("n", 1)


def test_a_store_that_was_kept_outlives_its_world(world):
    ranks = world.start(keeps_the_store, 2)
    assert ranks[0].told() == "left"
    ranks[1].say("left")
    assert ranks[0].value() == (b"after", b"before", 1)
    ranks[1].say("answered")
    ranks[1].value()


def waits_beyond_the_end():
    dist.init_process_group("resilient")
    kv = dist.distributed_c10d._get_default_store()
    ended = []

    def wait():
        try:
            kv.wait(["never"], datetime.timedelta(seconds=60))
        except dist.DistError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    rank_server.hear()
    dist.destroy_process_group()
    waiting.join(20)
    return [error.code for error in ended]


def test_the_end_of_the_world_ends_waits_of_other_threads(world):
    rank = world.start_rank(waits_beyond_the_end, 0, 1)
    until(lambda: waits(world.store_address, world.job) == 1, "the thread waits")
    rank.say("go on")
    assert rank.value()[0] in ("FAILED_PRECONDITION", "STALE_GENERATION")


def wait_for_the_dead(call):
    dist.init_process_group("resilient")
    kv = dist.distributed_c10d._get_default_store()
    while isinstance(kv, dist.PrefixStore):
        kv = kv.underlying_store
    rank_server.tell("waiting")
    if dist.get_rank() == 1:
        rank_server.hear()
    getattr(kv, call[0])(*call[1:])


@pytest.mark.parametrize(
    "call",
    [("queue_pop", "q"), ("barrier", "b", 2), ("multi_get", ["k"]), ("exchange", "e", 0, 2, b"")],
    ids=lambda call: call[0],
)
def test_waits_of_a_session_end_with_a_fence(world, call):
    survivor, victim = world.start(wait_for_the_dead, 2, call)
    assert survivor.told() == "waiting" and victim.told() == "waiting"
    victim.signal(signal.SIGKILL)
    error = survivor.error(20)
    assert isinstance(error, torch_resilient.RankLostError)
    assert error.rank == 1
    survivor.wait()
    victim.wait()
