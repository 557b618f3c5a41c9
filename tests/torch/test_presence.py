"""A rank that has imported torch and not come to its init is known on its host, and waited for."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import harness
import hosts
import pytest

from torch_resilient import _init, _presence

TIMEOUT_SECONDS = 4


def environment(rank, size, port, **extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    more = {"MASTER_PORT": str(port), "RESILIENT_LINGER": "2s", "OMP_NUM_THREADS": "1"}
    return {**kept, **ranks, **more, **extra}


def start(code, env, prefix=()):
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def say(rank, text="go\n"):
    rank.stdin.write(text)
    rank.stdin.flush()


def still_waits(rank, seconds):
    try:
        rank.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError(rank.communicate())


JOINS = f"""
    import os, sys, torch, torch.distributed as dist
    from datetime import timedelta
    print("here", flush=True)
    sys.stdin.readline()
    for _ in range(2):
        try:
            dist.init_process_group(
                os.environ.get("BACKEND", "resilient"), timeout=timedelta(seconds={TIMEOUT_SECONDS})
            )
        except dist.DistStoreError as error:
            print(error)
            sys.exit(3)
        dist.barrier()
        dist.destroy_process_group()
"""


def test_a_rank_that_is_not_yet_in_init_is_waited_for_beyond_the_timeout():
    port = harness.free_port()
    ranks = [start(JOINS, environment(r, 2, port, RESILIENT_WAIT_LOG="2s")) for r in range(2)]
    for rank in ranks:
        assert rank.stdout.readline() == "here\n"
    began = time.monotonic()
    say(ranks[1])
    still_waits(ranks[1], 3 * TIMEOUT_SECONDS)
    outputs = [rank.communicate("go\n", timeout=60) for rank in ranks[:1]]
    outputs.append(ranks[1].communicate(timeout=60))
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert time.monotonic() - began > 3 * TIMEOUT_SECONDS
    assert "waiting for rank 0: alive on host" in outputs[1][1], outputs[1]


def test_a_rank_that_never_started_is_not():
    port = harness.free_port()
    ranks = [start(JOINS, environment(r, 3, port)) for r in range(2)]
    for rank in ranks:
        assert rank.stdout.readline() == "here\n"
    out, err = ranks[1].communicate("go\n", timeout=60)
    assert ranks[1].returncode == 3, err
    assert "[resilient:JOIN_TIMEOUT] 1 of 3 joined; missing ranks 2;" in out
    assert "rank 0 lives on host" in out and "has not come to its init" in out
    ranks[0].kill()
    ranks[0].communicate()


@pytest.mark.slow
def test_helpers_and_programs_without_ranks_announce_nothing():
    code = """
        from torch_resilient import _presence
        import os, torch
        print(_presence._kept is not None)
    """
    port = harness.free_port()

    def announces(env):
        out, err = start(code, env).communicate(timeout=60)
        assert out, err
        return out.strip() == "True"

    assert announces(environment(0, 2, port))
    assert not announces(environment(0, 1, port))
    assert not announces(environment("", 2, port))
    assert not announces(environment(0, 2, port, RESILIENT_OWNER="1:1"))
    assert not announces({**environment(0, 2, port), "MASTER_ADDR": ""})


def test_a_name_follows_the_variables(monkeypatch):
    name = None
    for values in ({"RANK": "0"}, {"RANK": "1"}, {"MASTER_PORT": "2"}, {"RESILIENT_JOB": "b"}):
        for variable, value in {**environment(0, 2, 1), **values}.items():
            monkeypatch.setenv(variable, value)
        before, name = name, f"{_presence.prefix(os.environ)}/{os.environ['RANK']}"
        assert _presence.announce()
        assert name in names_on_this_host() and before not in names_on_this_host()
    launchers, init = _presence.Init("job", "1", 1, 2), _presence.Init("job", "2", 1, 2)
    with _presence.in_init(launchers, launchers):
        assert f"{name}/init" in names_on_this_host()
        assert f"{name}/{launchers.name()}/any" in names_on_this_host()
    with _presence.in_init(init, launchers):
        assert f"{name}/init" in names_on_this_host()
        assert f"{name}/{init.name()}/1" in names_on_this_host()
    assert [other for other in names_on_this_host() if name in other] == [name]
    _presence._forget()
    assert name not in names_on_this_host()


def test_an_init_elsewhere_does_not_wait_for_a_rank_that_is_in_the_launchers():
    port = harness.free_port()
    variables = environment(0, 2, port)
    patient = JOINS.replace(f"seconds={TIMEOUT_SECONDS}", "seconds=60")
    waits = start(patient, variables)
    other = start(GOES_ELSEWHERE, environment(1, 2, port))
    for rank in (waits, other):
        assert rank.stdout.readline() == "here\n"
    say(waits)
    name = f"{_presence.prefix(variables)}/0/init"
    deadline = time.monotonic() + 30
    while name not in names_on_this_host():
        assert time.monotonic() < deadline and waits.poll() is None
    began = time.monotonic()
    say(other, f"2 tcp://127.0.0.1:{harness.free_port()}\n")
    assert other.stdout.readline() == "JOIN_TIMEOUT\n"
    assert time.monotonic() - began < 3 * TIMEOUT_SECONDS
    say(other, "60\n")
    ended_well([waits, other])


def init_of(port, **variables):
    arguments = {"init_method": None, "store": None, "rank": -1, "world_size": -1}
    variables = {**environment(0, 2, port), **variables}
    settings = {"job": "", "store": "", "spares": 0}
    return _init._init_of(arguments, settings, variables, False), variables, settings


def test_the_init_that_a_launcher_means_is_that_of_a_program_that_names_no_more():
    for variables in ({}, {"TORCHELASTIC_RUN_ID": "x"}, {"MASTER_ADDR": "LOCALHOST"}):
        init, environment, settings = init_of(29500, **variables)
        assert init == _init._init_of_launcher(settings, environment)


def test_variables_that_count_something_else_than_the_ranks_say_nothing_of_them():
    """A launcher that starts one process a host, which spawns the ranks."""
    init, variables, _ = init_of(29500)
    assert _presence.prefix_for(init, variables) == _presence.prefix(variables) != ""
    assert _presence.prefix_for(init, {**variables, "WORLD_SIZE": "1"}) == ""


def names_on_this_host():
    with open("/proc/net/unix") as sockets:
        return [line.split()[-1].removeprefix("@") for line in sockets]


def test_the_names_are_those_of_one_job():
    one = environment(0, 2, 1)
    assert _presence.prefix(one) == _presence.prefix({**one, "RANK": "1"})
    for other in ({"MASTER_PORT": "2"}, {"RESILIENT_JOB": "b"}, {"WORLD_SIZE": "3"}):
        assert _presence.prefix({**one, **other}) != _presence.prefix(one)
    assert len(_presence.prefix(one)) + len("/1023") < 107  # Of a name, with its first byte.


# ---- Names that anybody on the host can bind ----

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextlib.contextmanager
def bound(name, kind=socket.SOCK_DGRAM, user=None):
    """By this process, as that user."""
    own = os.geteuid()
    with contextlib.ExitStack() as stack:
        os.seteuid(own if user is None else user)
        try:
            taken = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            taken.bind(f"\0{name}")
        finally:
            os.seteuid(own)
        yield


def test_the_names_are_those_of_one_user(monkeypatch):
    one = environment(0, 2, 1)
    own = _presence.prefix(one)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert own != _presence.prefix(one) and _presence.prefix(one).startswith(f"resilient/{NOBODY}/")


@only_root
def test_a_name_that_another_user_has_bound_is_no_rank():
    variables = environment(1, 2, harness.free_port())
    with bound(f"{_presence.prefix(variables)}/0", user=NOBODY):
        rank = start(JOINS, variables)
        out, err = rank.communicate("go\n", timeout=60)
    assert rank.returncode == 3, err
    text = "[resilient:JOIN_TIMEOUT] 1 of 2 joined; missing ranks 0; nothing was ever heard from"
    assert text in out


def test_where_the_kernel_tells_no_owners_a_name_counts_for_twice_the_timeout():
    refuses = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from refused_calls import refuse_sock_diag
        refuse_sock_diag({errno.EPERM})
    """
    variables = environment(1, 2, harness.free_port())
    with bound(f"{_presence.prefix(variables)}/0"):
        rank = start(textwrap.dedent(refuses) + textwrap.dedent(JOINS), variables)
        assert rank.stdout.readline() == "here\n"
        say(rank)
        still_waits(rank, 1.5 * TIMEOUT_SECONDS)
        out, err = rank.communicate(timeout=60)
    assert rank.returncode == 3, err
    assert "[resilient:JOIN_TIMEOUT] 1 of 2 joined; missing ranks 0; a process on host " in out
    assert "has the name of rank 0 and was waited for no longer than twice the timeout" in out


@only_root
def test_another_user_cannot_keep_a_store_from_its_start():
    port = harness.free_port()
    patient = JOINS.replace(f"seconds={TIMEOUT_SECONDS}", "seconds=60")
    right = f"resilient-spawn-{os.geteuid()}-{port}-127.0.0.1"
    with bound(right, socket.SOCK_STREAM, NOBODY):
        ranks = [start(patient, environment(r, 2, port)) for r in range(2)]
        for rank in ranks:
            say(rank)
        logs = [log for _, log in ended_well(ranks)]
    told = [log.count(f"user {NOBODY} of this host has taken the name") for log in logs]
    assert sum(told) > 0 and max(told) <= 2, logs  # Once an init, of which there are two.


# ---- From the import on, at the store ----


@pytest.fixture
def network(namespaces, rank_server):
    network = hosts.Network(rank_server, ("alpha", "beta"), (4,), lease="3s")
    yield network
    network.close()


def on_hosts(network, size, master, **extra):
    """Ranks 0 and 1 of a world, on alpha and beta, that have imported torch."""
    extra = {"RESILIENT_WAIT_LOG": "2s", "MASTER_ADDR": master, **extra}
    port = harness.free_port()
    ranks = [start(JOINS, {**environment(r, size, port), **extra}, network.on(r)) for r in range(2)]
    for rank in ranks:
        assert rank.stdout.readline() == "here\n", rank.communicate()
    return ranks


def ended_well(ranks):
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return outputs


@pytest.mark.slow
def test_a_rank_of_another_host_is_waited_for_beyond_the_timeout(network):
    ranks = on_hosts(network, 2, "10.1.0.2", RESILIENT_STORE=network.store.address)
    say(ranks[1])
    still_waits(ranks[1], 2 * TIMEOUT_SECONDS)
    say(ranks[0])
    _, log = ended_well(ranks)[1]
    late = f"waiting for rank 0: alive on host alpha (pid {ranks[0].pid}), not yet in its init"
    assert late in log


def test_who_starts_a_store_for_other_hosts_says_what_it_lets_in(network, tmp_path):
    """With the way to close it; and not where it is closed. The program inits twice."""
    token = tmp_path / "token"
    token.write_text("0" * 64)
    for closed in ({}, {"RESILIENT_TOKEN_FILE": str(token)}):
        ranks = on_hosts(network, 2, "10.1.0.2", **closed)
        for rank in ranks:
            say(rank)
        logs = [log for _, log in ended_well(ranks)]
        told = [" asks for no token: whoever reaches it" in log for log in logs]
        assert told == [not closed, False], logs
        assert closed or "export RESILIENT_TOKEN_FILE=" in logs[0]


def test_a_rank_of_another_host_that_is_killed_before_its_init_is_missing(network):
    ranks = on_hosts(network, 2, "10.1.0.2", RESILIENT_STORE=network.store.address)
    say(ranks[1])
    still_waits(ranks[1], 2 * TIMEOUT_SECONDS)
    ranks[0].kill()
    out, err = ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == 3, err
    assert "[resilient:JOIN_TIMEOUT] 1 of 2 joined; missing ranks 0" in out
    assert f"rank 0 (host alpha, pid {ranks[0].pid})" in out
    assert "before its init" in out
    ranks[0].communicate()


@pytest.mark.slow
def test_a_rank_that_never_started_anywhere_is_missing_whoever_is_present(network):
    ranks = on_hosts(network, 3, "10.1.0.2", RESILIENT_STORE=network.store.address)
    out, err = ranks[1].communicate("go\n", timeout=60)
    assert ranks[1].returncode == 3, err
    assert "missing ranks 2; nothing was ever heard from them" in out
    assert f"rank 0 lives on host alpha (pid {ranks[0].pid}) and has not come to its init" in out
    ranks[0].communicate("", timeout=60)


GOES_ELSEWHERE = f"""
    import sys, torch, torch.distributed as dist
    from datetime import timedelta
    print("here", flush=True)
    for line in sys.stdin:
        seconds, *url = line.split()
        try:
            dist.init_process_group(
                "resilient", *url, timeout=timedelta(seconds=int(seconds)), rank=1, world_size=2
            )
            break
        except dist.DistStoreError as error:
            print(error.code, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("resilient", timeout=timedelta(seconds={TIMEOUT_SECONDS}))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_in_the_init_of_another_job_is_missing_until_that_has_ended(network):
    port = harness.free_port()
    extra = {"MASTER_ADDR": "10.1.0.2", "RESILIENT_STORE": network.store.address}
    programs = (JOINS, JOINS, GOES_ELSEWHERE)  # The first one gives up.
    ranks = [
        start(program, {**environment(r, 2, port), **extra}, network.on(r))
        for program, r in zip(programs, (0, 0, 1), strict=True)
    ]
    for rank in ranks:
        assert rank.stdout.readline() == "here\n", rank.communicate()
    first, second, other = ranks
    say(other, f"{3 * TIMEOUT_SECONDS} tcp://10.1.0.2:1\n")
    out, err = first.communicate("go\n", timeout=2.5 * TIMEOUT_SECONDS)
    assert first.returncode == 3 and "missing ranks 1" in out, (out, err)
    assert other.stdout.readline() == "JOIN_TIMEOUT\n"
    say(second)
    still_waits(second, 2 * TIMEOUT_SECONDS)
    say(other, f"{TIMEOUT_SECONDS}\n")
    ended_well([second, other])


@pytest.mark.slow
def test_under_take_over_it_waits_at_the_address_of_the_store(network):
    ranks = on_hosts(network, 2, "10.1.0.2", RESILIENT_TAKE_OVER="gloo", BACKEND="gloo")
    say(ranks[0])  # Starts the store.
    still_waits(ranks[0], 2 * TIMEOUT_SECONDS)
    say(ranks[1])
    _, log = ended_well(ranks)[0]
    late = f"waiting for rank 1: alive on host beta (pid {ranks[1].pid}), not yet in its init"
    assert late in log


HAS_CHILDREN = """
    import os, subprocess, sys, torch
    helper = "import sys, torch; print('child', flush=True); sys.stdin.read()"
    subprocess.Popen([sys.executable, "-c", helper])
    if os.fork() == 0:
        print("child", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_children_of_a_rank_do_not_keep_it_present(store):
    port = harness.free_port()
    extra = {"RESILIENT_STORE": store, "RESILIENT_JOB": f"children-{port}"}
    parent = start(HAS_CHILDREN, environment(0, 2, port, **extra))
    assert [parent.stdout.readline() for _ in range(2)] == ["child\n"] * 2
    rank = start(JOINS, environment(1, 2, port, **extra))
    say(rank)
    still_waits(rank, 2 * TIMEOUT_SECONDS)
    parent.kill()
    out, err = rank.communicate(timeout=60)
    assert rank.returncode == 3, err
    assert f"pid {parent.pid}) has ended before its init" in out
    parent.communicate()  # Ends the children.


GOES_ON = """
    import sys, torch, torch.distributed as dist, torch_resilient
    print("here", flush=True)
    told = sys.stdin.readline()
    dist.init_process_group("resilient")
    if told != "in place of another\\n":
        print("runs", flush=True)
        try:
            while True:
                dist.barrier()
        except dist.DistBackendError:
            torch_resilient.rebuild(min_world=2)
    print(dist.get_world_size(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_replacement_on_its_way_when_its_time_is_over_still_comes(store):
    wait = 12  # Longer than the start of a process.
    port = harness.free_port()
    extra = {"RESILIENT_STORE": store, "RESILIENT_JOB": f"late-{port}"}
    extra["RESILIENT_SEAT_WAIT"] = f"{wait}s"
    ranks = [start(GOES_ON, environment(r, 3, port, **extra)) for r in range(3)]
    for rank in ranks:
        assert rank.stdout.readline() == "here\n"
        say(rank)
    for rank in ranks:
        assert rank.stdout.readline() == "runs\n"
    ranks[1].kill()
    killed = time.monotonic()
    ranks[1].communicate()
    ranks[1] = start(GOES_ON, environment(1, 3, port, **extra))
    assert ranks[1].stdout.readline() == "here\n"
    # Within the last call, which is as long as the wait.
    still_waits(ranks[0], killed + wait + 1 - time.monotonic())
    outputs = [ranks[1].communicate("in place of another\n", timeout=60)]
    outputs += [rank.communicate(timeout=60) for rank in (ranks[0], ranks[2])]
    assert [out for out, _ in outputs] == ["3\n"] * 3, outputs
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs


LOOKS = """
    import contextlib, json, os, sys, time, torch
    from torch_resilient import _presence

    def threads():
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield open(f"/proc/self/task/{task}/comm").read().strip()

    def looks():
        found = _presence._announcement is not None
        bound = time.monotonic() + 10  # One that is joined is listed for a moment yet.
        while not found and "res-presence" in threads():
            assert time.monotonic() < bound
        return found

    found = [looks()]
    for environment in json.load(sys.stdin):
        _presence.end()
        _presence._forget()
        _presence.at_import(environment)
        found.append(looks())
    print(json.dumps(found))
"""


def test_it_is_silent_and_only_where_a_store_is_known():
    port = harness.free_port()
    nowhere = {"RESILIENT_STORE": f"127.0.0.1:{harness.free_port()}"}
    first = environment(0, 2, port, **nowhere)
    agents = {"RESILIENT_TAKE_OVER": "gloo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    others = [
        ({**first, "MASTER_ADDR": ""}, True),
        (environment(0, 2, port, RESILIENT_TAKE_OVER="gloo"), True),
        (environment(0, 2, port), False),
        (environment(0, 1, port, **nowhere), False),
        (environment(0, 2, port, RESILIENT_STORE="nonsense"), False),
        (environment(0, 2, port, **nowhere, RESILIENT_STALL="nonsense"), False),
        (environment(0, 2, port, **nowhere, RESILIENT_OWNER="1:1"), False),
        (environment(0, 2, port, **agents), False),
    ]
    process = start(LOOKS, first)
    out, err = process.communicate(json.dumps([env for env, _ in others]), timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out) == [True, *(wanted for _, wanted in others)]


RUNS = """
    import torch, torch.distributed as dist
    from torch_resilient import _presence
    before = _presence._announcement
    dist.init_process_group("resilient")
    print(before is not None, _presence._announcement)
    dist.destroy_process_group()
"""


def test_workers_of_resilient_run_are_present_until_they_have_joined(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RUNS))
    command = [sys.executable, "-m", "torch_resilient.run", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True None") == 2, done.stdout
