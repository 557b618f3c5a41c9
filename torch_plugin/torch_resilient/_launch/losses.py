"""What the ranks that have ended say of another start."""

import os

_DO_NOT_RESTART = os.EX_CONFIG  # 78: what a worker says by this would be the same once more.


class Losses:
    """The ends of the ranks of one node so far. Owner: Launcher."""

    def __init__(self, holds_all):
        """`holds_all`: the commits of the job are with the ranks of this node, or nowhere."""
        self._holds_all = holds_all
        self._ends = set()  # (cause, commit) that have been told.
        self._committed = False  # Some rank has made a commit.

    def why_in_vain(self, dead, exit_code, others):
        """Why the job is to end with `dead`, which has ended badly, as the end of a sentence; None:
        it may go on. `others`: the workers that still run."""
        if exit_code == _DO_NOT_RESTART:
            return ", by which it says that a restart is of no use"
        self._committed |= dead.has_committed()
        cause, commit = dead.end()
        if cause is not None and commit > 0:
            if (cause, commit) in self._ends:
                return (
                    f"; {cause} has ended a rank twice at commit {commit}, and another start would"
                    " end the same way"
                )
            self._ends.add((cause, commit))
        if self._holds_all and self._committed and not any(one.has_committed() for one in others):
            return (
                "; no rank is left that has a commit, and the job never begins again at its first"
                " step by itself: start it anew"
            )
        return None
