"""resilient-run on several nodes: launchers that find each other through a store, and what becomes
of the job when one of them, or a rank of one, is lost. All on this host, with a store of the test.
"""

import contextlib
import os
import re
import signal

import pytest
from launching import events, launch, run, shell
from store_access import plain_environment, serving


@contextlib.contextmanager
def job(nproc, *options, each=(), seconds=60, network=None, env=None, **how):
    """Starts a launcher for each node, on the hosts of the network if there is one; `finish()`
    gives (exit code, stdout, stderr) of each."""
    with contextlib.ExitStack() as stack:
        given = network and network.store.address
        address = given or stack.enter_context(serving("--log-level", "warn"))
        own = ["--nnodes", len(nproc), "--store", address, "--job", "night"]

        def start(node):
            extra = each[node] if each else ()
            numbers = ["--node-rank", node, "--nproc", nproc[node]]
            process = launch(
                *(*own, *numbers, *extra, *options),
                prefix=network.on(node) if network else (),
                env={**plain_environment(), **(env or {})},
                **how,
            )
            stack.callback(end, process)
            return process

        yield Job([start(node) for node in range(len(nproc))], start, seconds)


def end(process):
    if process.returncode is None:
        process.terminate()  # It ends what it has started.
        process.communicate(timeout=60)


class Job:
    def __init__(self, launchers, start, seconds):
        self.launchers, self.start, self._seconds = launchers, start, seconds

    def finish(self):
        ends = [process.communicate(timeout=self._seconds) for process in self.launchers]
        codes = [process.returncode for process in self.launchers]
        return [(code, *text) for code, text in zip(codes, ends, strict=True)]


def said(stdout):
    return sorted(line.partition("] ")[2] for line in stdout.splitlines())


def stop(launcher):
    """Returns once it stands still."""
    launcher.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)


@contextlib.contextmanager
def standing_still(launcher):
    """It goes on behind the block."""
    stop(launcher)
    try:
        yield
    finally:
        launcher.send_signal(signal.SIGCONT)


def test_ranks_are_counted_over_all_nodes(tmp_path):
    text = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $RESILIENT_JOB"'
    text += '; echo "master $MASTER_ADDR $MASTER_PORT"'
    with job([2, 1], *shell(tmp_path, text)) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    master = [line for line in said(ends[0][1]) if line.startswith("master ")]
    assert len(set(master)) == 1 and re.fullmatch(r"master 127\.0\.0\.1 \d+", master[0])
    assert said(ends[0][1]) == ["0 0 3 2 0 night", "1 1 3 2 0 night", *master]
    assert said(ends[1][1]) == ["2 0 3 1 1 night", master[0]]
    assert "[2] 2 0 3 1 1 night" in ends[1][1]


def test_a_rank_is_replaced_by_its_own_node(tmp_path):
    logs = [tmp_path / "events0", tmp_path / "events1"]
    text = f"""
[ "$RANK" = 3 ] && [ ! -e {tmp_path}/x ] && touch {tmp_path}/x && kill -9 $$
until [ -e {tmp_path}/x ] && [ "$(grep -c '"started"' {logs[1]})" = 3 ]; do sleep 0.01; done
"""
    each = [["--events", log] for log in logs]
    with job([2, 2], *shell(tmp_path, text), each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "replacing it (1 of 3 restarts)" in ends[1][2]
    starts = [[e["rank"] for e in events(log) if e["event"] == "started"] for log in logs]
    assert [sorted(ranks) for ranks in starts] == [[0, 1], [2, 3, 3]]


@pytest.mark.parametrize(("how", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 78", 78)])
def test_one_that_gives_up_ends_all_with_its_code(tmp_path, how, code):
    script = shell(tmp_path, f'[ "$RANK" = 1 ] && {how}; exec sleep 60')
    with job([1, 1, 1], "--max-restarts", 0, *script) as three:
        ends = three.finish()
    assert [end[0] for end in ends] == [code] * 3
    for node in (0, 2):
        assert re.search(r"node 1 \(\S+\) gave up: rank 1 \(pid \d+\) ended with", ends[node][2])


def test_a_signal_to_one_ends_all(tmp_path):
    with job([1, 1], *shell(tmp_path, "echo ready; exec sleep 60")) as both:
        for launcher in both.launchers:
            assert "ready" in launcher.stdout.readline()
        both.launchers[1].send_signal(signal.SIGTERM)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [143, 143]
    assert "gave up: it was ended by signal 15 (SIGTERM)" in ends[0][2]


def test_a_killed_launcher_ends_all(tmp_path):
    with job([1, 1], *shell(tmp_path, "echo ready; exec sleep 60")) as both:
        for launcher in both.launchers:
            assert "ready" in launcher.stdout.readline()
        both.launchers[0].kill()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [-9, 137]
    assert re.search(r"the launcher of node 0 \(\S+\) was killed, and its ranks", ends[1][2])


def test_enough_are_left_over_all_nodes(tmp_path):
    """One node loses a rank, which leaves as many as are asked for; then the other one does."""
    logs = [tmp_path / "events0", tmp_path / "events1"]
    text = f"""
[ "$RANK" = 0 ] && exit 5
until grep -q '"lost"' {logs[0]}; do sleep 0.01; done
[ "$RANK" = 2 ] && exit 6
exec sleep 60
"""
    options = ["--restart-policy", "never", "--min-world", 3]
    each = [["--events", log] for log in logs]
    with job([2, 2], *options, *shell(tmp_path, text), each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [6, 6], ends
    assert "the job goes on with 3, as 3 are enough (--min-world)" in ends[0][2]
    assert "2 are left, fewer than --min-world 3; ending the job" in ends[1][2]


def test_a_killed_launcher_can_be_done_without(tmp_path):
    text = f"""
echo ready
[ "$RANK" = 0 ] && exec sleep 60
until [ -e {tmp_path}/x ]; do sleep 0.01; done
"""
    with job([1, 2], "--min-world", 2, *shell(tmp_path, text)) as both:
        for launcher in both.launchers:
            assert "ready" in launcher.stdout.readline()
        both.launchers[0].kill()
        line = both.launchers[1].stderr.readline()
        assert "was killed, and its ranks with it; the job goes on with 2" in line
        (tmp_path / "x").touch()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [-9, 0]


def test_the_one_that_came_last_has_the_place(tmp_path):
    text = f"echo ready; until [ -e {tmp_path}/x ]; do sleep 0.01; done"
    with job([1, 1], *shell(tmp_path, text)) as both:
        for launcher in both.launchers:
            assert "ready" in launcher.stdout.readline()
        first = both.launchers[1]
        both.launchers[1] = both.start(1)
        _, stderr = first.communicate(timeout=60)
        assert first.returncode == 1
        assert "a launcher with the same --node-rank 1 has come later" in stderr
        assert "ready" in both.launchers[1].stdout.readline()
        (tmp_path / "x").touch()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends


def test_a_job_of_the_same_name_begins_anew(tmp_path):
    """Nothing that the launchers of the first run left behind counts in the second."""
    with job([1, 1], *shell(tmp_path, f"echo ready; [ -e {tmp_path}/x ] || exit 78")) as both:
        first = both.finish()
        (tmp_path / "x").touch()
        both.launchers[:] = [both.start(0), both.start(1)]
        second = both.finish()
    assert [code for code, _, _ in first] == [78, 78]
    assert [code for code, _, _ in second] == [0, 0], second


@pytest.mark.slow
def test_a_store_that_is_not_there_is_told_of(tmp_path):
    options = ["--nnodes", 2, "--node-rank", 0, "--store", "127.0.0.1:1", "--job", "night"]
    process = launch(*options, *shell(tmp_path, "exit 0"), env=plain_environment())
    try:
        line = process.stderr.readline()
        assert "the other nodes cannot be told yet; trying on: " in line
        assert "127.0.0.1:1" in line
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--node-rank", 2], "needs --node-rank 0 to 1"),
        ([], "needs --node-rank 0 to 1"),
        (["--node-rank", 0], "needs --store"),
        (["--node-rank", 0, "--store", "a:1"], "needs --job"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, text):
    code, _, stderr = run(
        "--nnodes", 2, *options, *shell(tmp_path, "exit 0"), env=plain_environment()
    )
    assert code == 2
    assert text in stderr


HEALS = """
import os, signal, sys
import torch, torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")
replaced = torch_resilient.membership()["generation"] > 1


def train(state):
    while state.step < 4:
        if not replaced and dist.get_rank() == 3 and state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(state.total)
        state.step += 1
        state.commit()


state = torch_resilient.State(total=torch.ones(1), step=0)
torch_resilient.elastic(train)(state)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {int(state.total)}", flush=True)
dist.destroy_process_group()
"""


def test_a_training_heals_over_two_nodes(tmp_path):
    script = tmp_path / "heals.py"
    script.write_text(HEALS)
    with job([2, 2], script, seconds=150) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert said(ends[0][1]) == ["rank 0 of 4 has 256", "rank 1 of 4 has 256"]
    assert said(ends[1][1]) == ["rank 2 of 4 has 256", "rank 3 of 4 has 256"]


# It ends when the file is there that it is told of.
WAITS_FOR_A_LOSS = """
import os, sys, time
import torch, torch.distributed as dist
import torch_resilient

dist.init_process_group("resilient")


def train(state):
    unhurt = torch_resilient.membership()["generation"] == 1
    while state.step < 4 or unhurt:
        dist.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()
        if unhurt and state.step == 1:
            os.write(1, b"ready\\n")


torch_resilient.elastic(train)(torch_resilient.State(step=0))
os.write(1, f"healed: rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
while sys.argv[1:] and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
dist.destroy_process_group()
"""


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.slow
def test_a_node_that_was_lost_comes_back(tmp_path):
    """The launcher is killed with all that it has started, its guard included: no last words."""
    script = tmp_path / "waits_for_a_loss.py"
    script.write_text(WAITS_FOR_A_LOSS)
    env = {"TMPDIR": str(tmp_path)}  # Nobody is left to clear up.
    with job([2, 1], script, seconds=150, env=env) as both:
        lost = both.launchers[1]
        for launcher in both.launchers:
            assert "ready" in launcher.stdout.readline()
        stop(lost)
        for pid in children(lost.pid):
            os.kill(pid, signal.SIGKILL)
        lost.kill()
        lost.communicate(timeout=60)
        both.launchers[1] = both.start(1)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [line for line in said(ends[0][1]) if line != "ready"] == [
        "healed: rank 0 of 3",
        "healed: rank 1 of 3",
    ]
    assert said(ends[1][1]) == ["healed: rank 2 of 3"]
