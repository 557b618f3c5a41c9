"""agree: one decision of all ranks, through the store."""

import functools
import operator
from datetime import timedelta

from torch_resilient import _api, _errors
from torch_resilient._say import say

_BITS = 64


def agree(value):
    """What all ranks of the world say together: `if torch_resilient.agree(loss_is_finite):`.

    Of bools True if every rank says True; of ints (of at most 64 bits, with a sign) the bits that
    are set on every rank. Every rank calls it, and gets the same answer or raises the same failure:
    the store decides once all have said what they say. A rank that is late is waited for as long as
    it lives. Nothing of it goes over the links between the ranks.

    Belongs to its generation: after a failure nobody hears of what was asked before it. One thread
    of a rank at a time. A rank that is interrupted in it (Ctrl-C), or has not reached the store for
    RESILIENT_BUDGET, may raise where the others have an answer.
    """
    world = _api.current_world()
    packed = pack(value, world)
    # Read before the failure is looked for: what follows one that is not acknowledged is not ours.
    generation = world.session.membership()["generation"]
    number = world.agreements[1] + 1 if world.agreements[0] == generation else 1
    place = f"agree/{generation}/{number}", world.rank, world.world_size
    votes = collect(
        world,
        lambda timeout: world.store.agree(*place, packed, generation, timeout),
        f"agree() number {number} of generation {generation}",
        "none of them was lost",
    )
    world.agreements = generation, number
    return combine(votes)


def collect(world, ask, what, who):
    """What each rank says: ask(timeout), again and again. A line each time RESILIENT_WAIT_LOG has
    passed; `who`: of those that are waited for."""
    interval = world.settings["wait_log"]
    waited = 0
    while True:
        try:
            return ask(timedelta(seconds=interval))
        except _errors.StoreTimeoutError as error:
            if error.code != "TIMEOUT":
                raise
            waited += interval
            late = str(error).rpartition(": ")[2]  # "2 of 3 arrived; missing ranks 2"
        if world.settings["log"].rpartition(":")[2] not in ("off", "error"):
            say(f"[resilient] rank {world.rank} has waited {waited:.0f} s in {what}: {late}; {who}")


def pack(value, world):
    """A vote, as text: with the elastic run that it belongs to."""
    run = world.whereabouts.text()
    if isinstance(value, bool):
        return f"bool {value:d} {run}".encode()
    if isinstance(value, int) and value.bit_length() <= _BITS:
        return f"int {value} {run}".encode()
    raise _errors.ConfigError(
        f"agree({value!r:.200}): it takes a bool, or an int of at most {_BITS} bits, and was given"
        f" {type(value).__name__}; bool(...) or int(...) makes one of what is like it"
    )


def combine(votes):
    """What the votes say together. All ranks have the same ones here, so that all raise where these
    do not go together."""
    said = [vote.decode().split(" ", 2) for vote in votes]
    runs = [run for *_, run in said]
    if len(set(runs)) > 1:
        raise _errors.ConfigError(
            f"agree() was called at different places of the program, by rank: {runs}; a process"
            " that replaces a lost rank begins the program from its start, so call it where all"
            " ranks are in the same elastic run"
        )
    kinds = [kind for kind, *_ in said]
    if len(set(kinds)) > 1:
        raise _errors.ConfigError(
            f"agree() was given a bool on some ranks and an int on others, by rank: {kinds}"
        )
    bits = functools.reduce(operator.and_, (int(number) for _, number, _ in said))
    return bool(bits) if kinds[0] == "bool" else bits
