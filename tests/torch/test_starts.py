"""Starts that other backends take: numbers with blanks, addresses that each host spells in its own
way, stores that the program hands in, threads, signals and systems that refuse calls. Method: ranks
as real processes with plain variables; where a launcher or a host matters, those too."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import harness
import hosts
import pytest
import torch
import torch.distributed as dist
from launching import launch, line_with, run, shell

from torch_resilient import _address, _names, _presence, _reach, _worlds

SECONDS = 60


def plain(port=None, **extra):
    """What a rank is started with; the store is its own, and ends with it."""
    own = {"RESILIENT_STORE": None, "RESILIENT_JOB": None, "RESILIENT_LINGER": "1s"}
    return {**own, "MASTER_PORT": str(port or harness.free_port()), **extra}


def add_up(**arguments):
    dist.init_process_group("resilient", **{"timeout": timedelta(seconds=30), **arguments})
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total.item())


def trains(arguments=None):
    """(the sum, where the store is, the job's name there)"""
    total = add_up(**(arguments or {}))
    world = _worlds.registry.current()
    dist.destroy_process_group()
    return total, world.addresses[0], world.job


def refused(arguments=None):
    """(type, text, seconds)"""
    began = time.monotonic()
    try:
        dist.init_process_group("resilient", **(arguments or {}))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def values(ranks):
    return [rank.value(SECONDS) for rank in ranks]


# ---- numbers


def test_blanks_around_numbers_count_for_nothing(world):
    port = harness.free_port()
    ranks = []
    for rank in range(2):
        blank = {"RANK": f" {rank}\n", "WORLD_SIZE": "2\t", "LOCAL_RANK": f"{rank} "}
        blank["RESILIENT_LINGER"] = " 1s\n"
        env = {**plain(f" {port}\n", LOCAL_WORLD_SIZE=" 2"), **blank}
        ranks.append(world.start_rank(trains, rank, 2, env=env))
    assert [total for total, *_ in values(ranks)] == [2, 2]


@pytest.mark.parametrize("text", ["4", " 4", "4\n", "\t4\r\n", "+4", "04"])
def test_a_number_is_what_int_makes_of_it(text):
    assert _names.number(text) == 4


@pytest.mark.parametrize("text", [None, "", " ", "x", "4 5", "0x4", "4.0"])
def test_what_is_no_number_is_none(text):
    assert _names.number(text) is None


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("MASTER_ADDR", "127.0.0.1\n", "MASTER_ADDR='127.0.0.1\\n' has a blank or an end of line"),
        ("MASTER_ADDR", "node 0", "MASTER_ADDR='node 0' has a blank"),
        ("MASTER_PORT", "65536", "MASTER_PORT='65536' is not a port"),
        ("MASTER_PORT", "x", "MASTER_PORT='x' is not a port"),
        ("MASTER_PORT", "", "MASTER_PORT is not set"),
        ("MASTER_PORT", "0", "port 0 of '127.0.0.1' is another one for each rank"),
        ("RANK", "1 2", "RANK='1 2' is not a number"),
    ],
)
def test_what_no_rank_can_use_is_told_at_once(world, variable, value, text):
    ranks = world.start(refused, 2, env={**plain(), variable: value})
    for kind, told, seconds in values(ranks):
        assert kind == "ConfigError" and "[resilient:SETTING]" in told and text in told
        assert seconds < 10


@pytest.mark.parametrize("arguments", [None, {"init_method": "tcp://localhost:0"}])
def test_port_0_is_one_of_the_kernels_choice_for_a_world_of_one(world, arguments):
    arguments = arguments and {**arguments, "rank": 0, "world_size": 1}
    [(total, address, _)] = world.run(trains, 1, arguments, env=plain("0"))
    assert total == 1 and not address.endswith(":0")


@pytest.mark.parametrize("timeout", [60, 1.5, 0, "60"])
def test_a_timeout_that_is_no_timedelta_is_a_type_error(world, timeout):
    [(kind, text, _)] = world.run(refused, 1, {"timeout": timeout}, env=plain())
    assert kind == "TypeError"
    assert f"timeout={timeout!r}" in text and "timedelta(seconds=60)" in text


# ---- what leads to the store


def test_a_file_in_a_folder_that_is_not_there_is_told_at_once(world, tmp_path):
    arguments = {"init_method": f"file://{tmp_path}/nowhere/file"}
    ranks = world.start(refused, 2, arguments, env=plain())
    for kind, text, seconds in values(ranks):
        assert kind == "ConfigError" and f"there is no folder '{tmp_path}/nowhere'" in text
        assert seconds < 10


def test_a_file_may_say_rank_and_size(world, tmp_path):
    ranks = [
        world.start_rank(
            trains,
            rank,
            2,
            {"init_method": f"file://{tmp_path}/file?rank={rank}&world_size=2"},
            env=plain(RANK=None, WORLD_SIZE=None),
        )
        for rank in range(2)
    ]
    assert [total for total, *_ in values(ranks)] == [2, 2]


def hands_in_a_file(path):
    rank = int(os.environ["RANK"])
    add_up(store=dist.FileStore(path, 2), rank=rank, world_size=2)
    dist.barrier()
    within = os.path.exists(path)
    dist.barrier()
    dist.destroy_process_group()
    return within


def test_a_store_that_was_handed_in_lives_as_long_as_its_world(world, tmp_path):
    """FileStore removes its file when all ranks have let go of it."""
    path = tmp_path / "store"
    assert world.run(hands_in_a_file, 2, str(path), env=plain()) == [True, True]
    assert not path.exists()


def test_torchruns_own_endpoint_may_be_spelled_otherwise(world):
    port = harness.free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    env = plain(port, TORCHELASTIC_USE_AGENT_STORE="True")
    ranks = world.start(trains, 2, {"init_method": f"tcp://localhost:{port}"}, env=env)
    assert [total for total, *_ in values(ranks)] == [2, 2]
    del agent


# ---- addresses


@pytest.mark.parametrize(
    "spelled",
    [("localhost", "127.0.0.1"), ("LocalHost", "localhost"), ("0.0.0.0", "localhost")],
)
def test_ranks_may_spell_one_address_in_several_ways(world, spelled):
    port = harness.free_port()
    ranks = [
        world.start_rank(trains, rank, 2, env=plain(port, MASTER_ADDR=host))
        for rank, host in enumerate(spelled)
    ]
    for total, address, job in values(ranks):
        assert (total, job) == (2, f"port-{port}")
        assert address.rpartition(":")[0] in ("127.0.0.1", "localhost")  # And no further.


def test_steps_of_slurm_do_not_part_ranks_that_are_not_its_own(world):
    port = harness.free_port()
    slurm = [{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}, {}]
    ranks = [world.start_rank(trains, rank, 2, env=plain(port, **slurm[rank])) for rank in range(2)]
    assert [total for total, *_ in values(ranks)] == [2, 2]


def test_ranks_of_one_job_with_two_names_are_told(world):
    """Row 12a: each hears of the other's job; the log within 5 s, the error at the timeout."""
    port = harness.free_port()
    brief = {"timeout": timedelta(seconds=6)}
    ranks = [
        world.start_rank(refused, rank, 2, brief, env=plain(port, RESILIENT_JOB=job))
        for rank, job in enumerate(("one", "two"))
    ]
    for rank, other in zip(ranks, ("two", "one"), strict=True):
        kind, text, _ = rank.value(SECONDS)
        assert kind == "JoinTimeoutError" and f"job '{other}' at this store has rank" in text, text
        assert f"waits to join; job '{other}'" in rank.stderr()


def test_jobs_of_one_port_are_told_apart_on_a_store_that_was_given():
    settings = {"job": "", "store": "s:1"}
    names = {
        _address.job_name(settings, {"SLURM_JOB_ID": slurm}, address, shared=True)
        for slurm in ("", "4711")
        for address in ("a:29500", "b:29500")
    }
    assert len(names) == 4


def test_names_of_presence_do_not_depend_on_the_spelling():
    one = {"MASTER_ADDR": "localhost", "MASTER_PORT": "5", "WORLD_SIZE": "2"}
    for other in ("LOCALHOST", "127.0.0.1", "127.0.1.1", "0.0.0.0"):
        other = {**one, "MASTER_ADDR": other, "MASTER_PORT": " 5\n", "WORLD_SIZE": " 2"}
        assert _presence.prefix(other) == _presence.prefix(one)
    assert _presence.prefix({**one, "MASTER_ADDR": "node0"}) != _presence.prefix(one)


@pytest.mark.parametrize(
    ("host", "environment", "spans"),
    [
        ("localhost", {}, False),
        ("127.0.0.1", {}, False),
        ("node0", {}, True),
        ("0.0.0.0", {}, True),
        ("node0", {"LOCAL_WORLD_SIZE": "4"}, False),
        ("localhost", {"LOCAL_WORLD_SIZE": "2"}, True),
        ("localhost", {"PET_NNODES": "2"}, True),
        ("localhost", {"PET_NNODES": "1:4"}, True),
        ("node0", {"PET_NNODES": "1"}, False),
        ("localhost", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "0"}, True),
        ("localhost", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        (
            "localhost",
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "0", "LOCAL_RANK": "0"},
            False,
        ),
    ],
)
def test_whether_ranks_of_other_hosts_may_come(host, environment, spans):
    assert _reach.spans_hosts(environment, 4, host) is spans
    assert not _reach.spans_hosts(environment, 1, host)


def test_the_store_leaves_the_loopback_for_other_hosts_alone():
    settings = {"bind": "10.9.9.9", "socket_ifname": ""}
    for spans, loopback, wildcard in (
        (False, "node0", "127.0.0.1"),
        (True, "10.9.9.9", "10.9.9.9"),
    ):
        assert _reach.host_of_store("node0", ("127.0.1.1",), spans, settings) == loopback
        assert _reach.host_of_store("0.0.0.0", (), spans, settings) == wildcard
        assert _reach.host_of_store("node0", ("10.1.2.3",), spans, settings) == "node0"
    assert _reach.host_of_store("::", (), False, settings) == "::1"


@pytest.mark.parametrize("master", ["localhost", "0.0.0.0"])
def test_other_hosts_come_to_a_master_that_knows_itself_as_the_loopback(
    namespaces, rank_server, master
):
    network = hosts.Network(rank_server, ("alpha", "beta"), (4,))
    try:
        with contextlib.closing(hosts.World(network)) as world:
            port = harness.free_port()
            ranks = [
                world.start_rank(trains, rank, 2, env=plain(port, MASTER_ADDR=host))
                for rank, host in enumerate((master, "10.1.0.2"))
            ]
            for total, address, _ in values(ranks):
                assert (total, address) == (2, f"10.1.0.2:{port}")
    finally:
        network.close()


# ---- the process of the store


def looks_after_its_children(temporary):
    """What it has for children, and what its store's log is."""
    os.environ["TMPDIR"] = temporary
    add_up()
    dist.barrier()
    with pytest.raises(ChildProcessError):
        os.wait()
    children = [pid for pid in harness.children() if "resilient-store" in harness.children()[pid]]
    logs = os.listdir(temporary) if os.path.isdir(temporary) else []
    dist.barrier()
    dist.destroy_process_group()
    return children, [name for name in logs if name.startswith("resilient-store-")]


def test_the_store_is_nobodys_child_and_takes_its_log_along(world, tmp_path):
    ranks = world.start(looks_after_its_children, 2, str(tmp_path), env=plain())
    for children, logs in values(ranks):
        assert children == [] and len(logs) == 1
    until = time.monotonic() + 10
    while list(tmp_path.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("temporary", ["/nowhere/at/all", "/etc/hostname", "/proc", "relative"])
def test_no_temporary_folder_is_needed(world, temporary):
    ranks = world.start(looks_after_its_children, 2, temporary, env=plain())
    for children, logs in values(ranks):
        assert (children, logs) == ([], [])
    told = sum(rank.stderr().count("the log of the store is kept in memory") for rank in ranks)
    assert told == 1


@pytest.mark.slow
def test_a_store_to_which_nobody_has_come_ends_soon(world):
    port = harness.free_port()
    [(kind, *_)] = world.run(
        refused, 1, env=plain(port, RESILIENT_BUDGET="5s", RESILIENT_LINGER="10min")
    )
    assert kind == "ConfigError"
    until = time.monotonic() + 30
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            assert time.monotonic() < until
            time.sleep(0.05)


# ---- threads and finalizers


def python(code, env, seconds=SECONDS):
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stdout, done.stderr


IN_A_THREAD = """
import threading, torch, torch.distributed as dist

def train():
    threading.main_thread().join()
    dist.init_process_group("resilient")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total), flush=True)
    {end}

threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "pass"])
def test_a_thread_trains_when_the_main_thread_has_returned(world, end):
    code, stdout, stderr = python(IN_A_THREAD.format(end=end), world.environment(0, 1))
    assert (code, stdout, stderr) == (0, "sum 1\n", "")


FINALIZER = """
import torch, torch.distributed as dist

class Owner:
    def __init__(self):
        dist.init_process_group("{backend}")
        self.destroy = dist.destroy_process_group

    def __del__(self):
        self.destroy()

owner = Owner()
owner.self = owner  # Gone with the interpreter.
"""


def test_a_finalizer_may_destroy_another_backends_world(world):
    env = world.environment(0, 1, plain())
    code, _, stderr = python(FINALIZER.format(backend="gloo"), env)
    assert code == 0 and "Error" not in stderr and "resilient" not in stderr, stderr


# ---- resilient-run

STAYS = 'echo begins; until [ -e "$0.go" ]; do sleep 0.02; done; echo ends'


def ignoring(number):
    return lambda: signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_so(tmp_path, number):
    script = shell(tmp_path, STAYS)
    process = launch("--nproc", 1, *script, preexec_fn=ignoring(number))
    try:
        line_with(process, "stdout", "begins")
        process.send_signal(number)
        (tmp_path / "worker.sh.go").touch()
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (0, "[0] ends\n", "")


NOWHERE = """
import os, sys, tempfile
from torch_resilient import run
tempfile._candidate_tempdir_list = lambda: ["/proc"]
sys.exit(run.main())
"""


def test_a_system_without_a_temporary_folder_is_enough(tmp_path):
    script = shell(tmp_path, "echo here")
    done = run("--nproc", 1, *script, program=("-c", NOWHERE), seconds=SECONDS)
    assert done == (0, "[0] here\n", "")


REFUSES = """
import sys
sys.path.insert(0, {tests!r})
from refused_calls import refuse_pidfds
from torch_resilient import run
refuse_pidfds({error})
sys.exit(run.main())
"""
DIES_ONCE = '[ -e "$0.dead" ] || { touch "$0.dead"; sleep 600 & kill -9 $$; }; echo here'


@pytest.mark.parametrize("error", [38, 1])
def test_a_system_without_pidfds_is_enough(tmp_path, error):
    script = shell(tmp_path, DIES_ONCE)
    program = ("-c", REFUSES.format(tests=os.path.dirname(__file__), error=error))
    code, stdout, stderr = run("--nproc", 1, *script, program=program, seconds=SECONDS)
    assert (code, stdout) == (0, "[0] here\n"), stderr
    assert "(SIGKILL); replacing it (1 of 3 restarts)" in stderr


def test_without_pidfds_a_signal_ends_what_runs(tmp_path):
    program = ("-c", REFUSES.format(tests=os.path.dirname(__file__), error=38))
    process = launch("--nproc", 2, *shell(tmp_path, STAYS), program=program)
    try:
        line_with(process, "stdout", "begins")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
