"""torchrun: its restarts after a death, under each rendezvous, and its nodes under ours.

The nodes are agents on one host. The rendezvous' rules are also tested without processes.
"""

import os
import re
import signal

import harness
import pytest

from torch_resilient._torchrun import State, enter, newcomers

# ---- The rules.


def meet(state, arrivals, most, seen=0, alive=()):
    """The state when agents come one after the other, all of them present from the start."""
    everybody = set(arrivals) | set(alive)
    for one in arrivals:
        state = enter(state, one, seen, everybody, most)
    return state


def test_agents_gather_until_the_round_is_full():
    state = meet(State(), ["a", "b"], most=3)
    assert (state.round, state.running, state.members) == (1, False, ("a", "b"))
    state = enter(state, "c", 0, {"a", "b", "c"}, 3)
    assert (state.running, state.members) == (True, ("a", "b", "c"))
    for one in "abc":  # Who looks again finds itself admitted.
        assert enter(state, one, 0, {"a", "b", "c"}, 3) == state


def test_who_comes_late_waits_and_is_noticed_where_there_is_room():
    state = State(round=1, running=True, members=("a", "b"))
    late = enter(state, "c", 0, {"a", "b", "c"}, 3)
    assert late == State(round=1, running=True, members=("a", "b"), waiting=("c",))
    assert enter(late, "c", 0, {"a", "b", "c"}, 3) == late
    assert newcomers(late, 1, {"a", "b", "c"}, 3) == 1
    assert newcomers(late, 1, {"a", "b", "c"}, 2) == 0  # Full: a spare.
    assert newcomers(late, 1, {"a", "b"}, 3) == 0  # It has died meanwhile.
    again = meet(late, ["b", "c", "a"], most=3, seen=1)
    assert (again.round, again.running, again.members) == (2, True, ("b", "c", "a"))
    assert again.waiting == ()


def test_a_dead_member_ends_the_round_and_a_spare_takes_its_place():
    state = State(round=4, running=True, members=("a", "b"), waiting=("c",))
    assert newcomers(state, 4, {"b", "c"}, 2) == 1
    state = enter(state, "b", 4, {"b", "c"}, 2)
    assert (state.round, state.running, state.members) == (5, False, ("b",))
    state = enter(state, "c", 0, {"b", "c"}, 2)
    assert (state.running, state.members, state.waiting) == (True, ("b", "c"), ())
    assert newcomers(state, 4, {"b", "c"}, 2) == 1  # Whoever is still in round 4.


def test_the_dead_are_not_waited_for_where_a_round_gathers():
    state = State(round=2, running=False, members=("a", "b"), waiting=("d",))
    state = enter(state, "c", 0, {"b", "c"}, 3)
    assert (state.members, state.waiting, state.running) == (("b", "c"), (), False)


def test_a_state_whose_agents_are_all_gone_is_begun_anew():
    for old in (
        State(round=7, running=True, members=("a", "b")),
        State(round=7, running=False, members=("a",), closed=True),
        State(round=7, running=True, members=("a", "b"), closed=True),
    ):
        state = enter(old, "c", 0, {"c"}, 2)
        assert not state.closed and not state.running and state.members == ("c",)
        assert state.round >= 7
    assert newcomers(State(round=7, closed=True, members=("a",)), 7, set(), 2) == 0


def test_a_store_that_was_started_anew_counts_on_from_the_agents():
    assert enter(State(), "a", 9, {"a"}, 1) == State(round=10, running=True, members=("a",))
    assert newcomers(State(), 9, {"a"}, 1) == 1


def test_a_state_comes_back_from_its_text():
    state = State(round=3, running=False, members=("a",), waiting=("b", "c"), closed=True)
    assert State.parse(state.text()) == state
    assert State.parse("") == State()


# ---- Whole programs.

DEATHS = "1,0,1+store"
QUICK = ["--max-restarts=3", "--monitor-interval=0.1"]


def static():
    return ["--master-addr=127.0.0.1", f"--master-port={harness.free_port()}"]


def standalone():
    return ["--standalone"]


def ours():
    return ["--rdzv-backend=resilient", "--rdzv-id=job"]


def ends(process):
    return sorted(re.findall(r"end of attempt (\d+) world (\d+) rank (\d+)", process.stdout()))


@pytest.mark.parametrize(
    "rendezvous",
    [
        ours,
        pytest.param(static, marks=pytest.mark.slow),
        pytest.param(standalone, marks=pytest.mark.slow),
    ],
    ids=lambda function: function.__name__,
)
def test_torchrun_restarts_until_it_trains_to_the_end(launcher, rendezvous):
    """A worker dies, then rank 0, then a worker and the store's process."""
    process = launcher.elastic(
        "torchrun_program.py",
        "--nproc-per-node=2",
        *QUICK,
        *rendezvous(),
        program_arguments=["--deaths", DEATHS],
    )
    assert process.wait() == 0, process.stderr()
    assert ends(process) == [("3", "2", "0"), ("3", "2", "1")], process.stderr()


@pytest.mark.slow
def test_workers_with_another_backend_restart_under_our_rendezvous(launcher):
    process = launcher.elastic(
        "torchrun_program.py",
        "--nproc-per-node=2",
        *QUICK,
        *ours(),
        program_arguments=["--backend=gloo", "--deaths=1,0"],
    )
    assert process.wait() == 0, process.stderr()
    assert ends(process) == [("2", "2", "0"), ("2", "2", "1")], process.stderr()


@pytest.fixture
def stop(tmp_path):
    """The file that the workers run until: they end with the test, however it ends."""
    path = tmp_path / "stop"
    yield path
    path.touch()


class Nodes:
    """Agents of one job, each with one worker that runs until told to end."""

    def __init__(self, launcher, stop, nnodes):
        self._launcher = launcher
        self._stop = stop
        port = harness.free_port()
        self._options = [f"--nnodes={nnodes}", "--nproc-per-node=1", *QUICK, *ours()]
        self._options += [f"--rdzv-endpoint=127.0.0.1:{port}"]
        self._options += ["--rdzv-conf=last_call_timeout=1,join_timeout=90"]

    def start(self, **extra):
        return self._launcher.elastic(
            "torchrun_program.py",
            *self._options,
            program_arguments=["--until", self._stop],
            **extra,
        )

    def finish(self, *agents):
        self._stop.touch()
        for agent in agents:
            assert agent.wait() == 0, agent.stderr()


def kill_node(agent):
    """The agent and its worker, as when a host goes down."""
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", agent.stdout())]
    agent.signal(signal.SIGKILL)
    os.kill(pids[-1], signal.SIGKILL)
    agent.wait()


@pytest.mark.slow
def test_the_first_node_dies_and_a_late_one_joins(launcher, stop):
    nodes = Nodes(launcher, stop, "1:2")
    first, second = nodes.start(), nodes.start()
    first.await_line("world 2")
    second.await_line("world 2")
    alone = second.stdout().count("world 1")  # Before the first one came, if it came late.
    kill_node(first)
    second.await_line("world 1", times=alone + 1)
    late = nodes.start()
    late.await_line("world 2")
    nodes.finish(second, late)
    worlds = re.findall(r"^attempt \d+ world (\d)", second.stdout(), re.M)
    assert worlds[-3:] == ["2", "1", "2"], second.stdout()
    assert "end of attempt" in second.stdout() and "end of attempt" in late.stdout()


@pytest.mark.slow
def test_of_three_nodes_one_dies_and_the_spare_takes_its_place(launcher, stop):
    nodes = Nodes(launcher, stop, "2:2")
    one, two = nodes.start(), nodes.start()
    one.await_line("world 2")
    two.await_line("world 2")
    spare = nodes.start()
    kill_node(two)
    spare.await_line("world 2")
    nodes.finish(one, spare)


@pytest.mark.slow
def test_too_few_nodes_end_with_who_has_come(launcher, stop):
    nodes = Nodes(launcher, stop, "2:2")
    nodes._options[-1] = "--rdzv-conf=join_timeout=3"
    alone = nodes.start()
    assert alone.wait() != 0
    assert "1 of at least 2 agents of job job have come within 3 s" in alone.stderr()
