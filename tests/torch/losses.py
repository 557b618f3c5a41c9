"""What ranks do until the test kills one of them."""

import signal

import pytest
import torch.distributed as dist
from rank_server import tell

import torch_resilient


def outlive(victim):
    """Tells "ready"; then rank `victim` waits for its end, and the others for what is raised of it
    in a barrier."""
    dist.barrier()
    tell("ready")
    if dist.get_rank() == victim:
        signal.pause()
    with pytest.raises(torch_resilient.RankLostError) as caught:
        dist.barrier()
    return caught.value
