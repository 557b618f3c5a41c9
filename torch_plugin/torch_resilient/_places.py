"""Where in its program a rank is: in which elastic run, and with which State.

A process that takes a lost rank's seat begins the program from its start. It is in its first
elastic run while the others may be in a later one, and both call the same functions there. What
ranks exchange, and the names of what they keep in the store, therefore say where the rank is.
"""

from typing import NamedTuple


class Whereabouts:
    """Counts the elastic runs of a world and the States that are first used in each.

    Equal on all ranks that have come the same way through the program; what a run counts is counted
    from its beginning again whenever its function is called again. Owner: World. Thread: the one
    that uses the States.
    """

    def __init__(self):
        self.runs = 0  # How many have begun.
        self._active = ()  # (number, function) of those that have not ended, the outer one first.
        self._states = 0  # First used since the newest run began.

    def begin_run(self, function):
        """Returns the number of the run, from 1."""
        self.runs += 1
        self._active += ((self.runs, function),)
        self._states = 0
        return self.runs

    def begin_again(self, number):
        """The function of this run is called (again): what ran inside it has not been yet."""
        self.runs = number
        self._states = 0

    def entered(self):
        """The State of the run has been used. It has its name from now, or from before."""
        self._states = max(self._states, 1)

    def end_run(self):
        self._active = self._active[:-1]

    def identify_state(self):
        """A name for a State that is used for the first time, unique in this world."""
        self._states += 1
        return self.runs, self._states

    def present(self):
        return self.runs, self._active

    def text(self):
        if self._active:
            return f"in elastic run {self._active[-1][0]}"
        return f"after elastic run {self.runs}" if self.runs else "outside of elastic"


class Place(NamedTuple):
    """What ranks tell each other before they load anything."""

    runs: int  # How many elastic runs have begun.
    active: tuple  # (number, function) of those that have not ended.
    state: tuple  # Its name by identify_state.
    names: tuple  # Of its replicated values.
    made_at: str  # Where the program made the State; it may differ by rank.

    def same(self, other):
        numbers = [tuple(number for number, _ in place.active) for place in (self, other)]
        mine = self.runs, numbers[0], self.state, sorted(self.names)
        return mine == (other.runs, numbers[1], other.state, sorted(other.names))

    def __str__(self):
        number = self.state[1]
        which = f"State number {number} used in it" if number > 1 else "its State"
        values = ", ".join(self.names) or "no replicated values"
        if self.active:
            run, function = self.active[-1]
            where = f"in elastic run {run} ({function})"
        elif self.runs:
            where = f"after elastic run {self.runs}"
        else:
            where = "outside of elastic"
        return f"{where}, with {which} ({values}; made at {self.made_at})"


def difference(places):
    """In which places the ranks are, as a text for all; empty where they are at the same one."""
    if all(place.same(places[0]) for place in places):
        return ""
    ranks_at = {}
    for rank, place in enumerate(places):
        ranks_at.setdefault(str(place), []).append(rank)
    where = "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in ranks_at.items())
    return (
        f"the ranks are not at the same place of the program: {where}. Nothing was loaded. A"
        " process that replaces a lost rank begins the program from its start, and cannot be"
        " brought past a run or a State that the others have finished. Use one State and one"
        " elastic run for all of it: keep the number of the fold or phase in the State, and loop"
        " over these inside the function that elastic runs"
    )


def _ranks(ranks):
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
