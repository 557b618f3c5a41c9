"""Two ranks on one GPU: refused by name as they are, served over the host's memory where asked."""

import gpu_device
import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE
from test_gpu_collectives import everything
from test_gpu_faults import REPLACED, replaces, survives

import torch_resilient

# The fake has no driver that could tell the UUID of its device.
SAME = {"RESILIENT_FAKE_DEVICES": "here|GPU-1|0|1;here|GPU-1|0|1"} if gpu_device.FAKE else {}
STAGED = {"RESILIENT_ALLOW_SHARED_GPU": "1", **SAME}


@pytest.fixture
def plain_world(world):
    """Without what NCCL needs to take two ranks on a GPU."""
    world.shared = False
    return world


def refused(at_init):
    gpu_device.load()
    bound = {"device_id": DEVICE} if at_init else {}
    with pytest.raises(torch_resilient.ConfigError) as caught:
        dist.init_process_group("resilient", timeout=gpu_device.TIMEOUT, **bound)
        dist.all_reduce(torch.ones(4, device=DEVICE))
        dist.barrier()
    assert caught.value.code == "DUPLICATE_DEVICE"
    return str(caught.value)


@pytest.mark.parametrize("at_init", [False, True])
def test_two_ranks_on_a_gpu_are_refused_by_name(plain_world, at_init):
    texts = plain_world.run(refused, 2, at_init, env=SAME)
    assert texts[0] == texts[1]
    assert "ranks 0, 1" in texts[0] and "RESILIENT_ALLOW_SHARED_GPU" in texts[0]


def test_what_comes_out_over_the_memory_of_the_host_is_right(plain_world):
    plain_world.run(everything, 2, env=STAGED, seconds=80)


def test_a_killed_rank_over_the_memory_of_the_host_is_replaced(plain_world, figures):
    env = {**REPLACED, **STAGED}
    ranks = plain_world.start(survives, 2, 1, env=env)
    for rank in ranks:
        assert rank.told(60) == "ready"
    _, killed = ranks[1].signal()
    ranks[1].wait()
    newcomer = plain_world.start_rank(replaces, 1, 2, env=env)
    known, rebuilt = ranks[0].value(60)
    newcomer.value(60)
    figures("kill, host-staged: known after s", round(known - killed, 4))
    figures("kill, host-staged: rebuilt in s", round(rebuilt, 3))
