"""A rank whose device hangs in a kernel of the program's own, and the others that wait for it."""

import pytest
import torch
import torch.distributed as dist
from gpu_device import DEVICE, hang, joined
from rank_server import hear, tell

import torch_resilient

STALL = 5
BUDGET = 4
SETTINGS = {
    "RESILIENT_SEAT_WAIT": "60s",
    "RESILIENT_WAIT_LOG": "2s",
    "RESILIENT_DEVICE_STALL": f"{STALL}s",
    "RESILIENT_BUDGET": f"{BUDGET}s",
}
BLOCKED = 86  # Exit code of a process that a call into a driver keeps from ending.


def total(size):
    tensor = torch.ones(4, device=DEVICE)
    dist.all_reduce(tensor)
    return tensor.tolist() == [float(size)] * 4


def hangs(behind, waits):
    """Its kernel is ahead of all that it submits, or behind the first operation. Then its main
    thread waits for the device, or goes on to what it may do."""
    _, size = joined()
    assert total(size)
    tell("ready")
    hear()
    if behind:
        dist.all_reduce(torch.ones(4, device=DEVICE))
    hang(120)
    dist.all_reduce(torch.ones(4, device=DEVICE))
    tell("submitted")
    if waits:
        torch.cuda.synchronize()
    with pytest.raises(torch_resilient.DeviceError) as caught:
        while True:
            dist.barrier()
    assert caught.value.code == "DEVICE_STALLED" and caught.value.rank == dist.get_rank()
    with pytest.raises(torch_resilient.DeviceError):
        torch_resilient.rebuild()
    tell("heard")


def heals(behind):
    _, size = joined()
    assert total(size)
    tell("ready")
    hear()
    if behind:
        assert total(size)
    with pytest.raises(torch_resilient.DeviceError) as caught:
        total(size)
        dist.barrier()
    error = caught.value
    torch_resilient.rebuild()
    assert total(size)
    dist.destroy_process_group()
    return error.code, error.rank, str(error)


def replaces():
    _, size = joined()
    assert total(size)
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True], ids=["free", "synchronizes"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "between"])
def test_a_device_that_hangs_is_named_and_its_rank_replaced(quick_world, behind, waits):
    healed = quick_world.start_rank(heals, 0, 2, behind, env=SETTINGS)
    hung = quick_world.start_rank(hangs, 1, 2, behind, waits, env=SETTINGS)
    for rank in (healed, hung):
        assert rank.told(60) == "ready"
    for rank in (healed, hung):
        rank.say("go on")
    assert hung.told() == "submitted"
    if not waits:
        assert hung.told(STALL + 10) == "heard"
    # The driver waits at exit for the kernel, or the main thread did before.
    assert hung.wait(STALL + 2 * BUDGET + 20) == BLOCKED
    newcomer = quick_world.start_rank(replaces, 1, 2, env=SETTINGS)
    code, rank, text = healed.value(60)
    newcomer.value(60)
    assert (code, rank) == ("DEVICE_STALLED", 1), text
    assert "hangs: it has begun and finished nothing for" in text and "GPU 0" in text
    assert "has submitted it, and its device has not begun it: GPU 0" in healed.stderr()
