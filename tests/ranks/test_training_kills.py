"""A training script that is not a toy loses ranks again and again and ends with the same bits."""

import contextlib
import math
import os
import re
from pathlib import Path

import harness
import hosts
import pytest
import store_shell
import training_run

from torch_resilient import _server

KILLS = int(os.environ.get("SOAK_KILLS", "200"))
KILLS_PER_EPOCH = 5
SECONDS_PER_KILL = 15
GOES_ON = re.compile(r"goes on from step (\d+) with (\d+) ranks")


@pytest.fixture
def store():
    server = store_shell.Store(_server.binary())
    yield server.listening().address
    server.end()


@pytest.fixture
def network():
    """Two hosts."""
    if why := hosts.refusal():
        pytest.skip(f"no network namespaces here: {why}")
    server = harness.Server.launch()
    network = hosts.Network(server, ("alpha", "beta"))
    yield network
    network.close()
    server.close()


def undisturbed(folder, epochs, seconds):
    """The result. Its loader works in the ranks themselves: no difference may come of it."""
    options = ("--epochs", epochs, "--workers", 0)
    return training_run.run(folder, "calm", *options, seconds=seconds)[0]


def check(tmp_path, kills, epochs, seed, seconds, calm=None, replaced=True, **how):
    """A run with so many kills against one without."""
    calm = calm or undisturbed(tmp_path, epochs, seconds)
    steps = epochs * training_run.STEPS_PER_EPOCH
    plan = training_run.Kills(kills, steps, seed, replaced)
    options = ("--epochs", epochs, "--checkpoint", tmp_path / "checkpoint")
    killed, lines = training_run.run(
        tmp_path, "killed", *options, kills=plan, seconds=seconds, **how
    )
    assert len(plan.sent) == kills
    assert killed == calm, plan.sent
    assert killed["steps"] == steps and killed["buckets"] >= 3
    # Each sample once in each epoch.
    assert killed["seen"] == [epochs] * 2
    assert any('"event": "recovered"' in line for line in lines)
    return lines


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """What two epochs end with."""
    return undisturbed(tmp_path_factory.mktemp("calm"), 2, 240)


@pytest.mark.slow
def test_two_kills(tmp_path, calm):
    check(tmp_path, 2, 2, 1, 240, calm)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    check(tmp_path, 20, 6, 2, 300)


@pytest.mark.slow
def test_a_spare_takes_the_seat(tmp_path, calm):
    """Nobody is started anew: what the spare gets from the others is all that there is."""
    events = ("--events", tmp_path / "killed.events")
    launcher = [*training_run.HERE, "--spares", 1, "--restart-policy", "never", *events]
    lines = check(tmp_path, 1, 2, 5, 240, calm, replaced=False, launcher=launcher)
    assert sum("is process" in line for line in lines) == training_run.RANKS + 1


def planned(folder, segments):
    """What a run ends with whose size is changed by hand. `segments`: (first step, seats), the
    seats of the ranks among those of the segment before; None for a new rank."""
    checkpoint = ("--workers", 0, "--checkpoint", folder / "checkpoint")
    for number, (_, seats) in enumerate(segments):
        last = number + 1 == len(segments)
        options = () if last else ("--until-step", segments[number + 1][0])
        kept = [str(seat) for seat in seats if seat is not None]
        result, _ = training_run.run(
            folder,
            f"planned-{number}",
            *(*checkpoint, *options, "--seats", ",".join(kept)),
            launcher=[*training_run.RESILIENT_RUN, "--nproc", len(seats)],
            seconds=240,
        )
    return result


def entries(lines):
    """(first step, ranks) of each time that the training was entered."""
    return [tuple(map(int, found.groups())) for line in lines if (found := GOES_ON.search(line))]


def check_grown(grown, folder, segments):
    assert grown == planned(folder, segments), segments
    assert grown["seen"] == [2, 2], "a sample was lost or repeated"


def grow(folder, launcher, arrivals, *options, **how):
    """What a run ends with that takes in spares, and when it was entered with how many ranks."""
    with contextlib.closing(arrivals):
        grown, lines = training_run.run(
            folder,
            "grown",
            *("--max-world", training_run.RANKS, *arrivals.options, *options),
            launcher=launcher,
            kills=arrivals,
            seconds=240,
            **how,
        )
    return grown, entries(lines)


@pytest.mark.slow
def test_more_go_on_as_if_it_had_been_planned(tmp_path, store):
    """Two begin, and two more come when these have made some steps."""
    launcher = training_run.Ranks(store, [[]] * training_run.RANKS, replaced=False, late=2)
    arrivals = training_run.Arrivals(tmp_path, launcher, 3, 2)
    grown, entered = grow(tmp_path, launcher, arrivals, env={"RESILIENT_SPARES": "2"})
    [(_, first), (step, last)] = entered
    assert (first, last) == (2, 4) and step > 3
    check_grown(grown, tmp_path, [(0, [0, 1]), (step, [0, 1, None, None])])


@pytest.mark.slow
def test_fewer_and_then_all_again_as_if_it_had_been_planned(tmp_path, store):
    """One is lost; the others go on at once, and with who replaces it when it is there."""
    launcher = training_run.Ranks(store, [[]] * training_run.RANKS, replaced=True)
    plan = training_run.Kills(1, 7, 11, replaced=False)
    arrivals = training_run.Arrivals(tmp_path, launcher, 8, 1, plan)
    grown, entered = grow(tmp_path, launcher, arrivals, "--min-world", training_run.RANKS - 1)
    [(lost, _)] = plan.sent
    assert lost != 0, "it is the one that waits"
    [(_, first), (lost_at, fewer), (step, last)] = entered
    assert (first, fewer, last) == (4, 3, 4) and 0 < lost_at < 8 < step
    left = [rank for rank in range(training_run.RANKS) if rank != lost]
    check_grown(grown, tmp_path, [(0, [0, 1, 2, 3]), (lost_at, left), (step, [0, 1, 2, None])])


@pytest.mark.slow
def test_fewer_go_on_as_if_it_had_been_planned(tmp_path, store):
    """One is lost for good. Against it: a run of all that ends at the commit from which the others
    went on, and one of three that takes it up from the checkpoint."""
    plan = training_run.Kills(1, 10, 6, replaced=False)
    shrunk, lines = training_run.run(
        tmp_path,
        "shrunk",
        *("--min-world", training_run.RANKS - 1),
        launcher=training_run.Ranks(store, [[]] * training_run.RANKS, replaced=False),
        kills=plan,
        seconds=240,
    )
    [(lost, _)] = plan.sent
    *_, (step, size) = entries(lines)
    assert size == training_run.RANKS - 1 and 0 < step <= 10
    seats = [rank for rank in range(training_run.RANKS) if rank != lost]
    segments = [(0, list(range(training_run.RANKS))), (step, seats)]
    assert shrunk == planned(tmp_path, segments), plan.sent
    assert shrunk["seen"] == [2, 2], "a sample was lost or repeated"


def check_on_hosts(tmp_path, network, kills, epochs, seed, seconds, calm=None):
    prefixes = [network.on(rank * 2 // training_run.RANKS) for rank in range(training_run.RANKS)]
    ranks = training_run.Ranks(network.store.address, prefixes, replaced=True)
    env = {"RESILIENT_SEAT_WAIT": "60s"}
    lines = check(tmp_path, kills, epochs, seed, seconds, calm, launcher=ranks, env=env)
    said = set(re.findall(r"is process \d+ on (\w+)", "\n".join(lines)))
    assert said == {"alpha", "beta"}


@pytest.mark.slow
def test_a_kill_on_two_hosts(tmp_path, network, calm):
    check_on_hosts(tmp_path, network, 1, 2, 7, 240, calm)


@pytest.mark.slow
def test_ten_kills_on_two_hosts(tmp_path, network):
    check_on_hosts(tmp_path, network, 10, 4, 8, 300)


HAS_A_SEMAPHORE = """
import multiprocessing, signal
from multiprocessing import resource_tracker
semaphore = multiprocessing.get_context("spawn").Semaphore()
tracker = f"/proc/{resource_tracker._resource_tracker._pid}/cmdline"
while b"resource_tracker" not in open(tracker, "rb").read():
    pass  # It is being started.
print(semaphore._semlock.name.lstrip("/"), flush=True)
signal.pause()
"""


def test_ranks_without_a_launcher_leave_no_semaphores():
    """The process that removes their names has its time."""
    ranks = training_run.Ranks("", [[]], replaced=False)(["-c", HAS_A_SEMAPHORE], dict(os.environ))
    name = Path("/dev/shm", f"sem.{ranks.stdout.readline().strip()}")
    assert name.exists()
    ranks.kill_one(0)
    assert ranks.wait() == 0
    assert not name.exists()


@pytest.mark.slow
def test_torchrun_begins_anew_from_the_checkpoint(tmp_path, calm):
    """It restarts all ranks: what they held is gone, and the checkpoint has the same bits."""
    plan = training_run.Kills(2, 20, 4, replaced=False)
    checkpoint = tmp_path / "checkpoint"
    restarted, lines = training_run.run(
        tmp_path,
        "restarted",
        *("--checkpoint", checkpoint),
        launcher=[*training_run.TORCHRUN, "--max-restarts", 2],
        kills=plan,
        seconds=240,
    )
    assert restarted == calm, plan.sent
    assert sum("begins at step" in line for line in lines) >= 1


@pytest.mark.soak
def test_two_hundred_kills(tmp_path):
    epochs = max(2, math.ceil(KILLS / KILLS_PER_EPOCH))
    check(tmp_path, KILLS, epochs, 3, 120 + SECONDS_PER_KILL * KILLS)
