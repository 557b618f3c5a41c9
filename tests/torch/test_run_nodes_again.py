"""resilient-run on several nodes: spares that take seats of other nodes, and all ranks of all nodes
started anew when one dies. The launchers are all on this host, with a store of the test."""

import os
import re
import signal

import pytest
from launching import events, line_with, shell
from test_run_nodes import WAITS_FOR_A_LOSS, children, job, said, standing_still, stop
from test_run_policies import ANEW
from test_run_spares import LOSES_ONE

ALL = ["--restart-policy", "all"]


def starts(log):
    return sorted(event["rank"] for event in events(log) if event["event"] == "started")


def test_spares_are_counted_behind_the_ranks_of_all(tmp_path):
    text = f"""
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $RESILIENT_SPARES"
touch {tmp_path}/$RANK
if [ "$RANK" -ge 3 ]; then exec sleep 60; fi
until [ -e {tmp_path}/3 ] && [ -e {tmp_path}/4 ]; do sleep 0.01; done
"""
    each = [["--spares", 1], ["--spares", 1]]
    with job([2, 1], *shell(tmp_path, text), each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert said(ends[0][1]) == ["0 0 5 3 2", "1 1 5 3 2", "3 2 5 3 2"]
    assert said(ends[1][1]) == ["2 0 5 2 2", "4 1 5 2 2"]


def test_a_spare_of_another_node_takes_the_seat(tmp_path):
    """Rank 1 is node 1's, the spare is node 0's, and nothing is started again."""
    script = tmp_path / "loses_one.py"
    script.write_text(LOSES_ONE)
    with job(
        [1, 1], "--restart-policy", "never", script, each=[["--spares", 1], []], seconds=60
    ) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert said(ends[0][1]) == ["process 0 is rank 0 of 2", "process 2 is rank 1 of 2"]
    assert "process 1" not in ends[1][1]
    assert "it is not started again, as a spare takes its seat" in ends[1][2]


def test_spares_for_all_ranks_of_a_killed_launcher_are_enough(tmp_path):
    script = tmp_path / "waits_for_a_loss.py"
    script.write_text(WAITS_FOR_A_LOSS)
    known = tmp_path / "known"
    with job([1, 1], script, known, each=[["--spares", 1], []], seconds=60) as both:
        ready(both.launchers)
        both.launchers[1].kill()
        # The ranks know it before: by then they could have healed and finished.
        goes_on = "was killed, and its ranks with it; the job goes on with 2, as spares"
        line_with(both.launchers[0], "stderr", goes_on)
        known.touch()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, -9], ends
    assert said(ends[0][1]) == ["healed: rank 0 of 2", "healed: rank 1 of 2"]


@pytest.mark.parametrize("node", [0, 2])
def test_where_no_spare_is_left_all_end(tmp_path, node):
    """Two nodes lose their rank at once, and there is one spare, of one of them or of the third."""
    text = f"""
[ "$RANK" -le 1 ] || exec sleep 60
touch {tmp_path}/$RANK
until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ]; do sleep 0.01; done
exit 7
"""
    options = ["--restart-policy", "never", *shell(tmp_path, text)]
    each = [["--spares", 1] if number == node else [] for number in range(3)]
    with job([1, 1, 1], *options, each=each) as all_of_them:
        ends = all_of_them.finish()
    # A launcher without a process left has done its part when it ends before the other's loss.
    assert ends[2][0] == 7 and {code for code, _, _ in ends} <= {0, 7}, ends


def test_all_of_all_nodes_are_started_anew(tmp_path):
    """Those that have finished too: their launcher has stayed."""
    logs = [tmp_path / "events0", tmp_path / "events1"]
    text = f"""
echo "attempt ${{RESILIENT_ATTEMPT:-0}} port $MASTER_PORT"
[ "$RESILIENT_ATTEMPT" = 1 ] && exit 0
[ "$RANK" = 0 ] && exit 0
[ "$RANK" = 1 ] && exec sleep 60
until grep -q '"exited", .*"rank": 0' {logs[0]}; do sleep 0.01; done
exit 7
"""
    each = [["--events", log] for log in logs]
    with job([1, 2], *ALL, *shell(tmp_path, text), each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "exit code 7; starting all ranks anew (1 of 3 restarts)" in ends[1][2]
    assert re.search(
        r"node 1 \(\S+\): rank 2 \(pid \d+\) ended with exit code 7; start", ends[0][2]
    )
    assert [starts(log) for log in logs] == [[0, 0], [1, 1, 2, 2]]
    lines = {line for _, stdout, _ in ends for line in said(stdout)}
    assert sorted(line.split(" port ")[0] for line in lines) == ["attempt 0", "attempt 1"]
    assert len({line.split(" port ")[1] for line in lines}) == 2  # One for all in each attempt.


def test_a_launcher_whose_spare_has_died_stays_too(tmp_path):
    """The spare of node 0 dies, then its rank finishes, then node 1 loses its own."""
    logs = [tmp_path / "events0", tmp_path / "events1"]
    text = f"""
has_ended() {{ grep -q '"exited", .*"rank": '$1 {logs[0]}; }}
[ "$RESILIENT_ATTEMPT" = 1 ] && exit 0
[ "$RANK" = 2 ] && exit 9
until has_ended $((2 - 2 * RANK)); do sleep 0.01; done
exit $((7 * RANK))
"""
    each = [["--spares", 1, "--events", logs[0]], ["--events", logs[1]]]
    with job([1, 1], *ALL, *shell(tmp_path, text), each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "it waited for a seat, and the job goes on without it" in ends[0][2]
    assert [starts(log) for log in logs] == [[0, 0, 2, 2], [1, 1]]


def test_two_losses_at_once_are_one_start(tmp_path):
    logs = [tmp_path / "events0", tmp_path / "events1"]
    text = f"""
[ "$RESILIENT_ATTEMPT" = 1 ] && exit 0
touch {tmp_path}/$RANK
until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ]; do sleep 0.01; done
exit 5
"""
    each = [["--events", log] for log in logs]
    options = [*ALL, "--max-restarts", 1, *shell(tmp_path, text)]
    with job([1, 1], *options, each=each) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [starts(log) for log in logs] == [[0, 0], [1, 1]]


def test_the_restarts_are_those_of_all_nodes(tmp_path):
    """The first loss is of one node, the second one of the other: then all are used."""
    text = """
[ "$RANK" = "${RESILIENT_ATTEMPT:-0}" ] && exit 7
exec sleep 60
"""
    with job([1, 1], *ALL, "--max-restarts", 1, *shell(tmp_path, text)) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [7, 7], ends
    assert "all 1 restarts are used; ending the job" in ends[1][2]
    assert re.search(r"node 1 \(\S+\) gave up: rank 1 .* all 1 restarts are used", ends[0][2])


WAITS = """
echo ready
[ "$RESILIENT_ATTEMPT" = 1 ] && exit 0
[ "$RANK" = 0 ] || exec sleep 60
until [ -e {}/fail ]; do sleep 0.01; done
exit 7
"""


def ready(launchers):
    for launcher in launchers:
        line_with(launcher, "stdout", "ready")


@pytest.mark.slow
def test_a_launcher_that_was_stopped_follows(tmp_path):
    with job([1, 1], *ALL, *shell(tmp_path, WAITS.format(tmp_path))) as both:
        ready(both.launchers)
        with standing_still(both.launchers[1]):
            (tmp_path / "fail").touch()
            line_with(both.launchers[0], "stderr", "starting all ranks anew (1 of 3")
            waits = "waits up to 600 s for node 1 to end its ranks"
            line_with(both.launchers[0], "stderr", waits)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends


# Waits that are 10 min otherwise.
IMPATIENT = """
import sys
from torch_resilient import run
from torch_resilient._launch import launcher
launcher.MEET_SECONDS = 2.0
sys.exit(run.main())
"""


def test_the_wait_for_a_launcher_that_was_stopped_ends(tmp_path):
    script = shell(tmp_path, WAITS.format(tmp_path))
    with job([1, 1], *ALL, *script, program=("-c", IMPATIENT)) as both:
        ready(both.launchers)
        with standing_still(both.launchers[1]):
            (tmp_path / "fail").touch()
            both.launchers[0].wait(20)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [1, 1], ends
    text = "exit code 7; node 1 has not ended its ranks in 2 s, so none can begin anew; ending"
    assert text in ends[0][2] and text.removesuffix("; ending") in ends[1][2]


def test_who_has_finished_does_not_stay_for_ever(tmp_path):
    text = f"""
[ "$RANK" = 0 ] && exit 0
until [ -e {tmp_path}/x ]; do sleep 0.01; done
exit 9
"""
    with job([1, 1], *ALL, *shell(tmp_path, text), program=("-c", IMPATIENT)) as both:
        assert both.launchers[0].wait(20) == 0
        (tmp_path / "x").touch()
        ends = both.finish()
    assert "those of others have not; it takes no part any more" in ends[0][2]
    # Its own loss may be known before the other's end is: then it is found in waiting for that one.
    known = ends[1][0] == 9 and "and node 0 has finished: it cannot begin anew" in ends[1][2]
    found = ends[1][0] == 1 and "node 0 has ended, so none can begin anew" in ends[1][2]
    assert ends[0][0] == 0 and (known or found), ends


def test_a_signal_while_others_are_waited_for(tmp_path):
    with job([1, 1], *ALL, *shell(tmp_path, WAITS.format(tmp_path))) as both:
        ready(both.launchers)
        with standing_still(both.launchers[1]):
            (tmp_path / "fail").touch()
            line_with(both.launchers[0], "stderr", "starting all ranks anew (1 of 3")
            both.launchers[0].send_signal(signal.SIGINT)
            both.launchers[0].wait(20)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [130, 130], ends
    assert "gave up: it was ended by signal 2 (SIGINT)" in ends[1][2]


def test_a_launcher_that_comes_late_begins_with_the_others(tmp_path):
    """The first one of its node was killed with all that it had started: no last words."""
    env = {"TMPDIR": str(tmp_path)}  # Nobody is left to clear up.
    with job([1, 1], *ALL, *shell(tmp_path, WAITS.format(tmp_path)), env=env) as both:
        ready(both.launchers)
        lost = both.launchers[1]
        stop(lost)
        for pid in children(lost.pid):
            os.kill(pid, signal.SIGKILL)
        lost.kill()
        lost.communicate(timeout=60)
        (tmp_path / "fail").touch()
        line_with(both.launchers[0], "stderr", "starting all ranks anew (1 of 3")
        both.launchers[1] = both.start(1)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert said(ends[1][1]) == ["ready"]


@pytest.mark.slow
def test_a_training_begins_anew_on_all_nodes(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(ANEW)
    with job([2, 1], *ALL, "--max-restarts", 1, script, seconds=120) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    lines = [line for _, stdout, _ in ends for line in said(stdout)]
    assert sorted(lines) == ["attempt 0 total 3"] * 3 + ["attempt 1 total 3"] * 3


def test_a_launcher_that_is_killed_meanwhile_ends_all(tmp_path):
    """It was to end its ranks and begin anew with the others."""
    with job([1, 1], *ALL, *shell(tmp_path, WAITS.format(tmp_path))) as both:
        ready(both.launchers)
        stop(both.launchers[1])
        (tmp_path / "fail").touch()
        line_with(both.launchers[0], "stderr", "starting all ranks anew (1 of 3")
        both.launchers[1].kill()
        ends = both.finish()
    assert [code for code, _, _ in ends] == [137, -9], ends
    assert "was killed, and its ranks with it; ending the job" in ends[0][2]


def test_who_ends_last_is_heard_though_a_launcher_was_killed(tmp_path):
    """Node 0 has two spares: one finishes in the place of node 1's rank, nobody needs the other."""
    log = tmp_path / "events"
    text = f"""
has_ended() {{ grep -q '"exited", .*"rank": '$1 {log}; }}
echo ready
until [ -e {tmp_path}/x ]; do sleep 0.01; done
[ "$RANK" = 4 ] && exec sleep 600
[ "$RANK" = 3 ] && touch "$RESILIENT_SEATED"
if [ "$RANK" = 2 ]; then until has_ended 0 && has_ended 3; do sleep 0.01; done; fi
"""
    each = [["--spares", 2, "--events", log], [], []]
    with job([1, 1, 1], *shell(tmp_path, text), each=each) as three:
        ready(three.launchers)
        three.launchers[1].kill()
        for node in (0, 2):
            line_with(three.launchers[node], "stderr", "goes on with 4, as spares")
        (tmp_path / "x").touch()
        ends = three.finish()
    assert [code for code, _, _ in ends] == [0, -9, 0], ends


# Node 0 begins when node 1 listens; node 1 hears that it is there, and the rest when that is over.
HEARS_LATE = """
import os, re, sys, time
from torch_resilient import run
from torch_resilient._launch.nodes import Nodes

listens = os.environ["LISTENS"]
start, heard, kept = Nodes.start, Nodes._heard, []


def starts(self):
    while self.roster.node == 0 and not os.path.exists(listens):
        time.sleep(0.01)
    start(self)


def hears(self, lines):
    kept.extend(lines)
    if not self.roster.mine.sees or re.search(rb"ended[^:]*: 0,", b"".join(lines)):
        heard(self, kept[:])
        kept.clear()
    open(listens, "w").close()


Nodes.start = starts
if "--node-rank 1" in " ".join(sys.argv):
    Nodes._heard = hears
sys.exit(run.main())
"""


@pytest.mark.parametrize("own", [[], ["--spares", 1], ["--min-world", 1]])
def test_who_hears_of_the_start_with_the_end_does_its_part(tmp_path, own):
    script = shell(tmp_path, '[ "$RANK" = 2 ] && exec sleep 60; echo ran')
    late = {"program": ("-c", HEARS_LATE), "env": {"LISTENS": str(tmp_path / "listens")}}
    with job([1, 1], *script, each=[[], own], **late) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert said(ends[1][1]) == ["ran"]


# Learns of what has happened at once in the other order.
REVERSED = """
import selectors, sys
from torch_resilient import run

select = selectors.DefaultSelector.select
selectors.DefaultSelector.select = lambda *args: select(*args)[::-1]
sys.exit(run.main())
"""


def test_a_loss_is_known_before_what_others_made_of_it(tmp_path):
    """A launcher stands still while its rank dies, a spare of the other node takes the seat, and
    all others finish: it is not too late for a spare."""
    text = f"""
echo $$ >{tmp_path}/$RANK; echo ready
until [ -e {tmp_path}/x ]; do sleep 0.01; done
touch "$RESILIENT_SEATED"
[ "$RANK" = 1 ] && exit 7
until grep -q '^State:.Z' /proc/$(cat {tmp_path}/1)/status; do sleep 0.01; done
exit 0
"""
    options = ["--restart-policy", "never", *shell(tmp_path, text)]
    each = [["--spares", 1], []]
    with job([1, 1], *options, each=each, program=("-c", REVERSED)) as both:
        ready(both.launchers)
        with standing_still(both.launchers[1]):
            (tmp_path / "x").touch()
            both.launchers[0].wait(20)
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "it is not started again, as a spare takes its seat" in ends[1][2]


# Holds the first start back, has something to do shortly before its time, and stands still over it.
STANDS_STILL = """
import os, signal, sys, threading, time
from torch_resilient import run
from torch_resilient._launch import launcher

launcher._AT_ONCE = 0
launcher._WAIT_TOLD_SECONDS = 600.0  # Or it would wake for that.
gather, timers = launcher.Launcher._gather, []


def gathers(self, now):
    gather(self, now)
    left = self._renew_at - now
    if self._gather_until is None or left <= 0:
        return
    if not timers:
        kill = os.getpid(), signal.SIGCHLD
        timers.append(threading.Timer(left - 0.05, os.kill, kill))
        timers[0].start()
    elif left < 0.1:
        time.sleep(left + 0.01)


launcher.Launcher._gather = gathers
sys.exit(run.main())
"""


def test_the_time_to_begin_anew_is_not_missed(tmp_path):
    text = '[ "$RESILIENT_ATTEMPT" = 1 ] && exit 0; [ "$RANK" = 0 ] && exit 7; exec sleep 60'
    with job([1, 1], *ALL, *shell(tmp_path, text), program=("-c", STANDS_STILL)) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "starting all ranks anew (1 of 3 restarts) in 0.5 s" in ends[0][2]


# Its last word takes a while to arrive.
SLOW_LAST_WORD = """
import sys
from torch_resilient import run
from torch_resilient._launch.nodes import Nodes

set_command = Nodes._set_command


def slow(self, fields):
    command = set_command(self, fields)
    if fields["ended"] is None:
        return command
    return ["/bin/sh", "-c", 'sleep 3; exec "$@"', "sh", *command]


Nodes._set_command = slow
sys.exit(run.main())
"""


def test_a_last_word_is_waited_for(tmp_path):
    options = ["--max-restarts", 0, *shell(tmp_path, '[ "$RANK" = 1 ] && exit 7; exec sleep 600')]
    with job([1, 1], *options, program=("-c", SLOW_LAST_WORD)) as both:
        ends = both.finish()
    assert [code for code, _, _ in ends] == [7, 7], ends
