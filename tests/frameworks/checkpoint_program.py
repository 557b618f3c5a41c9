"""Checkpoints written by a helper process of each rank, which opens a Gloo world of its own."""

import argparse

import program
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--folder", required=True)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {"whole": torch.full((4,), 2.0), f"of {rank}": torch.full((3,), float(rank))}
    for number in range(2):
        saving = dcp.async_save(
            state,
            checkpoint_id=f"{args.folder}/{number}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        total = torch.ones(1)
        dist.all_reduce(total)  # Training goes on meanwhile.
        assert total.item() == size
        saving.result()
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(loaded, checkpoint_id=f"{args.folder}/{number}")
        assert all(torch.equal(state[name], loaded[name]) for name in state)
    program.tell("backend", dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":  # The helper imports this file.
    main()
