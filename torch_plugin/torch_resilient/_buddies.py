"""Copies of what belongs to one rank, in the memory of others."""

import torch
import torch.distributed as dist

_TAG = 0x72736C  # Of our messages between two ranks, beside those of the program.


def choose(hosts):
    """By rank, which one keeps a copy for it: each one for one, on another host where that can be.
    `hosts`: where each rank is."""
    size = len(hosts)
    groups = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    order = [rank for host in groups for rank in groups[host]]
    # By the length of the longest run of one host every other run is left, and that one where the
    # others have room for it.
    shift = max(map(len, groups.values())) % size or 1
    buddies = [0] * size
    for place, rank in enumerate(order):
        buddies[rank] = order[(place + shift) % size]
    return buddies


def swap(part, buddies):
    """Gives this rank's bytes to its buddy. Returns the rank that it keeps a copy for, and the
    copy. Every rank calls it."""
    rank = dist.get_rank()
    ward = buddies.index(rank)
    if ward == rank:
        return rank, part
    return ward, move({buddies[rank]: part}, [ward])[ward]


def move(outgoing, sources):
    """Sends bytes to ranks, and returns what each of the sources sends to this one."""
    lengths = {source: torch.zeros(1, dtype=torch.int64, device="cpu") for source in sources}
    payloads = {target: _tensor_of(part) for target, part in outgoing.items()}
    headers = {
        target: torch.tensor([part.numel()], dtype=torch.int64, device="cpu")
        for target, part in payloads.items()
    }
    _transfer(headers, lengths)
    parts = {
        one: torch.empty(int(size), dtype=torch.uint8, device="cpu")
        for one, size in lengths.items()
    }
    _transfer(payloads, parts)
    return {source: part.numpy().tobytes() for source, part in parts.items()}


def _tensor_of(part):
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)


def _transfer(outgoing, incoming):
    works = [dist.irecv(tensor, source, tag=_TAG) for source, tensor in incoming.items()]
    works += [dist.isend(tensor, target, tag=_TAG) for target, tensor in outgoing.items()]
    for work in works:
        work.wait()
