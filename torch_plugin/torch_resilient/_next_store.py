"""Goes on at the store that answers now, after the one that a world had was lost.

A store that is lost takes the membership with it; what the ranks have committed is in their own
memory. So the same ranks meet once more, as in a new init: at the same address, where an empty
store may answer, at another address of the list, or at a store that they start. There is never a
second world: it takes all of the ranks, or, where the program goes on with fewer, those that have
come to the one store that there can be, or more than half of them.
"""

import torch.distributed as dist

from torch_resilient import _address, _api, _errors, _init, _native

OUT_OF_REACH = ("STORE_LOST", "OUTCOME_UNKNOWN")  # What a call says that did not reach the store.
# The ranks hear of the loss apart by RESILIENT_BUDGET and a lease; then they look for each other.
_MEET_SECONDS = 30.0


def is_out_of_reach(world):
    """Whether no address of the world's store answers. Then the session may have no failure: ranks
    that reach each other need no store."""
    access = _address.access_of(world.settings)
    probe = _native.load().probe_store
    for address in world.addresses:
        try:
            probe(address, world.job, _address.PROBE_SECONDS, **access)
        except _errors.ConnectError:
            continue
        return False
    return True


def begin_again(world, cause, groups_before, min_world):
    """The world of the same ranks at the store that is found. `groups_before`: how many groups the
    program has made outside of the function that is run again, which would be no more. `min_world`:
    with how many ranks the program goes on, where some do not come; 0: with all only.
    StoreLostError: why it is the end."""
    if groups_before:
        raise _errors.StoreLostError(
            f"{_why(cause)}; elastic goes on at another store only where all groups are made"
            f" inside the function that it runs, and {groups_before} were made before"
        ) from cause
    seconds = world.settings["budget"] + max(world.settings["seat_wait"], _MEET_SECONDS)
    _init.log_line(
        world.settings,
        world.rank,
        "warn",
        f"the store is lost ({_why(cause)}); looks for the one to go on with, at"
        f" {', '.join(world.addresses)}, and for the other ranks there, for {seconds:.0f} s",
    )
    dist.destroy_process_group()
    try:
        _init.begin_again(world, seconds, _least(world, min_world))
    except _errors.ResilientError as error:
        raise _errors.StoreLostError(
            f"{_why(cause)}; the ranks did not meet at another store within {seconds:.0f} s:"
            f" {_text(error)}"
        ) from cause
    found = _api.current_world()
    found.whereabouts = world.whereabouts  # They are where they were in the program.
    fewer = found.world_size < world.world_size
    who = f"{found.world_size} of {world.world_size} ranks" if fewer else "the ranks"
    text = f"{who} have met again at the next store; training goes on from their commits"
    _init.log_line(found.settings, found.rank, "warn", text)
    return found


def _least(world, min_world):
    """Where ranks that do not reach each other may find two stores, more than half of them."""
    if min_world and len(world.addresses) > 1:
        min_world = max(min_world, world.world_size // 2 + 1)
    return min(min_world, world.world_size)


def _why(cause):
    if cause.code in OUT_OF_REACH:
        return _text(cause)
    return f"no store answers any more; {_text(cause)}"  # A peer's goodbye.


def _text(error):
    """Without the code that it begins with."""
    return str(error).removeprefix(f"[resilient:{error.code}] ")
