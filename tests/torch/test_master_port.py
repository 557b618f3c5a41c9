"""MASTER_PORT serves everybody: with plain variables our store is there, and whoever else expects
torch's TCPStore at that address (rpc, another backend's world, the debug server, a library) works
beside a world of ours, and beyond its end."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_starts import plain
from torch.distributed import rpc

PATIENCE = timedelta(seconds=30)


def add(other):
    return rpc.rpc_sync(other, torch.add, args=(torch.ones(2), dist.get_rank() + 1)).tolist()


def calls(method):
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=30, init_method=method)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    answer = add(f"w{(rank + 1) % size}")
    total = torch.ones(1)
    dist.all_reduce(total)
    rpc.shutdown()
    dist.destroy_process_group()
    return answer, total.item()


@pytest.mark.parametrize("spelled", ["env://", "tcp://localhost:{port}"])
def test_rpc(world, spelled):
    variables = plain()
    method = spelled.format(port=variables["MASTER_PORT"])
    values = world.run(calls, 3, method, env=variables)
    assert values == [([2.0 + rank] * 2, 3.0) for rank in range(3)]


def goes_on_without_the_world():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
    dist.destroy_process_group()
    total = rpc.rpc_sync(f"w{(rank + 1) % size}", torch.add, args=(torch.ones(1), rank)).item()
    rpc.shutdown()
    return total


def test_the_store_stays_for_what_goes_on_without_the_world(world):
    assert world.run(goes_on_without_the_world, 2, env=plain()) == [1.0, 2.0]


def other_backend():
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=PATIENCE))
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("other", store), rank, size, PATIENCE)
    total = torch.full((3,), float(rank))
    gloo.allreduce([total]).wait()
    dist.destroy_process_group()
    return total.tolist()


def test_a_world_of_another_backend(world):
    assert world.run(other_backend, 2, env=plain()) == [[1.0] * 3] * 2


def debugs():
    dist.init_process_group("resilient")
    from torch.distributed.debug._store import tcpstore_client

    store = tcpstore_client()
    store.set(f"rank{dist.get_rank()}", "here")
    store.wait([f"rank{other}" for other in range(dist.get_world_size())], PATIENCE)
    dist.barrier()
    dist.destroy_process_group()


def test_the_debug_server_finds_its_store(world):
    pytest.importorskip("torch.distributed.debug._store", reason="no debug server yet")
    world.run(debugs, 2, env=plain())


def no_store_for_strangers():
    dist.init_process_group("resilient")
    port = int(os.environ["MASTER_PORT"])
    try:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    except dist.DistError as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()
    return "let in"


def test_a_store_with_a_token_serves_none_of_them(world, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret-of-this-test-0123456789abcdef\n")
    token.chmod(0o600)
    variables = plain(RESILIENT_TOKEN_FILE=str(token))
    assert world.run(no_store_for_strangers, 1, env=variables) == ["DistNetworkError"]
