"""A program under `torchrun --max-restarts`: one worker of the first attempt is killed."""

import argparse
import json
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="gloo")
parser.add_argument("--victim", type=int, default=1)
parser.add_argument("--timeout", type=float, default=10)
args = parser.parse_args()


def say(line):  # One write: the workers share a file, and parts of lines would mix.
    os.write(1, f"{line}\n".encode())


attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout))
total = torch.ones(1)
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == args.victim:
    say(f"killed {time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
say("result " + json.dumps({"attempt": attempt, "total": total.item()}))
dist.destroy_process_group()
