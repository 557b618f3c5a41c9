"""Jobs whose store asks for a token: by resilient-run, by the ranks, and with a wrong one."""

import os
import subprocess
import sys
import tempfile

import harness
import pytest
import torch.distributed as dist
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


NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def try_as_another_user(address):
    """What becomes of a key that another user of this host sets."""
    os.seteuid(NOBODY)
    try:
        torch_resilient.Store(address, timeout=20, job="theirs").set("key", "value")
        return "admitted"
    except torch_resilient.ConnectError as error:
        return f"{error.code}: {error}"
    finally:
        os.seteuid(0)


def try_at_own_store():
    dist.init_process_group("resilient")
    tried = try_as_another_user(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    dist.barrier()
    dist.destroy_process_group()
    return tried


def assert_refused(tried):
    assert tried.startswith("AUTH"), tried
    assert f"user {NOBODY}" in tried and _server.TOKEN_FILE in tried


@only_root
def test_a_store_that_a_rank_starts_refuses_other_users(world):
    env = {
        "RESILIENT_STORE": None,
        "RESILIENT_JOB": None,
        "MASTER_PORT": str(harness.free_port()),
        "RESILIENT_LINGER": "1s",
    }
    for tried in world.run(try_at_own_store, 2, env=env):
        assert_refused(tried)


@only_root
@pytest.mark.parametrize("token", [False, True])
def test_the_store_of_resilient_run_refuses_other_users_without_a_token(tmp_path, token):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nsys.path.append({os.path.dirname(__file__)!r})\nimport test_security\n"
        "print('tried', test_security.try_as_another_user(os.environ['RESILIENT_STORE']))\n"
    )
    environment = plain_environment()
    with tempfile.TemporaryDirectory() as folder:  # The other user can come to it.
        if token:
            os.chmod(folder, 0o755)
            environment[_server.TOKEN_FILE] = os.path.join(folder, "token")
            with open(environment[_server.TOKEN_FILE], "w") as file:
                file.write(TOKEN)
        done = subprocess.run(
            [sys.executable, "-m", "torch_resilient.run", "--nproc", "1", str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    tried = done.stdout.split("tried ", 1)[1].strip()
    if token:
        assert tried == "admitted"
    else:
        assert_refused(tried)
