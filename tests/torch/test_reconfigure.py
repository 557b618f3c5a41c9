"""torch's contract for fault tolerance: groups whose members the program chooses.

Goal: init_process_group(..., enable_reconfigure=True) behaves as torch says, and the store supplies
the liveness. Method: real ranks that pass their handles on through a store of their own; some are
killed, some come late, some use a uuid again.
"""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import settled, thread_names
from rank_server import hear, tell

import torch_resilient
from torch_resilient import _worlds

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch has reconfigure from 2.14 on"
)
SHORT = timedelta(seconds=1)


class Member:
    """One rank of a test: its group, which has no members yet, and the others' handles."""

    def __init__(self):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        job = os.environ["RESILIENT_JOB"] + "/handles"
        self.store = torch_resilient.Store(os.environ["RESILIENT_STORE"], timeout=30, job=job)
        self.inits = 0
        self.begin()

    def begin(self):
        self.inits += 1
        dist.init_process_group("resilient", enable_reconfigure=True, timeout=timedelta(seconds=30))

    def handles(self):
        """Of all ranks of the test. Each init makes another, to be known from that of before."""
        key = f"handle/{self.inits}/{{}}"
        self.store.set(key.format(self.rank), dist._get_reconfigure_handle())
        return [self.store.get(key.format(rank)).decode() for rank in range(self.size)]

    def backend(self):
        return dist.group.WORLD._get_backend(torch.device("cpu"))


def reconfigure(uuid, handles, timeout=None):
    dist._reconfigure(uuid, handles, timeout=timeout).wait()


def descriptors_and_threads():
    """Behind destroy_process_group(): the main thread is left."""
    settled(lambda: len(thread_names()), 1)
    return len(os.listdir("/proc/self/fd")), thread_names()


def total(value=None):
    """The sum over the members; of their ranks, each plus one, where nothing is said."""
    tensor = torch.full((4,), dist.get_rank() + 1.0 if value is None else value)
    dist.all_reduce(tensor)
    assert len(set(tensor.tolist())) == 1
    return tensor[0].item()


def place():
    ranks = list(range(dist.get_world_size()))
    assert dist.get_process_group_ranks(dist.group.WORLD) == ranks
    members = torch_resilient.membership()["members"]
    assert [member["rank"] for member in members] == ranks
    assert members[dist.get_rank()]["pid"] == os.getpid()
    return dist.get_rank(), dist.get_world_size()


def first_members():
    member = Member()
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (member.rank, member.size)
    with pytest.raises(RuntimeError, match=r"has no members.*dist\._reconfigure"):
        dist.barrier()
    reconfigure(100, member.handles())
    assert place() == (member.rank, member.size)
    assert total() == 6
    before, after = (member.rank - 1) % member.size, (member.rank + 1) % member.size
    received = torch.zeros(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(member.rank)), after),
            dist.P2POp(dist.irecv, received, before),
        ]
    )
    for work in works:
        work.wait()
    assert received.tolist() == [float(before)] * 4
    gathered = [None] * member.size
    dist.all_gather_object(gathered, member.rank)
    assert gathered == list(range(member.size))
    groups = torch_resilient.status()["groups"]
    assert [(group["name"], group["size"]) for group in groups] == [("world", 3)]
    assert torch_resilient.op_log()[-1]["state"] == "completed"
    dist.destroy_process_group()


def test_the_first_reconfigure_makes_the_group(world):
    world.run(first_members, 3)


def in_another_order():
    member = Member()
    handles = member.handles()
    reconfigure(1, handles[::-1])
    assert place() == (member.size - 1 - member.rank, member.size)
    reconfigure(2, set(handles))
    return place()


def test_a_list_gives_the_ranks_and_a_set_takes_those_of_init(world):
    assert world.run(in_another_order, 3) == [(0, 3), (1, 3), (2, 3)]


def shrinks(excluded):
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    if member.rank == excluded:
        tell("left out")
        hear()
        return None
    reconfigure(2, handles[:excluded] + handles[excluded + 1 :])
    assert total() == 3
    tensor = torch.full((4,), 42.0 if dist.get_rank() == 0 else 0.0)
    dist.broadcast(tensor, 0)
    assert tensor.tolist() == [42.0] * 4
    tell("shrunk")
    return place()


@pytest.mark.parametrize("excluded", [0, 1, 2])
def test_a_member_is_left_out(world, excluded):
    ranks = world.start(shrinks, 3, excluded)
    left = [rank for number, rank in enumerate(ranks) if number != excluded]
    assert ranks[excluded].told() == "left out"
    for rank in left:
        assert rank.told() == "shrunk"
    ranks[excluded].say("end")
    assert [rank.value() for rank in left] == [(0, 2), (1, 2)]
    assert ranks[excluded].value() is None


def leaves_and_rejoins(rounds):
    """One after the other is left out, and comes back as the last."""
    member = Member()
    order = list(range(member.size))
    handles = member.handles()
    reconfigure(1, handles)
    for number in range(rounds):
        out = order.pop(number % member.size)
        if member.rank != out:
            reconfigure(10 + number, [handles[rank] for rank in order])
            assert total(10.0**member.rank) == sum(10.0**rank for rank in order)
            assert place() == (order.index(member.rank), 2)
        order.append(out)
        reconfigure(20 + number, [handles[rank] for rank in order])
        assert place() == (order.index(member.rank), 3)
        assert total(10.0**member.rank) == 111
    return dist.get_rank()


def test_a_member_is_left_out_and_rejoins_as_the_last_again_and_again(world):
    assert world.run(leaves_and_rejoins, 3, 4) == [0, 2, 1]


def one_waits_in_vain():
    member = Member()
    handles = member.handles()
    if member.rank == 1:  # As the first of its list, and nobody else has tried yet.
        with pytest.raises(torch_resilient.JoinTimeoutError, match="timed out after 1000 ms"):
            reconfigure(1, [handles[1], handles[0]], SHORT)
        assert dist.get_world_size() == 3
    member.store.barrier("in vain", 3)
    assert member.handles() == handles and len(set(handles)) == 3
    reconfigure(2, handles)
    return total()


def test_who_has_waited_in_vain_joins_the_others_later(world):
    assert world.run(one_waits_in_vain, 3) == [6.0] * 3


def down_and_up():
    member = Member()
    alone = [dist._get_reconfigure_handle()]
    handles = member.handles()
    reconfigure(600 + member.rank, alone)
    assert place() == (0, 1)
    assert total() == 1
    reconfigure(603, handles)
    assert place() == (member.rank, 3)
    assert total() == 6
    reconfigure(604 + member.rank, alone)
    assert place() == (0, 1)


def test_each_alone_then_all_then_each_alone(world):
    world.run(down_and_up, 3)


def comes_late():
    member = Member()
    handles = member.handles()
    if member.rank < 2:
        reconfigure(900, handles[:2])
        assert total() == 3
    reconfigure(901, handles)
    assert total() == 6
    return place()


def test_one_joins_late(world):
    assert world.run(comes_late, 3) == [(0, 3), (1, 3), (2, 3)]


def merges():
    member = Member()
    handles = member.handles()
    pair = member.rank // 2
    for step in range(2):
        reconfigure(10 * step + pair, handles[2 * pair : 2 * pair + 2])
        assert place() == (member.rank % 2, 2)
        assert total(float(member.rank)) == (1, 5)[pair]
        reconfigure(10 * step + 9, handles)
        assert total(float(member.rank)) == 6


def test_two_pairs_merge_and_split(world):
    world.run(merges, 4)


def aborts():
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    assert total() == 6
    tell("has the sum")
    if member.rank == 1:
        hear()
        member.backend().abort()
    with pytest.raises(torch_resilient.CommError, match="abort"):
        while True:
            dist.barrier()
    assert _worlds.registry.current().member_session().await_failure(10) is not None
    assert member.backend().get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR
    with pytest.raises(torch_resilient.CommError):
        dist.barrier()
    reconfigure(2, handles)
    assert member.backend().get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    return total()


def test_abort_ends_what_runs_everywhere_and_a_fresh_uuid_works(world):
    ranks = world.start(aborts, 3)
    assert [rank.told() for rank in ranks] == ["has the sum"] * 3  # Each has its own at its time.
    ranks[1].say("abort")
    assert [rank.value() for rank in (ranks[1], ranks[0], ranks[2])] == [6.0] * 3


def times_out():
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    assert total() == 6
    member.backend().set_timeout(SHORT)
    late = "has not ended within its timeout of 1 s: rank 0 .* rank 2"
    if member.rank == 1:
        with pytest.raises(torch_resilient.CommError, match=late):
            total()
    assert _worlds.registry.current().member_session().await_failure(20) is not None
    with pytest.raises(torch_resilient.CommError, match=late):
        total()
    member.backend().set_timeout(timedelta(seconds=30))
    reconfigure(2, handles)
    return total()


def test_an_operation_that_times_out_strictly_ends_the_group_until_a_fresh_uuid(world):
    assert world.run(times_out, 3, env={"RESILIENT_TIMEOUT_POLICY": "strict"}) == [6.0] * 3


def aborted_while_it_waits():
    member = Member()
    own = dist._get_reconfigure_handle()
    incarnation = own.split(":")[2]
    absent = own.replace(incarnation, incarnation[::-1])
    over = threading.Event()

    def abort():
        while not over.wait(0.05):
            member.backend().abort()

    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(torch_resilient.ResilientError):
        reconfigure(1, [own, absent])
    over.set()
    aborting.join()
    reconfigure(2, [own])
    return total()


def test_abort_ends_a_reconfigure_that_waits(world):
    assert world.run(aborted_while_it_waits, 1, seconds=20) == [1.0]


def same_uuid_again():
    member = Member()
    handles = member.handles()
    if member.rank < 2:
        reconfigure(7, handles[:2])
    member.store.barrier("made", 3)
    if member.rank < 2:
        with pytest.raises(torch_resilient.ConfigError, match=r"uuid=7.*already used"):
            reconfigure(7, handles)
        assert total() == 3  # The refusal has changed nothing.
    else:
        for others in (handles[2:], handles[1:], handles):
            with pytest.raises(torch_resilient.ConfigError, match="already used"):
                reconfigure(7, others)
    member.store.barrier("refused", 3)
    reconfigure(8, handles)
    return total()


def test_a_reused_uuid_is_refused(world):
    assert world.run(same_uuid_again, 3) == [6.0] * 3


def two_sets():
    member = Member()
    handles = member.handles()
    mine = handles[:2] if member.rank < 2 else handles[2:]
    refused = 0
    try:
        reconfigure(5, mine, SHORT)
        total()
    except torch_resilient.ResilientError as error:
        assert "already used" in str(error) or error.code in ("JOIN_TIMEOUT", "LEFT"), error
        refused = 1
    # A uuid whose members have all left is fresh again to who comes to it only then.
    member.store.barrier("tried", 4)
    reconfigure(6, handles)
    assert total() == 10
    return refused


def test_one_uuid_for_two_sets_never_mixes_them(world):
    refused = world.run(two_sets, 4)
    assert sum(refused) >= 2  # One set at least.


def dies(victim):
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    total()
    tell("runs")
    if member.rank == victim:
        signal.pause()
    with pytest.raises(torch_resilient.RankLostError, match=r"SIGKILL|gone|connection") as caught:
        while True:
            dist.barrier()
    assert caught.value.rank == victim
    for _ in range(2):
        with pytest.raises(torch_resilient.RankLostError):
            dist.barrier()
    assert torch_resilient.failure().rank == victim
    left = handles[:victim] + handles[victim + 1 :]
    member.store.barrier("lost", 2)  # The time for both counts from the first one.
    with pytest.raises(torch_resilient.JoinTimeoutError, match=rf"uuid=2.*missing ranks? {victim}"):
        reconfigure(2, handles, SHORT)
    with pytest.raises(RuntimeError, match="has no members"):
        dist.barrier()
    reconfigure(3, left)
    assert torch_resilient.failure() is None
    return total(), place()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_that_dies_is_named_and_the_others_go_on(world, victim):
    ranks = world.start(dies, 3, victim)
    for rank in ranks:
        assert rank.told() == "runs"
    ranks[victim].signal()
    left = [rank for number, rank in enumerate(ranks) if number != victim]
    assert [rank.value() for rank in left] == [(3.0, (0, 2)), (3.0, (1, 2))]


def stops():
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    total()
    tell("runs")
    if member.rank == 1:
        hear()
        with pytest.raises(torch_resilient.FencedError):
            dist.barrier()
    else:
        with pytest.raises(torch_resilient.RankLostError) as caught:
            while True:
                dist.barrier()
        assert caught.value.rank == 1
        reconfigure(2, handles[::2])
        assert total() == 3
        tell("goes on")
    reconfigure(3, handles)
    return total()


def test_a_member_that_was_stopped_comes_back_by_a_reconfigure(quick_world):
    ranks = quick_world.start(stops, 3)
    for rank in ranks:
        assert rank.told() == "runs"
    ranks[1].signal(signal.SIGSTOP)
    for rank in ranks[::2]:
        assert rank.told() == "goes on"
    ranks[1].say("go")
    ranks[1].signal(signal.SIGCONT)
    assert [rank.value() for rank in ranks] == [6.0] * 3


def interrupted():
    Member()
    own = dist._get_reconfigure_handle()
    incarnation = own.split(":")[2]
    over = threading.Event()

    def interrupt():
        while not over.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    def once(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, once)
    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupting.start()
        reconfigure(1, [own, own.replace(incarnation, incarnation[::-1])])
    over.set()
    interrupting.join()
    reconfigure(2, [own])
    return total()


def test_ctrl_c_ends_a_reconfigure_that_waits(world):
    assert world.run(interrupted, 1, seconds=20) == [1.0]


def leaves_one_in_an_operation():
    member = Member()
    handles = member.handles()
    reconfigure(1, handles)
    if member.rank == 0:
        tell("runs")
        with pytest.raises(torch_resilient.RankLostError) as caught:
            dist.barrier()
        assert caught.value.code == "LEFT"
    else:
        hear()
    reconfigure(2, handles)
    return total()


def test_who_waits_for_a_member_that_reconfigures_is_told(world):
    ranks = world.start(leaves_one_in_an_operation, 2)
    assert ranks[0].told() == "runs"
    ranks[1].say("go")
    assert [rank.value() for rank in ranks] == [3.0] * 2


def over_a_store_of_torch(path):
    store = dist.FileStore(path, 3)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "resilient", store=store, rank=rank, world_size=3, enable_reconfigure=True
    )
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle/{other}").decode() for other in range(3)]
    reconfigure(1, handles)
    assert total() == 6
    if rank > 0:  # Rank 0 has started the server, which goes on without it.
        tell("waits")
        hear()
        reconfigure(2, handles[1:])
        assert total() == 3
    dist.destroy_process_group()


def test_the_server_that_a_member_has_started_outlives_its_leave(world, tmp_path):
    environment = {"RESILIENT_STORE": None, "RESILIENT_JOB": None}
    ranks = world.start(over_a_store_of_torch, 3, str(tmp_path / "store"), env=environment)
    assert [rank.told() for rank in ranks[1:]] == ["waits"] * 2
    ranks[0].value()
    for rank in ranks[1:]:
        rank.say("go")
    for rank in ranks[1:]:
        rank.value()


def mistakes():
    with pytest.raises(torch_resilient.ConfigError, match="single"):
        dist.init_process_group("cpu:resilient,cuda:nccl", enable_reconfigure=True)
    os.environ["RESILIENT_SPARES"] = "1"
    with pytest.raises(torch_resilient.ConfigError, match="a spare takes"):
        dist.init_process_group("resilient", world_size=2, enable_reconfigure=True)
    del os.environ["RESILIENT_SPARES"]
    member = Member()
    own = dist._get_reconfigure_handle()
    assert own == dist._get_reconfigure_handle()
    for handles, text in (
        ([], "is not among the 0 handles"),
        (["gloo:0:-1:0:"], "no handle of this backend"),
        (["resilient:x:y:1:"], "no handle of this backend"),
        ([own, own], "twice"),
    ):
        with pytest.raises(torch_resilient.ConfigError, match=text):
            reconfigure(1, handles)
    with pytest.raises(torch_resilient.ConfigError, match="longer than zero"):
        reconfigure(1, [own], timedelta())
    reconfigure(1, [own])
    for refused in (
        torch_resilient.rebuild,
        lambda: torch_resilient.agree(True),
        lambda: torch_resilient.elastic(print)(None),
        lambda: dist.new_group([0]),
        lambda: dist.group.WORLD.split_group([0]),
        lambda: dist.group.WORLD.merge_remote_group(member.store, 1, SHORT),
    ):
        with pytest.raises(torch_resilient.ConfigError, match=r"dist\._reconfigure"):
            refused()
    assert member.backend().name() == "resilient"
    return total()


def test_what_cannot_be_is_refused_and_uses_up_no_uuid(world):
    assert world.run(mistakes, 1) == [1.0]


def adds_time():
    """For what is started next, whichever members that has."""
    member = Member()
    handles = member.handles()
    member.backend().set_timeout(SHORT)
    if member.rank == 0:
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(minutes=1))
    for uuid in range(2):
        reconfigure(uuid, handles, timedelta(seconds=30))  # Not that of the operations.
        if member.rank == 1:
            tell("late")
            hear()
        total()
        tell("done")
    # What the other had sent before it gave up is enough for one operation that is begun before the
    # fence is here.
    total()


def test_what_is_added_to_the_timeout_outlives_a_reconfigure(world):
    ranks = world.start(adds_time, 2, env={"RESILIENT_TIMEOUT_POLICY": "strict"})
    assert ranks[1].told() == "late"
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(2.5)
    ranks[1].say("go")
    assert [rank.told() for rank in ranks] == ["done"] * 2
    assert ranks[1].told() == "late"
    assert "timeout of 1 s" in str(ranks[0].error())
    ranks[1].say("go")
    ranks[1].error()
    for rank in ranks:
        rank.wait()


def ordinary():
    dist.init_process_group("resilient")
    assert not dist._supports_reconfigure()
    with pytest.raises(RuntimeError, match="does not support"):
        dist._get_reconfigure_handle()
    dist.destroy_process_group()


def test_an_ordinary_group_says_that_it_has_none_of_it(world):
    world.run(ordinary, 1)


def again_and_again(times):
    member = Member()
    left = []
    for count in (3, times, 1):  # A new group each time, to which the uuids of before are fresh.
        handles = member.handles()
        for uuid in range(count):
            reconfigure(uuid, handles)
            assert total() == 3
        dist.destroy_process_group()
        left.append(descriptors_and_threads())
        member.begin()
    return left


def test_many_reconfigures_leave_nothing_behind(world):
    for left in world.run(again_and_again, 2, 20):
        assert left[1] == left[2] == left[0]
