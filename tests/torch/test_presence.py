"""A rank that has imported torch and not come to its init is known on its host, and waited for."""

import os
import subprocess
import sys
import textwrap
import time

import harness

from torch_resilient import _presence

TIMEOUT_SECONDS = 4


def environment(rank, size, port, **extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RESILIENT_")}
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    more = {"MASTER_PORT": str(port), "RESILIENT_LINGER": "2s", "OMP_NUM_THREADS": "1"}
    return {**kept, **ranks, **more, **extra}


def start(code, env):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


JOINS = f"""
    import sys, torch, torch.distributed as dist
    from datetime import timedelta
    print("here", flush=True)
    sys.stdin.readline()
    try:
        dist.init_process_group("resilient", timeout=timedelta(seconds={TIMEOUT_SECONDS}))
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
    ranks[1].stdin.write("go\n")
    ranks[1].stdin.flush()
    try:
        ranks[1].wait(3 * TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    else:
        raise AssertionError(ranks[1].communicate())
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


def test_the_names_are_those_of_one_job():
    one = environment(0, 2, 1)
    assert _presence.prefix(one) == _presence.prefix({**one, "RANK": "1"})
    for other in ({"MASTER_PORT": "2"}, {"RESILIENT_JOB": "b"}, {"WORLD_SIZE": "3"}):
        assert _presence.prefix({**one, **other}) != _presence.prefix(one)
    assert len(_presence.prefix(one)) + len("/1023") < 107  # Of a name, with its first byte.
