"""What a program asks of NCCL: NcclOptions as pg_options, ProcessGroupNCCL.Options, memory of NCCL.

Goal: options reach NCCL for the group that they were given for, as long as it lives, and its
splits; ranks that differ all raise; what cannot be had is refused on the rank that asks. Method:
real ranks on the fake NCCL, which says what it was configured with. Values need no device.
"""

import os
import signal
import types
from datetime import timedelta

import fake_device
import pytest
import torch
import torch.distributed as dist
from rank_server import hear, tell
from tensors import joined, same
from test_cuda import LATER, NEEDS_FAKE, faked, fetched, libraries

import torch_resilient
from torch_resilient import _options

CLAIMED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
claimed = pytest.mark.skipif(not CLAIMED, reason="torch's own functions may split from 2.15 on")
UNSET = -(2**31)


def nccl_options(is_high_priority_stream=False, **config):
    """As ProcessGroupNCCL.Options, which not every build of torch has."""
    fields = {"blocking": UNSET, "split_share": UNSET, "max_ctas": UNSET, "net_name": None}
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**{**fields, **config}),
        is_high_priority_stream=is_high_priority_stream,
        split_from=None,
        split_color=-2,
        lazy_init=False,
    )


def test_options_say_what_they_have():
    options = torch_resilient.NcclOptions(
        is_high_priority_stream=True, max_ctas=16, net_name="Socket"
    )
    assert (options.is_high_priority_stream, options.max_ctas) == (True, 16)
    assert (options.net_name, options.min_ctas, options.comm_name) == ("Socket", None, None)
    assert repr(options) == "NcclOptions(is_high_priority_stream=1 max_ctas=16 net_name=Socket)"
    with pytest.raises(AttributeError):
        options.max_ctas = 4
    assert torch_resilient.NcclOptions().max_ctas is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_ctas": 0}, r"max_ctas=0: it is 1 to 64"),
        ({"min_ctas": 8, "max_ctas": 4}, r"min_ctas=8: it is more than max_ctas, 4"),
        ({"cta_policy": 2}, r"cta_policy=2: .*cannot be aborted"),
        ({"comm_name": "two words"}, r"comm_name=two words"),
    ],
)
def test_values_that_cannot_be_are_refused_at_once(fields, why):
    with pytest.raises(torch_resilient.ConfigError, match=rf"\[resilient:SETTING\].*{why}"):
        torch_resilient.NcclOptions(**fields)


def test_fields_and_types_that_are_none_are_type_errors():
    for fields in ({"max_cta": 4}, {"max_ctas": "four"}, {"max_ctas": 4.5}):
        with pytest.raises(TypeError):
            torch_resilient.NcclOptions(**fields)


def test_options_of_torch_are_taken_over():
    given = nccl_options(True, max_ctas=4, net_name="IB", blocking=0, split_share=0)
    taken = _options.taken(given, "resilient")
    assert repr(taken) == "NcclOptions(is_high_priority_stream=1 max_ctas=4 net_name=IB)"
    ours = torch_resilient.NcclOptions(max_ctas=2)
    assert _options.taken(ours, "cpu:gloo,cuda:resilient") is ours
    assert _options.taken(given, "cpu:resilient,cuda:nccl") is given  # That one's.
    assert _options.taken(None, "resilient") is None
    if not hasattr(dist, "ProcessGroupNCCL"):
        return
    real = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert repr(_options.taken(real, "resilient")) == "NcclOptions(is_high_priority_stream=1)"
    real.config.cga_cluster_size = 2
    real.config.max_ctas = 8
    real.config.net_name = "Socket"
    assert repr(_options.taken(real, "resilient")) == (
        "NcclOptions(is_high_priority_stream=1 cga_cluster_size=2 max_ctas=8 net_name=Socket)"
    )
    real.config.blocking = 1
    with pytest.raises(torch_resilient.ConfigError, match="blocking=1"):
        _options.taken(real, "resilient")


def test_options_of_torch_that_cannot_be_had_are_named():
    given = nccl_options(blocking=1, split_share=1, host_cft_mode=3)
    given.split_from, given.lazy_init = "a group", True
    with pytest.raises(torch_resilient.ConfigError) as caught:
        _options.taken(given, "resilient")
    text = str(caught.value)
    for part in ("blocking=1 (a communicator", "split_share=1 (each group", "host_cft_mode=3 (it"):
        assert part in text
    assert "split_from='a group' (each group" in text and "lazy_init=True (a group" in text
    assert "NcclOptions(...)" in text
    with pytest.raises(torch_resilient.ConfigError, match="max_ctas=99: it is 1 to 64"):
        _options.taken(nccl_options(max_ctas=99), "resilient")
    with pytest.raises(torch_resilient.ConfigError, match=r"take torch_resilient\.NcclOptions"):
        _options.taken({"max_ctas": 4}, "resilient")


def refused_at_init():
    with pytest.raises(torch_resilient.ConfigError, match="blocking=1"):
        dist.init_process_group("resilient", pg_options=nccl_options(blocking=1))
    assert not dist.is_initialized()
    dist.init_process_group("resilient", pg_options=nccl_options(max_ctas=4))
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options.max_ctas == 4
    with pytest.raises(torch_resilient.ConfigError, match="blocking=1"):
        dist.new_group([0], pg_options=nccl_options(blocking=1))
    group = dist.new_group([0], pg_options=torch_resilient.NcclOptions(min_ctas=2))
    assert group._get_backend(torch.device("cpu")).options.min_ctas == 2
    plain = dist.new_group([0])
    assert plain._get_backend(torch.device("cpu")).options.max_ctas is None
    split = dist.group.WORLD.split_group([0])
    assert split._get_backend(torch.device("cpu")).options.max_ctas == 4  # Its parent's.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # Nothing to memory of the host.
    dist.destroy_process_group()


def test_options_belong_to_their_group(world):
    world.run(refused_at_init, 1)


def taken_over():
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    dist.init_process_group("nccl", pg_options=options)
    cpu = torch.device("cpu")
    assert repr(dist.group.WORLD._get_backend(cpu).options) == (
        "NcclOptions(is_high_priority_stream=1 max_ctas=4)"
    )
    options.config.blocking = 1
    with pytest.raises(torch_resilient.ConfigError, match="blocking=1"):
        dist.new_group(backend="nccl", pg_options=options)
    fast = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    [group, *_] = dist.new_subgroups(1, pg_options=fast)
    assert group._get_backend(cpu).options.is_high_priority_stream
    split = dist.group.WORLD.split_group([0], opts=fast)  # A line on stderr says it.
    assert split._get_backend(cpu).options.max_ctas == 4  # Its parent's.
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch has no NCCL")
def test_a_program_for_nccl_is_taken_over_with_its_options(world):
    world.run(taken_over, 1, env={"RESILIENT_TAKE_OVER": "nccl"})


def asked(cuda):
    counts = cuda.counts()
    assert counts["misuse"] == [], counts
    return counts["configs"], counts["priorities"]


def summed(cuda, rank, size, group=None):
    tensor = cuda.tensor(torch.ones(3), device=rank)
    dist.all_reduce(tensor, group=group)
    same(fetched(cuda, tensor), torch.full((3,), float(size)))


def begun(**options):
    """(fake_cuda, rank, world size) of a rank of a world with these pg_options."""
    cuda = fake_device.load()
    options = torch_resilient.NcclOptions(**options)
    dist.init_process_group("resilient", timeout=timedelta(seconds=60), pg_options=options)
    rank = dist.get_rank()
    cuda.set_device(rank)
    return cuda, rank, dist.get_world_size()


def reach_nccl():
    cuda, rank, size = begun(max_ctas=16, net_name="Socket", is_high_priority_stream=True)
    of_world = "max_ctas=16 net_name=Socket"
    summed(cuda, rank, size)
    assert asked(cuda) == ([of_world], [-5])
    options = torch_resilient.NcclOptions(comm_name="fast", traffic_class=3)
    fast = dist.new_group(pg_options=options)
    plain = dist.new_group()
    for group in (fast, plain):
        summed(cuda, rank, size, group)
    configs = [of_world, "traffic_class=3 comm_name=fast", ""]
    assert asked(cuda) == (configs, [-5])
    if CLAIMED:
        for options in (None, torch_resilient.NcclOptions(nvls_ctas=2)):
            split = dist.split_group(fast, [list(range(size))], pg_options=options)
            summed(cuda, rank, size, split)
        configs += ["traffic_class=3 comm_name=fast", "nvls_ctas=2"]
        assert asked(cuda) == (configs, [-5])
    tell("ready")  # Who revokes must not end what others are still in.
    hear()
    if rank == 0:
        torch_resilient.ulfm.revoke("the test")
    with pytest.raises(torch_resilient.CommError):
        while True:
            dist.barrier()
    torch_resilient.rebuild()
    summed(cuda, rank, size)
    summed(cuda, rank, size, fast)
    assert asked(cuda) == ([*configs, *configs[:2]], [-5, -5])
    dist.destroy_process_group()


@NEEDS_FAKE
def test_options_reach_nccl_and_are_kept_over_a_rebuild(world):
    ranks = world.start(reach_nccl, 2, env=libraries())
    for rank in ranks:
        assert rank.told() == "ready"
    for rank in ranks:
        rank.say("go")
    for rank in ranks:
        rank.value()


def over_a_shrink():
    cuda, rank, size = begun(max_ctas=8)
    summed(cuda, rank, size)
    dist.barrier()
    tell("ready")
    if rank == 1:
        signal.pause()
    with pytest.raises(torch_resilient.RankLostError):
        while True:
            dist.barrier()
    torch_resilient.rebuild(mode="shrink")
    summed(cuda, rank, dist.get_world_size())
    assert asked(cuda) == (["max_ctas=8", "max_ctas=8"], [])
    dist.destroy_process_group()


@NEEDS_FAKE
def test_options_are_kept_over_a_shrink(world):
    ranks = world.start(over_a_shrink, 3, env=libraries())
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal()
    assert ranks[1].wait() == -signal.SIGKILL
    for rank in (ranks[0], ranks[2]):
        rank.value()


def different():
    cuda, rank, size = begun(max_ctas=16)
    summed(cuda, rank, size)
    group = dist.new_group(pg_options=torch_resilient.NcclOptions(max_ctas=8 * (rank + 1)))
    with pytest.raises(torch_resilient.ConfigError) as caught:
        tensor = cuda.tensor(torch.ones(3), device=rank)
        dist.all_reduce(tensor, group=group, async_op=True).wait(LATER)
    text = str(caught.value)
    assert "[resilient:SETTING]" in text and "different options of NCCL" in text
    assert "rank 0" in text and "max_ctas=8" in text and "rank 1" in text and "max_ctas=16" in text
    summed(cuda, rank, size)
    assert asked(cuda)[0] == ["max_ctas=16"]
    dist.destroy_process_group()


@NEEDS_FAKE
def test_different_options_are_raised_on_every_rank(world):
    world.run(different, 2, env=libraries())


def split_while_bound():
    """Each split has an init of its own, of its members alone, and an end of its own."""
    cuda = fake_device.load()
    rank = int(os.environ["RANK"])
    cuda.set_device(rank)
    # The fake has no properties. A UUID for each, as ranks that share a device are refused.
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        uuid=f"fake-{device}", name="fake"
    )
    device = torch.device("cuda", rank)
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    options = nccl_options(max_ctas=4)  # By habit.
    dist.init_process_group(
        "resilient", device_id=device, timeout=timedelta(seconds=60), pg_options=options
    )
    assert cuda.wait("communicators", 1)
    options = nccl_options(max_ctas=2)
    pair = dist.split_group(split_ranks=[[0, 1], [2, 3]], pg_options=options)
    assert pair.bound_device_id == device
    summed(cuda, rank, 2, pair)
    crossed = dist.split_group(split_ranks=[[3, 0]])
    configs = ["max_ctas=4", "max_ctas=2"]
    if rank in (0, 3):
        summed(cuda, rank, 2, crossed)
        configs.append("max_ctas=4")  # Its parent's.
    dist.destroy_process_group(pair)
    summed(cuda, rank, 4)
    assert asked(cuda)[0] == configs
    dist.barrier()
    dist.destroy_process_group()


@NEEDS_FAKE
@claimed
def test_a_group_that_is_bound_to_a_device_is_split(world):
    world.run(split_while_bound, 4, env=libraries())


def allocator():
    cuda, rank, size = faked()
    backend = dist.group.WORLD._get_backend(torch.device("cuda", rank))
    found = backend.mem_allocator
    assert isinstance(found, torch._C._cuda_CUDAAllocator)
    assert dist.new_group()._get_backend(torch.device("cpu")).mem_allocator is found
    assert not backend.supports_tensor_alloc(torch.device("cuda", rank))
    summed(cuda, rank, size)
    dist.destroy_process_group()


@NEEDS_FAKE
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")
def test_memory_of_nccl_is_what_a_pool_of_torch_takes(world):
    world.run(allocator, 2, env=libraries())


def no_allocator():
    joined()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with pytest.raises(torch_resilient.ConfigError, match=r"\[resilient:SETTING\]"):
        _ = backend.mem_allocator
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_without_nccl_the_memory_is_refused(world):
    world.run(no_allocator, 1, env={"RESILIENT_NCCL_LIBRARY": "/nowhere/libnccl.so.2"})
