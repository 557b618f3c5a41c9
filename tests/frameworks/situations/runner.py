"""Runs one situation with one backend, and says how it went."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import texts

from situations.situation import Command, Place, Situation, plain

CUT_OFF = 60  # Seconds after which a run is cut off; those in which it had no processor are added.
CUT_OFF_MAX = 600
GONE_SECONDS = 4.0  # What may outlive the ranks: a store ends on its own.
KILLED_SECONDS = 30.0
WORDS_MAX = 140
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Outcome:
    """How a run went. `left`: processes that were still there at its end."""

    seconds: float
    codes: list
    trained: list
    failures: list
    text: str
    left: list

    def hangs(self) -> bool:
        return None in self.codes


def begin_anew() -> None:
    """In the child: a process group, and signals as a terminal has them."""
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Running:
    """The processes of a run. Their output goes to files, so that nobody waits for a reader."""

    def __init__(self, commands: list[Command]):
        self.processes, self._files = [], []
        for command in commands:
            stdin, output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            stdin.write(command.stdin.encode())
            stdin.seek(0)
            self._files += [stdin, output]
            self.processes.append(
                subprocess.Popen(
                    command.arguments,
                    env=command.environment,
                    cwd=command.folder,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=begin_anew,
                )
            )

    def signal(self, number: int) -> None:
        """To each process group, as a terminal does."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def wait(self, began: float, cut_off: float, folder: Path) -> None:
        """Until all have ended, or the cut-off, which a busy machine puts off."""
        allowed = cut_off
        while time.monotonic() < began + allowed:
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(began + allowed - time.monotonic(), 0.001))
            if None not in [process.poll() for process in self.processes]:
                return
            allowed = min(cut_off + held_up(folder), CUT_OFF_MAX)

    def output(self) -> str:
        found = []
        for file in self._files[1::2]:
            size = os.fstat(file.fileno()).st_size
            found.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return "\n".join(found)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for file in self._files:
            file.close()


def members(folder: Path) -> dict[int, str]:
    """The processes whose environment names the folder, also those with a session of their own."""
    mark = f"SITUATION_FOLDER={folder}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")[:120]
    found.pop(os.getpid(), None)
    return found


def held_up(folder: Path) -> float:
    """The longest that the main thread of one of them has waited for a processor."""
    waited = [0.0]
    for pid in members(folder):
        with contextlib.suppress(OSError):
            times = Path(f"/proc/{pid}/schedstat").read_text().split()
            waited.append(int(times[1]) / 1e9)
    return max(waited)


def end_members(folder: Path, seconds: float) -> list[str]:
    """Waits for them to end, kills those that do not, and says which."""
    until = time.monotonic() + seconds
    while (left := members(folder)) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + KILLED_SECONDS
    while (alive := members(folder)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive, f"killed {KILLED_SECONDS} s ago, and still there: {alive}"
    return sorted(left.values())


def run(situation: Situation, backend: str, cut_off: float = CUT_OFF) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="situation-"))
    folder.chmod(0o777)  # Some ranks are another user.
    place = Place(folder, backend, situation.taken_over)
    running = None
    try:
        if situation.prepare:
            situation.prepare(place)
        began = time.monotonic()
        running = Running((situation.start or plain)(situation, place))
        if situation.act:
            situation.act(place, running)
        running.wait(time.monotonic(), cut_off, folder)
        seconds = time.monotonic() - began
        codes = [process.poll() for process in running.processes]
        output = running.output()
        failures = place.marks("failed")
        running.close()
        left = end_members(folder, GONE_SECONDS if None not in codes else 0)
        trained = place.marks("trained")
        return Outcome(seconds, codes, trained, failures, output, left)
    finally:
        if running:
            running.close()
        end_members(folder, 0)
        shutil.rmtree(folder, ignore_errors=True)


def without_places(text: str) -> str:
    """Without what is of this machine alone."""
    for place, name in ((sys.prefix, "PREFIX"), (sys.base_prefix, "PREFIX"), (str(ROOT), "ROOT")):
        text = text.replace(place, name)
    return text


def error_of(outcome: Outcome) -> str:
    """The first line of the error: what a rank has told, else the last exception that was shown."""
    return without_places(_error_of(outcome))


def _error_of(outcome: Outcome) -> str:
    if outcome.failures:
        return outcome.failures[0]
    lines = outcome.text.splitlines()
    found = [match[1] for line in lines if (match := texts.EXCEPTION.match(line))]
    said = [line for line in lines if line.strip()]
    if found or said:
        return (found or said)[-1].strip()
    return f"exit code {max(code or 0 for code in outcome.codes)}, without a text"


def words(outcome: Outcome, situation: Situation, cut_off: float = CUT_OFF) -> str:
    """The outcome for the page."""
    if outcome.hangs():
        return f"hangs (cut off after {cut_off:g} s)"
    enough = len(outcome.trained) >= situation.trained()
    bad = [code for code in outcome.codes if code]
    if not bad and enough:
        return f"trains, {outcome.seconds:.1f} s"
    if not bad:
        return f"exit code 0, but {len(outcome.trained)} of {situation.trained()} trained"
    text = re.sub(r"[|`]", "'", texts.shown(error_of(outcome)))
    text = text if len(text) <= WORDS_MAX else text[: WORDS_MAX - 1] + "…"
    ended = {code for code in bad if code < 0}
    how = f" by {signal.Signals(-min(ended)).name}" if ended else ""
    before = "trains, then ends" if enough else "ends"
    if ended and not outcome.failures:
        return f"{before}{how}, {outcome.seconds:.1f} s"
    return f"{before}{how}: `{text}`, {outcome.seconds:.1f} s"


def fault(situation: Situation, outcome: Outcome) -> str:
    """What is not right with it, or nothing."""
    if outcome.hangs():
        return "it hangs"
    if outcome.left:
        return without_places(f"processes are left: {outcome.left}")
    if situation.ends and situation.ends not in "\n".join([*outcome.failures, outcome.text]):
        return f"no word of {situation.ends!r}: {error_of(outcome)}"
    if not situation.ends and len(outcome.trained) != situation.trained():
        how_many = f"{len(outcome.trained)} of {situation.trained()} trained"
        return f"{how_many}: {error_of(outcome)}" if any(outcome.codes) else how_many
    if situation.codes:
        allowed = set(outcome.codes) <= set(situation.codes)
    else:
        allowed = all(bool(code) == bool(situation.ends) for code in outcome.codes)
    return "" if allowed else f"exit codes {outcome.codes}: {error_of(outcome)}"
