"""What a process says of itself when others wait for it, and what it announces."""

import hashlib
import math
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch.distributed as dist
from rank_server import hear, tell

import torch_resilient

ATTEMPTS = 5


def look(timeout=30):
    """With a bound for loaded machines; an answer takes 2 s at most when the GIL is held."""
    from torch_resilient import _native

    seen = _native.load().whereabouts(timeout)
    assert seen is not None, "no answer"
    return seen


class Asker(threading.Thread):
    """Asks from another thread until it is told to stop, at least once."""

    def __init__(self):
        super().__init__(daemon=True)
        self.asked = threading.Event()
        self.answered = threading.Event()
        self.seen = None

    def run(self):
        self.asked.set()
        self.seen = look()
        self.answered.set()


def work(asker):
    asker.start()
    while not asker.answered.is_set():
        pass


def named_line():
    asker = Asker()
    work(asker)
    return asker.seen


def test_a_python_loop_is_named(world):
    seen = world.start_rank(named_line, 0, 1).value()
    # Perhaps caught inside of is_set(): that is not the user's code, and its caller is named.
    assert re.fullmatch(r"test_whereabouts\.py:\d+ work", seen["at"]), seen
    lines = seen["stack"].splitlines()
    assert any(line.endswith(", in named_line") for line in lines), seen
    work_at = [i for i, line in enumerate(lines) if line.endswith(", in work")]
    assert len(work_at) == 1 and lines[work_at[0] - 1].endswith(", in named_line"), "newest last"
    assert lines[work_at[0]].startswith('File "/')
    assert seen["no_progress"] == 0
    assert (seen["expected_slow"], seen["expected_slow_for"]) == ("", 0)


def waiting_in_the_library():
    asker = Asker()
    asker.start()
    assert asker.answered.wait(60)
    return asker.seen


def test_who_waits_in_the_standard_library_is_named_by_its_own_line(world):
    seen = world.start_rank(waiting_in_the_library, 0, 1).value()
    # Before or after the wait itself, it is always the line of the user's.
    assert re.fullmatch(r"test_whereabouts\.py:\d+ waiting_in_the_library", seen["at"])


def deep(depth):
    return deep(depth - 1) if depth else look()


def deep_stack():
    return deep(400)


def test_of_a_deep_stack_the_newest_calls_are_told(world):
    seen = world.start_rank(deep_stack, 0, 1).value()
    assert re.fullmatch(r"test_whereabouts\.py:\d+ look", seen["at"]), seen
    assert 4096 < len(seen["stack"].encode()) <= 8192
    assert seen["stack"].startswith("(older calls are left out)\n")
    assert seen["stack"].splitlines()[-1].endswith(", in look")


def holding_the_lock():
    import ctypes

    native_sleep = ctypes.PyDLL(None).sleep  # PyDLL: it keeps the GIL.
    for _ in range(ATTEMPTS):  # The other thread may look before this one sleeps.
        asker = Asker()
        asker.start()
        asker.asked.wait()
        native_sleep(3)
        assert asker.answered.wait(60)
        if asker.seen["at"].startswith("native"):
            break
    return asker.seen, look()


def test_native_code_that_holds_the_lock_is_told_with_its_time(world):
    held, after = world.start_rank(holding_the_lock, 0, 1).value(60)
    pattern = r"native code holds the GIL for \d+ s(, last seen at test_whereabouts\.py:\d+ .*)?"
    assert re.fullmatch(pattern, held["at"]), held
    assert int(re.search(r"for (\d+) s", held["at"])[1]) >= 2
    assert after["at"].startswith("test_whereabouts.py:"), "and then looks work again"


def last_seen():
    look()
    return holding_the_lock()


def test_it_says_where_the_thread_was_seen_last(world):
    held, _ = world.start_rank(last_seen, 0, 1).value(60)
    assert re.search(r", last seen at test_whereabouts\.py:\d+ \w+$", held["at"]), held
    assert "in last_seen" in held["stack"]


def threads():
    import os
    from pathlib import Path

    names = set()
    for task in os.listdir("/proc/self/task"):
        names.add(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return {"res-observer", "res-gil"} & names


def in_a_forked_child():
    import os

    from torch_resilient import _native

    _native.load()
    before = threads()
    with torch_resilient.expect_slow("the parent's", hours=1):
        look()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                seen = look()
                code = 0 if "in in_a_forked_child" in seen["stack"] else 2
                code = code if not seen["expected_slow"] else 3
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
    return before, threads(), os.waitstatus_to_exitcode(status)


def test_threads_come_with_the_first_question_and_a_forked_child_has_its_own(world):
    before, after, code = world.start_rank(in_a_forked_child, 0, 1).value(60)
    assert (before, after) == (set(), {"res-observer", "res-gil"})
    assert code == 0


# `end` is how the main thread leaves while the look of another thread waits for the GIL.
PROGRAM = """
    import ctypes, os, sys, threading, time
    import torch
    from torch_resilient import _native

    native = _native.load()
    libc = ctypes.PyDLL(None)
    asked = threading.Event()

    def ask():
        asked.set()
        native.whereabouts(30)

    def end():
        threading.Thread(target=ask, daemon=True).start()
        asked.wait()
        libc.usleep(300_000)
        print(time.monotonic(), flush=True)
        {end}

    {body}
"""
ONCE = "end()"
# Many ends, at the cost of one import.
FORKED = """
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            end()
            break
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != {code}:
            os._exit(99)
    else:
        os._exit({code})
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit(7)", 7), ("raise KeyError('end')", 1), ("os._exit(5)", 5)],
)
@pytest.mark.parametrize(
    "body", [ONCE, pytest.param(FORKED, marks=pytest.mark.slow)], ids=["once", "forked"]
)
def test_the_end_of_the_process_does_not_wait_for_a_look(tmp_path, body, end, code):
    program = tmp_path / "program.py"
    text = textwrap.dedent(PROGRAM).format(
        end=end, body=textwrap.dedent(body).strip().format(code=code)
    )
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=False
    )
    ended = time.monotonic()
    assert done.returncode == code, done.stderr
    assert "terminate" not in done.stderr and "Fatal" not in done.stderr, done.stderr
    if body == ONCE:
        assert ended - float(done.stdout.split()[-1]) < 3


def nested():
    told = []

    def tell():
        seen = look()
        told.append((seen["expected_slow"], seen["expected_slow_for"]))

    @torch_resilient.expect_slow("as a decorator", seconds=30)
    def decorated():
        tell()

    with torch_resilient.expect_slow("checkpoint", minutes=10):
        with torch_resilient.expect_slow("upload\nof it", hours=1, minutes=1):
            with torch_resilient.expect_slow("short", seconds=0.5):
                tell()
            tell()
        tell()
        with pytest.raises(KeyError), torch_resilient.expect_slow("fails", hours=24):
            raise KeyError("inside")
        tell()
    tell()
    decorated()
    tell()
    return told


def test_of_nested_announcements_the_longest_counts(world):
    told = world.start_rank(nested, 0, 1).value()
    what = ["upload of it"] * 2 + ["checkpoint"] * 2 + ["", "as a decorator", ""]
    assert [entry[0] for entry in told] == what
    for (_, left), most in zip(told, [3660, 3660, 600, 600, 0, 30, 0], strict=True):
        assert most - 60 < left <= most if most > 60 else left <= most


@pytest.mark.parametrize(
    ("what", "times"),
    [
        ("checkpoint", {}),
        ("checkpoint", {"minutes": 0}),
        ("checkpoint", {"seconds": -1}),
        ("checkpoint", {"hours": 24, "seconds": 1}),
        ("checkpoint", {"minutes": math.nan}),
        ("checkpoint", {"minutes": math.inf}),
        ("checkpoint", {"minutes": "ten"}),
        ("", {"minutes": 10}),
        (" \n", {"minutes": 10}),
        ("x" * 101, {"minutes": 10}),
        (10, {"minutes": 10}),
    ],
)
def test_nonsense_is_refused_where_it_is_written(what, times):
    with pytest.raises(torch_resilient.ConfigError, match="expect_slow"):
        torch_resilient.expect_slow(what, **times)


def caches(stop, _):
    stop.wait(60)


def spins(_, told):
    """Burns a core at one line, without the GIL."""
    return [hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000) for _ in iter(told.__len__, 1)]


def goes_on(stop, _):
    """Is in another frame ten times a second, and takes next to no time of a core."""

    def deeper(levels):
        if levels and not stop.wait(0.1):
            deeper(levels - 1)

    while not stop.is_set():
        deeper(37)


def look_around():
    """What the process says of itself to others, and to a person on its own host."""
    status = torch_resilient.status()
    return look(), status.get("threads"), str(status)


def trains_in_a_thread(be_late):
    """As a worker of Ray does: the main thread is in join() from the first operation on. Rank 1 is
    late until the test says "go"."""
    stop, told, outcome = threading.Event(), [], []

    def train():
        dist.init_process_group("resilient")
        dist.barrier()
        try:
            if dist.get_rank() == 1:
                be_late(stop, told)
            dist.barrier()
            outcome.append("OK")
        except dist.DistBackendError as error:
            outcome.append(str(error))

    def listen():
        while hear() == "look":
            tell(look_around())
        told.append("go")
        stop.set()

    trainer = threading.Thread(target=train, name="trainer")
    trainer.start()
    threading.Thread(target=listen, daemon=True).start()
    trainer.join()
    return outcome[0]


def await_line(rank):
    """The first line of a rank that waits."""
    deadline = time.monotonic() + 30
    while True:
        lines = [line for line in rank.stderr().splitlines() if " has waited " in line]
        if lines:
            return lines[0]
        assert time.monotonic() < deadline, rank.stderr()
        with pytest.raises(AssertionError, match="said nothing"):
            rank.told(0.1)


def test_a_rank_that_trains_in_a_thread_is_told_by_that_thread(world):
    ranks = world.start(trains_in_a_thread, 2, caches, env={"RESILIENT_WAIT_LOG": "1s"})
    line = await_line(ranks[0])
    assert re.search(r", thread 'trainer' in test_whereabouts\.py:\d+ caches", line), line
    assert "join" not in line and "main thread" not in line
    ranks[1].say("look")
    seen, threads, table = ranks[1].told(30)
    for rank in ranks:
        rank.say("go")
    assert [rank.value() for rank in ranks] == ["OK"] * 2
    assert seen["thread"] == "trainer", seen
    assert re.fullmatch(r"test_whereabouts\.py:\d+ caches", seen["at"]), seen
    assert ", in train" in seen["stack"] and "join" not in seen["stack"], seen
    at = {thread["name"]: thread["at"] for thread in threads}
    assert at["trainer"] == seen["at"] and at["MainThread"].endswith(" trains_in_a_thread")
    assert [thread["name"] for thread in threads if thread["told"]] == ["trainer"]
    row = next(line for line in table.splitlines() if line.startswith("trainer "))
    assert re.search(r"  test_whereabouts\.py:\d+ caches +where this rank is$", row), row


def test_a_trainer_that_spins_at_one_line_is_stalled(world):
    ranks = world.start(trains_in_a_thread, 2, spins, env={"RESILIENT_STALL": "4s"})
    text = ranks[0].value(60)
    assert "[resilient:STALLED] rank 1 (" in text, text
    assert re.search(r"; thread 'trainer' in test_whereabouts\.py:\d+ (spins|<listcomp>)", text), (
        text
    )
    assert "join" not in text
    ranks[1].say("go")
    assert "[resilient:STALLED]" in ranks[1].value()


def test_a_trainer_that_goes_on_while_main_is_in_join_is_not_stalled(world):
    ranks = world.start(trains_in_a_thread, 2, goes_on, env={"RESILIENT_STALL": "4s"})
    with pytest.raises(AssertionError, match="said nothing"):
        ranks[0].told(13)
    ranks[1].say("go")
    assert [rank.value() for rank in ranks] == ["OK"] * 2


def trains_in_main_beside_a_pool():
    """Of the thread that has submitted the last operation: it is idle, and then gone."""
    from concurrent.futures import ThreadPoolExecutor

    dist.init_process_group("resilient")
    dist.barrier()
    pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
    pool.submit(dist.barrier).result()
    idle = named_line()
    pool.shutdown()
    return idle, named_line()


def test_a_thread_that_has_done_its_part_is_not_told_of(world):
    for idle, gone in world.run(trains_in_main_beside_a_pool, 2):
        for seen in (idle, gone):
            assert seen["thread"] == "" and re.fullmatch(
                r"test_whereabouts\.py:\d+ work", seen["at"]
            )


def submits_in_turn():
    """The helper submits and then waits at a line of the program; then the main thread submits."""
    dist.init_process_group("resilient")
    done, stop = threading.Event(), threading.Event()

    def help_out():
        dist.barrier()
        done.set()
        caches(stop, None)

    helper = threading.Thread(target=help_out, name="hel\nper" + "é" * 99)
    helper.start()
    assert done.wait(60)
    seen = [look()]
    dist.barrier()
    seen.append(look())
    stop.set()
    return seen


def test_the_thread_that_submitted_last_is_told_of(world):
    for helper, main in world.run(submits_in_turn, 2):
        assert helper["thread"] == "hel per" + "é" * 28, "on one line, and cut"
        assert re.fullmatch(r"test_whereabouts\.py:\d+ caches", helper["at"]), helper
        assert main["thread"] == ""
        assert re.fullmatch(r"test_whereabouts\.py:\d+ look", main["at"]), main
