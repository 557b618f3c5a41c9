"""How long a start is held back."""

STEADY_SECONDS = 60.0
_FIRST_SECONDS = 0.5
_LAST_SECONDS = 30.0


class Backoff:
    """Nothing at first; more and more for what ends again and again soon after its start.

    at_once: how many starts in a row are not held back. steady: seconds of a life after which all
    begins anew.
    """

    def __init__(self, at_once, steady=STEADY_SECONDS):
        self._at_once = at_once
        self._steady = steady
        self._ends = {}  # Who -> ends in a row, each in less than `steady` of its start.

    def ended(self, who, lived):
        """Seconds until `who`, which has lived for `lived` seconds, may be started again."""
        if lived >= self._steady:
            self._ends.pop(who, None)
            return 0.0
        self._ends[who] = self.ends(who) + 1
        held = self._ends[who] - self._at_once
        # 2 ** 6 times the first one is the last one already.
        return min(_FIRST_SECONDS * 2 ** min(held - 1, 6), _LAST_SECONDS) if held > 0 else 0.0

    def ends(self, who):
        """How often it has ended in a row; 0 after a long life."""
        return self._ends.get(who, 0)
