"""Jobs whose store speaks TLS: by resilient-run, by the ranks, by a Store, and with mistakes. The
certificates are made as docs/operations.md says."""

import os
import subprocess
import sys

import harness
import pytest
from make_certificates import make_ca, make_certificate
from store_access import add_up, failing_init, plain_environment, serving, worker

import torch_resilient
from torch_resilient import _server


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """The settings of a job whose store asks for certificates."""
    folder = tmp_path_factory.mktemp("tls") / "secrets"
    make_ca(folder)
    make_certificate(folder)
    return {
        "RESILIENT_TLS_CERT": str(folder / "tls.crt"),
        "RESILIENT_TLS_KEY": str(folder / "tls.key"),
        "RESILIENT_TLS_CA": str(folder / "ca.pem"),
    }


@pytest.fixture
def encrypted(secrets):
    """Address of a store with TLS that asks for certificates."""
    with serving(env=secrets) as address:
        yield address


def test_ranks_of_an_encrypted_store(world, encrypted, secrets):
    assert world.run(add_up, 2, env=secrets | {"RESILIENT_STORE": encrypted}) == [2] * 2


def test_resilient_run_and_its_store_use_the_files(tmp_path, secrets):
    script = tmp_path / "worker.py"
    script.write_text(worker("RESILIENT_TLS_"))
    environment = plain_environment()
    environment |= {name: os.path.relpath(path) for name, path in secrets.items()}
    command = [sys.executable, "-m", "torch_resilient.run", "--nproc", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 2") == 2
    assert "[0] status 0\n[0] status 1\n" in done.stdout


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_a_store_that_a_rank_starts_speaks_tls(world, secrets, bind):
    env = secrets | {
        "RESILIENT_STORE": None,
        "RESILIENT_JOB": None,
        "MASTER_PORT": str(harness.free_port()),
        "RESILIENT_LINGER": "1s",
        "RESILIENT_BIND": bind,
    }
    assert world.run(add_up, 3, env=env) == [3] * 3


def test_each_mistake_fails_at_once_with_its_own_text(world, encrypted, store, secrets, tmp_path):
    make_ca(tmp_path / "other")
    ca = {"RESILIENT_TLS_CA": secrets["RESILIENT_TLS_CA"]}
    cases = [
        (encrypted, {}, "AUTH", "speaks TLS only"),
        (encrypted, ca, "AUTH", "set RESILIENT_TLS_CERT and RESILIENT_TLS_KEY"),
        (
            encrypted,
            secrets | {"RESILIENT_TLS_CA": str(tmp_path / "other" / "ca.pem")},
            "AUTH",
            "vouches for its certificate",
        ),
        (store, ca, "PROTOCOL", "speaks the plain store protocol"),
    ]
    for address, files, expected, text in cases:
        env = files | {"RESILIENT_STORE": address}
        [(name, code, message, seconds)] = world.run(failing_init, 1, env=env)
        assert (name, code) == ("ConnectError", expected), message
        assert text in message and address in message
        assert seconds < 5


def test_files_that_cannot_be_used_are_one_clear_line(world, encrypted, secrets):
    env = {"RESILIENT_STORE": encrypted, "RESILIENT_TLS_CA": secrets["RESILIENT_TLS_KEY"]}
    [(name, code, message, _)] = world.run(failing_init, 1, env=env)
    assert (name, code) == ("ConfigError", "SETTING"), message
    assert "holds no certificate of a CA" in message


def test_a_store_object_takes_files_of_its_own(encrypted, secrets):
    files = tuple(secrets[name] for name in _server.TLS_FILES)
    store = torch_resilient.Store(encrypted, timeout=10, job="a store", tls=files)
    store.set("key", "value")
    assert store.clone().get("key") == b"value"
    with pytest.raises(torch_resilient.ConnectError, match="AUTH"):
        torch_resilient.Store(encrypted, timeout=10, job="a store")
