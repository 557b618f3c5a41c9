"""How long a start is held back."""

FIRST_SECONDS = 0.5
LAST_SECONDS = 30.0
_QUICK_SECONDS = 1.0  # What lives shorter than this counts as a failed start.


class Backoff:
    """Nothing at the first time; more and more for what dies in its start."""

    def __init__(self):
        self._next = {}  # Who -> seconds.

    def pause(self, who, lived):
        """Seconds until `who`, which has lived for `lived` seconds, may be started again."""
        if lived >= _QUICK_SECONDS:
            self._next.pop(who, None)
            return 0.0
        pause = self._next.get(who, 0.0)
        longer = pause * 2 if pause else FIRST_SECONDS
        self._next[who] = min(longer, LAST_SECONDS)
        return pause
