"""Goal: a rank that lives, and whose connection to the store the network has ended, is not judged
dead while its links stand. Method: one rank reaches the store through a proxy that cuts."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from proxy import Proxy
from rank_server import tell
from store_shell import until
from tensors import joined

import torch_resilient

TRAINS_FOR = 4.0  # Seconds; longer than the connection is away, shorter than a lease.
AWAY = 1.5


def trains():
    """Steps until rank 0 says that it is over: that its sums were right, and the generation."""
    rank, size = joined()
    tell("training")
    began = time.monotonic()
    later = began + AWAY
    goes_on = torch.ones(1)
    while goes_on.item():
        if rank == 0 and time.monotonic() > later:
            tell("later")
            later = math.inf
        total = torch.ones(1024)
        dist.all_reduce(total)
        assert total.eq(size).all()
        goes_on.fill_(time.monotonic() - began < TRAINS_FOR)
        dist.broadcast(goes_on, 0)
    return torch_resilient.membership()["generation"]


def test_a_rank_whose_connection_was_cut_goes_on(world):
    proxy = Proxy(world.store_address)
    try:
        through = {"RESILIENT_STORE": proxy.address}
        ranks = [world.start_rank(trains, n, 3, env=through if n == 1 else None) for n in range(3)]
        for rank in ranks:
            assert rank.told(30) == "training"
        proxy.cut()
        assert ranks[0].told(30) == "later"
        proxy.mend()
        assert [rank.value(30) for rank in ranks] == [1, 1, 1]
        assert "connected again" in ranks[1].stderr()
    finally:
        proxy.close()


def meets():
    _, size = joined()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    return torch_resilient.membership()["generation"]


def test_a_rank_whose_connection_was_cut_while_it_waits_in_its_init_goes_on(world):
    proxy = Proxy(world.store_address)
    env = {"RESILIENT_STORE": proxy.address, "RESILIENT_WAIT_LOG": "1s"}
    try:
        ranks = [world.start_rank(meets, n, 3, env=env if n == 1 else None) for n in range(2)]
        until(lambda: " has waited " in ranks[1].stderr(), "rank 1 waits in its init")
        proxy.cut()
        with pytest.raises(AssertionError, match="said nothing"):
            ranks[0].told(AWAY)
        proxy.mend()
        until(lambda: "connected again" in ranks[1].stderr(), "rank 1 is back")
        ranks.append(world.start_rank(meets, 2, 3))
        assert [rank.value(30) for rank in ranks] == [1, 1, 1]
    finally:
        proxy.close()
