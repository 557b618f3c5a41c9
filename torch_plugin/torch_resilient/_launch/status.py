"""The line of status on a terminal."""

import os
import time

SECONDS = 1.0  # From one to the next.


def is_wanted(descriptor):
    """Whether that is a terminal which can take a line back."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"


def width(descriptor):
    """Columns; the last one stays free, as some terminals go to the next line behind it."""
    try:
        return max(os.get_terminal_size(descriptor).columns - 1, 1)
    except OSError:
        return 79


def text(states, restarts, most, seconds, now=""):
    """states: {state: ranks}, in the order of the line. seconds: since the start. now: what the
    launcher does."""
    parts = [f"{state} {ranges(ranks)}" for state, ranks in states.items() if ranks]
    parts.append(f"restarts {restarts} of {most}")
    parts.append(time.strftime("%H:%M:%S", time.gmtime(seconds % 86400)))
    if seconds >= 86400:
        parts[-1] = f"{int(seconds // 86400)} d {parts[-1]}"
    return " | ".join(["resilient-run", *([now] if now else []), *parts])


def flapping(held, backoff, at_once, all_anew):
    """Which of those that are held back are so because they end again and again, more than
    `at_once` times; `all_anew`: all ranks are started anew each time."""
    if all_anew:
        ends = {"the job": backoff.ends(None)} if held else {}
    else:
        ends = {f"rank {rank}": backoff.ends(rank) for rank in sorted(held)}
    told = [f"{who} ended {times} times" for who, times in ends.items() if times > at_once]
    return f"flapping: {', '.join(told)}" if told else ""


def ranges(ranks):
    """ "0-3,5" of 0, 1, 2, 3, 5."""
    found = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
