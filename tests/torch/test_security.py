"""Jobs whose store asks for a token: by resilient-run, by the ranks, and with a wrong one."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist

import torch_resilient
from torch_resilient import _server

TOKEN = "a-token-of-the-tests-0123456789"

WORKER = """
import os, subprocess, torch, torch.distributed as dist
from torch_resilient import _server
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    without = {k: v for k, v in os.environ.items() if k != "RESILIENT_TOKEN_FILE"}
    for environment in (os.environ, without):
        status = subprocess.run([_server.binary(), "status"], env=environment, capture_output=True)
        print("status", status.returncode)
dist.barrier()
dist.destroy_process_group()
print("total", int(total.item()))
"""


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return str(path)


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


@pytest.fixture
def guarded(token_file):
    """Address of a store that asks for the token."""
    command = [_server.binary(), "serve", "--listen", "127.0.0.1:0", "--token-file", token_file]
    process = subprocess.Popen(
        [*command, "--print-address", "--parent-death"], stdout=subprocess.PIPE, text=True
    )
    yield process.stdout.readline().split()[0]
    process.terminate()
    process.wait(10)
    process.stdout.close()


@pytest.mark.parametrize("how", ["option", "environment"])
def test_resilient_run_hands_the_token_on(tmp_path, token_file, how):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch_resilient.run", "--nproc", "2"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    if how == "option":
        command += ["--token-file", os.path.relpath(token_file)]
    else:
        environment[_server.TOKEN_FILE] = token_file
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 2") == 2
    assert "[0] status 0\n[0] status 1\n" in done.stdout
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_a_store_that_a_rank_starts_asks_for_the_token(world, token_file, bind):
    env = {
        "RESILIENT_STORE": None,
        "RESILIENT_JOB": None,
        "MASTER_PORT": str(harness.free_port()),
        "RESILIENT_LINGER": "1s",
        "RESILIENT_TOKEN_FILE": token_file,
        "RESILIENT_BIND": bind,
    }
    assert world.run(add_up, 3, env=env) == [3] * 3


@pytest.mark.parametrize(
    ("token", "text"), [("another-token-0123456789", "wrong token"), (None, "none was offered")]
)
def test_a_wrong_or_missing_token_fails_at_once(world, guarded, tmp_path, token, text):
    env = {"RESILIENT_STORE": guarded}
    if token:
        path = tmp_path / "other"
        path.write_text(token)
        env["RESILIENT_TOKEN_FILE"] = str(path)
    [(name, code, message, seconds)] = world.run(failing_init, 1, env=env)
    assert (name, code) == ("ConnectError", "AUTH"), message
    assert text in message and guarded in message and "RESILIENT_TOKEN_FILE" in message
    assert seconds < 5


def test_a_token_file_that_is_not_there_is_one_clear_line(world, guarded, tmp_path):
    env = {"RESILIENT_STORE": guarded, "RESILIENT_TOKEN_FILE": str(tmp_path / "none")}
    [(name, code, message, _)] = world.run(failing_init, 1, env=env)
    assert (name, code) == ("ConfigError", "SETTING"), message
    assert "No such file" in message


def test_a_store_object_takes_a_token_of_its_own(guarded, token_file):
    store = torch_resilient.Store(guarded, timeout=10, job="a store", token_file=token_file)
    store.set("key", "value")
    assert store.clone().get("key") == b"value"
    with pytest.raises(torch_resilient.ConnectError, match="AUTH"):
        torch_resilient.Store(guarded, timeout=10, job="a store")
