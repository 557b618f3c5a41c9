"""Jobs whose store asks for a token: by resilient-run, by the ranks, and with a wrong one."""

import os
import subprocess
import sys

import harness
import pytest
from store_access import add_up, failing_init, plain_environment, serving, worker

import torch_resilient
from torch_resilient import _server

TOKEN = "a-token-of-the-tests-0123456789"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def guarded(token_file):
    """Address of a store that asks for the token."""
    with serving("--token-file", token_file) as address:
        yield address


@pytest.mark.parametrize("how", ["option", "environment"])
def test_resilient_run_hands_the_token_on(tmp_path, token_file, how):
    script = tmp_path / "worker.py"
    script.write_text(worker(_server.TOKEN_FILE))
    command = [sys.executable, "-m", "torch_resilient.run", "--nproc", "2"]
    environment = plain_environment()
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
