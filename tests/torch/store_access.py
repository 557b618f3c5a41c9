"""What the tests of who may use a store share: a store, and ranks that are admitted or refused."""

import contextlib
import os
import subprocess
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_resilient import _server

_WORKER = """
import os, subprocess, torch, torch.distributed as dist
from torch_resilient import _server
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    without = {k: v for k, v in os.environ.items() if not k.startswith("@")}
    for environment in (os.environ, without):
        status = subprocess.run([_server.binary(), "status"], env=environment, capture_output=True)
        print("status", status.returncode)
dist.barrier()
dist.destroy_process_group()
print("total", int(total.item()))
"""


def worker(secrets):
    """A script for resilient-run. Rank 0 asks for the status, then again without the settings whose
    names begin with `secrets`, and prints the exit codes."""
    return _WORKER.replace("@", secrets)


def plain_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}


@contextlib.contextmanager
def serving(*flags, env=None):
    """Address of a `resilient-store serve`."""
    command = [_server.binary(), "serve", "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(
        [*command, "--print-address", "--parent-death"],
        env=plain_environment() | (env or {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def add_up():
    dist.init_process_group("resilient")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


def failing_init():
    started = time.monotonic()
    try:
        dist.init_process_group("resilient", timeout=timedelta(seconds=20))
    except Exception as error:
        return type(error).__name__, error.code, str(error), time.monotonic() - started
    return None
