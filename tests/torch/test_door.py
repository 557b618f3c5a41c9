"""Wrong at the door: what is wrong with the start of a job is an error on every rank, at once where
waiting cannot help, with each cause told apart and the fix in the text."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from losses import outlive
from rank_server import hear, tell

import torch_resilient
from torch_resilient import _devices, _native

VERDICT_SECONDS = 3.0
PATIENCE = 150.0  # For processes that import torch on a busy machine.
PLAIN = {"RESILIENT_STORE": None, "RESILIENT_JOB": None, "RESILIENT_LINGER": "1s"}


def knock(timeout=60):
    """Init and one sum, or what init raised; with the times before and after init."""
    started = time.monotonic()
    try:
        dist.init_process_group("resilient", timeout=timedelta(seconds=timeout))
    except torch_resilient.ResilientError as error:
        return type(error).__name__, error.code, str(error), started, time.monotonic()
    joined = time.monotonic()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return "sum", "", str(int(total.item())), started, joined


def join_and_wait():
    dist.init_process_group("resilient")
    tell("in")
    hear()
    dist.destroy_process_group()


# ---- Two ranks on one GPU ----


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_on_one_gpu_are_refused_on_every_rank(world, size):
    devices = ";".join(["colab|GPU-6f|0|1"] * size)
    outcomes = world.run(knock, size, env={"RESILIENT_FAKE_DEVICES": devices})
    assert {outcome[:2] for outcome in outcomes} == {("ConfigError", "DUPLICATE_DEVICE")}
    assert len({outcome[2] for outcome in outcomes}) == 1
    text = outcomes[0][2]
    ranks = ", ".join(map(str, range(size)))
    assert text.startswith(f"[resilient:DUPLICATE_DEVICE] ranks {ranks} on host colab "), text
    assert f"GPU 0 (UUID GPU-6f): {size} processes, 1 visible GPU; LOCAL_RANK {ranks}" in text
    assert "torchrun --nproc_per_node=1" in text
    last_start = max(outcome[3] for outcome in outcomes)
    assert max(outcome[4] for outcome in outcomes) - last_start < VERDICT_SECONDS


def test_a_device_that_nobody_has_chosen_is_told_so(world):
    env = {"RESILIENT_FAKE_DEVICES": "a|GPU-1|0|2;a|GPU-1|0|2", "CUDA_VISIBLE_DEVICES": "4,5"}
    for _, code, text, *_ in world.run(knock, 2, env=env):
        assert code == "DUPLICATE_DEVICE"
        assert (
            "rank 1 has LOCAL_RANK=1 but its device is cuda:0: call torch.cuda.set_device" in text
        )
        assert "CUDA_VISIBLE_DEVICES 4,5" in text


@pytest.mark.parametrize(
    ("devices", "env"),
    [
        ("a|GPU-1|0|2;a|GPU-2|1|2", {}),
        ("a|GPU-1|0|1;b|GPU-1|0|1", {}),
        ("a|MIG-1|0|1;a|MIG-2|0|1", {}),
        ("a|GPU-1|0|1;a|GPU-1|0|1", {"RESILIENT_ALLOW_SHARED_GPU": "1"}),
        ("a|GPU-1|0|1;a||-1|1", {}),
    ],
    ids=["one each", "two hosts", "halves", "shared as asked", "one unknown"],
)
def test_legal_layouts_work(world, devices, env):
    outcomes = world.run(knock, 2, env={"RESILIENT_FAKE_DEVICES": devices, **env})
    assert [outcome[2] for outcome in outcomes] == ["2", "2"]


def refused_then_right():
    assert knock()[1] == "DUPLICATE_DEVICE"
    os.environ["RESILIENT_FAKE_DEVICES"] = "a|GPU-1|0|2;a|GPU-2|1|2"
    return knock()[2]


def test_a_refused_process_can_init_again_on_the_right_device(world):
    env = {"RESILIENT_FAKE_DEVICES": "a|GPU-1|0|2;a|GPU-1|0|2"}
    assert world.run(refused_then_right, 2, env=env) == ["2", "2"]


@pytest.mark.parametrize(("gpus", "warned"), [(1, True), (2, False), (0, False)])
def test_more_ranks_than_gpus_are_a_warning_where_the_devices_are_not_known(world, gpus, warned):
    devices = f"a||-1|{gpus};a||-1|{gpus}"
    ranks = world.start(knock, 2, env={"RESILIENT_FAKE_DEVICES": devices})
    assert [rank.value()[2] for rank in ranks] == ["2", "2"]
    text = f"has 2 ranks and {gpus} GPU: should they use CUDA, start no more than {gpus} there"
    assert [text in rank.stderr() for rank in ranks] == [warned, False]


def cuda(monkeypatch, memory=(), current=0):
    """A CUDA that is in use: bytes that torch holds on each device."""
    fake = SimpleNamespace(
        is_initialized=lambda: bool(memory),
        device_count=lambda: len(memory),
        memory_reserved=lambda device: memory[device],
        current_device=lambda: current,
        get_device_properties=lambda device: SimpleNamespace(
            uuid=f"{device}-digits", name="H100" if current else "H100 MIG 1g.10gb"
        ),
    )
    monkeypatch.setattr(torch, "cuda", fake)


@pytest.mark.parametrize(
    ("device_id", "memory", "current", "ordinal"),
    [
        (torch.device("cuda", 1), (), 0, 1),
        (2, (), 0, 2),
        (torch.device("cpu"), (1, 0), 0, -1),
        (None, (), 0, -1),
        (None, (0, 0), 0, -1),  # Asked something, and chose no device.
        (None, (0, 0), 1, 1),
        (None, (8, 0), 0, 0),
        (None, (0, 8), 0, 1),
        (None, (8, 8), 0, -1),
    ],
)
def test_the_device_is_known_by_device_id_or_by_its_use(
    monkeypatch, device_id, memory, current, ordinal
):
    cuda(monkeypatch, memory, current)
    assert _devices._ordinal(device_id) == ordinal


def test_cuda_in_use_tells_the_uuid_of_what_is_not_split(monkeypatch):
    settings = {"fake_devices": []}
    native = SimpleNamespace(
        find_device=lambda ordinal, _: SimpleNamespace(
            uuid="by NVML", ordinal=ordinal, visible=8, visible_devices="x" * 999
        )
    )
    cuda(monkeypatch, (0, 8), 1)
    claim = _devices.claim_of(native, settings, 0, None, {})
    assert (claim.uuid, claim.ordinal, claim.visible) == ("GPU-1-digits", 1, 2)
    assert len(claim.visible_devices) < 256
    cuda(monkeypatch, (8, 0), 0)
    assert _devices.claim_of(native, settings, 0, None, {}).uuid == "by NVML"


# ---- Two jobs, wrong sizes ----


def test_a_second_job_on_the_port_of_the_first(world):
    env = {**PLAIN, "MASTER_PORT": str(harness.free_port())}
    first = world.start(join_and_wait, 2, env=env)
    for rank in first:
        assert rank.told() == "in"
    second = world.start(knock, 2, env=env)
    for rank in second:
        name, code, text, started, ended = rank.value()
        assert (name, code) == ("ConfigError", "DUPLICATE_RANK"), text
        assert f"pid {rank.pid}" in text and "RESILIENT_JOB" in text and "MASTER_PORT" in text
        assert any(f"pid {other.pid}" in text for other in first), text
        assert ended - started < VERDICT_SECONDS
    for rank in first:
        rank.say("go")
        rank.value()


def test_worlds_of_two_sizes_are_both_named(world):
    first = world.start_rank(knock, 0, 3, 30)
    second = world.start_rank(knock, 1, 2, 30)
    # Who comes second is told at once; the first goes on waiting for ranks of its own size.
    deadline = time.monotonic() + 20
    while (told := first.outcome(0.2) or second.outcome(0.2)) is None:
        assert time.monotonic() < deadline
    waits = second if first.outcome(0) else first
    name, code, text, _, _ = told[1]
    assert (name, code) == ("ConfigError", "WORLD_SIZE"), text
    assert f"pid {first.pid}" in text and f"pid {second.pid}" in text
    assert "2 and 3" in text or "3 and 2" in text
    waits.signal()  # The other one ends by itself.
    for rank in (first, second):
        rank.wait()


# ---- No store at the address ----


@contextlib.contextmanager
def web_server():
    """Answers whatever comes as one that speaks HTTP; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                    connection.recv(1 << 16)

    thread = threading.Thread(target=serve, name="web server")
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


def test_another_service_on_the_master_port(world):
    with web_server() as port:
        env = {**PLAIN, "MASTER_PORT": str(port)}
        for name, code, text, started, ended in world.run(knock, 2, env=env):
            assert (name, code) == ("ConnectError", "PROTOCOL"), text
            assert f":{port}" in text and "HTTP" in text
            assert ended - started < 5


KNOCK = """
import datetime, sys, torch.distributed as dist
try:
    dist.init_process_group("resilient", timeout=datetime.timedelta(seconds=12))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def alone():
    """Prefix of a command that runs where there is no network but the loopback."""
    if why := hosts.refusal():
        pytest.skip(f"no network namespaces here: {why}")
    return [*hosts.UNSHARE, "--mount", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh"]


@pytest.mark.slow
def test_what_keeps_a_rank_from_its_store_is_told_apart_and_logged_meanwhile(world, alone):
    """Each waits until its timeout, as each may end by itself; after 10 s it says what it is."""
    causes = {
        "REFUSED": (1, {"RESILIENT_STORE": "127.0.0.1:9"}, "nothing listens there"),
        "UNREACHABLE": (1, {**PLAIN, "MASTER_ADDR": "192.0.2.1"}, "cannot be reached"),
        "RESOLVE": (1, {**PLAIN, "MASTER_ADDR": "no-such-host.invalid"}, "does not resolve"),
        "RESOLVE of rank 0": (0, {**PLAIN, "MASTER_ADDR": "none.invalid"}, "does not resolve"),
    }
    running = {}
    for name, (rank, env, _) in causes.items():
        environment = world.environment(rank, 2, {"MASTER_PORT": "29500", **env})
        command = [*alone, sys.executable, "-c", KNOCK]
        pipe = subprocess.PIPE
        running[name] = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True
        )
    for name, process in running.items():
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert stdout.startswith(f"ConnectError [resilient:{name.split()[0]}]"), (stdout, stderr)
        for text in (stdout, stderr):
            assert causes[name][2] in text, (name, stdout, stderr)


IPV6_WORKER = """
import torch, torch.distributed as dist
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total.item()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["only-six", "::1"])
def test_a_name_that_has_only_an_ipv6_address(world, alone, tmp_path, name):
    table = tmp_path / "hosts"
    table.write_text("::1 only-six\n")
    # Both ranks in one namespace, where the name is known.
    script = 'mount --bind "$1" /etc/hosts; shift; RANK=1 "$@" & "$@"; wait $!'
    env = world.environment(
        0, 2, {**PLAIN, "MASTER_ADDR": name, "MASTER_PORT": str(harness.free_port())}
    )
    command = [*alone, shutil.which("sh"), "-ec", script, "sh", str(table)]
    done = subprocess.run(
        [*command, sys.executable, "-c", IPV6_WORKER],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and done.stdout == "total 2\ntotal 2\n", done


# ---- The binary, and who is no claimant ----


def test_the_binary_of_another_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1+cpu")
    with pytest.raises(torch_resilient.ConfigError) as caught:
        _native.load.__wrapped__()
    assert caught.value.code == "TORCH_VERSION"
    assert "2.3.1" in str(caught.value) and "pip install" in str(caught.value)


def test_a_binary_that_does_not_load_is_told_with_the_fix(monkeypatch):
    monkeypatch.delattr(torch_resilient, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "torch_resilient._C", None)
    with pytest.raises(torch_resilient.ConfigError) as caught:
        _native.load.__wrapped__()
    assert caught.value.code == "TORCH_VERSION"
    assert "pip install" in str(caught.value)


HELPER = """
import torch, torch.distributed as dist, torch_resilient
dist.init_process_group("resilient", rank=0, world_size=1)
total = torch.ones(1)
dist.all_reduce(total)
print(int(total.item()))
dist.destroy_process_group()
"""


def starts_helpers():
    """A data loader's worker, and a checkpoint writer with a world of its own: both find RANK."""
    dist.init_process_group("resilient")
    run = [subprocess.Popen([sys.executable, "-c", "import torch, torch_resilient"])]
    run.append(subprocess.Popen([sys.executable, "-c", HELPER], stdout=subprocess.PIPE, text=True))
    assert run[1].communicate(timeout=PATIENCE)[0] == "1\n"
    assert [process.wait(PATIENCE) for process in run] == [0, 0]
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


def test_helpers_that_inherit_the_rank_claim_nothing(world):
    env = {"RESILIENT_FAKE_DEVICES": "a|GPU-1|0|2;a|GPU-2|1|2"}
    assert world.run(starts_helpers, 2, env=env, seconds=PATIENCE) == [2, 2]


def survives():
    dist.init_process_group("resilient")
    outlive(1)
    torch_resilient.rebuild()
    dist.barrier()
    dist.destroy_process_group()


def comes_anew():
    dist.init_process_group("resilient")
    dist.barrier()
    dist.destroy_process_group()
    return True


@pytest.mark.slow
def test_a_restarted_worker_is_no_duplicate_of_a_stuck_one_on_its_gpu(world):
    """The predecessor is stopped, not dead: its claims end with its lease."""
    env = {
        "RESILIENT_SEAT_WAIT": "30s",
        "RESILIENT_FAKE_DEVICES": "a|GPU-1|0|2;a|GPU-2|1|2",
    }
    ranks = world.start(survives, 2, env=env)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[1].signal(signal.SIGSTOP)
    newcomer = world.start_rank(comes_anew, 1, 2, env=env)
    assert newcomer.value(30)
    ranks[0].value()
    ranks[1].signal()
    ranks[1].wait()
