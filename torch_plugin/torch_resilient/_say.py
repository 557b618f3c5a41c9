"""What the package says to a person."""

import sys


def say(line):
    """One line on stderr, in one write: ranks may share a pipe, where print's own end of line could
    come after another rank's words."""
    print(line + "\n", end="", file=sys.stderr, flush=True)
