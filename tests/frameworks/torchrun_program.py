"""Ranks under torchrun that add up together; on the way some of them kill themselves.

--deaths 1,0,1+store: who dies at each attempt, and whether the store's process dies with it.
--until FILE: goes on until that file exists; otherwise a few steps.
"""

import argparse
import os
import re
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 5


def say(line):  # One write: several writers share the file.
    os.write(1, f"{line}\n".encode())


def kill_the_store():
    import torch_resilient

    port = int(torch_resilient.status()["store"][0].rpartition(":")[2])
    listening = rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A (?:\S+ +){{5}}(\d+)"
    inode = re.search(listening, Path("/proc/net/tcp").read_text(), re.M)[1]
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == f"socket:[{inode}]":
                os.kill(int(link.parts[2]), signal.SIGKILL)
                return
        except FileNotFoundError:
            continue
    raise AssertionError(f"nobody listens at port {port}")


def die_if_due(deaths, attempt, rank):
    victim, _, store = deaths[attempt].partition("+")
    dist.barrier()  # All have printed before one dies.
    if rank == int(victim):
        if store:
            kill_the_store()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="resilient")
    parser.add_argument("--deaths", type=lambda text: text.split(","), default=[])
    parser.add_argument("--until", type=Path)
    args = parser.parse_args()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    say(f"attempt {attempt} world {size} rank {rank} pid {os.getpid()}")
    step = 0
    while True:
        stop = args.until.exists() if args.until else step == STEPS
        total = torch.tensor([1.0, float(stop)])
        dist.all_reduce(total)
        assert total[0] == size
        if total[1] > 0:
            break
        if attempt < len(args.deaths):
            die_if_due(args.deaths, attempt, rank)
        step += 1
        if args.until:
            time.sleep(0.02)  # Leaves the processor to those who are to come.
    say(f"end of attempt {attempt} world {size} rank {rank} pid {os.getpid()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
