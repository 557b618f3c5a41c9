"""The verbs of MPI's User Level Failure Mitigation, for the world of this process.

`revoke` ends the generation for all ranks, `failed` tells which members are known to be lost,
`agree` decides among those that are left, and `shrink` goes on with them. For programs that
recover in their own way; `torch_resilient.elastic` and `rebuild` need none of it.
"""

from typing import NamedTuple

import torch

from torch_resilient import _agree, _api, _errors, _native

_LOSSES = ("RANK_LOST", "LEFT")  # Behind other causes all members are alive.


def revoke(reason=None):
    """Ends this generation on all ranks, whatever they are in, by the word of this one: operations
    that run and all later ones raise CommError (COMM_FAILED, with this rank and `reason`) on every
    thread and group until each rank acknowledges it, with `rebuild()` or `shrink()`. Nobody is
    lost by it: the next generation has the same members.

    Returns once it holds on this rank; at once where a failure waits for its acknowledgement
    already. STORE_LOST when the store does not answer within RESILIENT_BUDGET: the world's group
    is at an end here, while others may go on. ConfigError without a session.
    """
    if reason is not None and not isinstance(reason, str):
        raise _errors.ConfigError(
            f"revoke({reason!r:.200}): the reason is a text, which all ranks are shown"
        )
    world = _api.current_world()
    session = world.session
    if session.failure() is not None:
        return
    why = "revoke() was called" if reason is None else f"revoke(): {' '.join(reason.split())}"
    backend = world.process_group._get_backend(torch.device("cpu"))
    _native.load().abort_group(backend, why)
    budget = world.settings["budget"]
    if session.await_failure(budget) is None:
        raise _errors.StoreLostError(
            f"rank {world.rank} has ended its own part of generation"
            f" {session.membership()['generation']} by {why}, and the store at"
            f" {','.join(world.addresses)} has not confirmed it within {budget:.0f} s"
            " (RESILIENT_BUDGET): other ranks may go on; see whether the store runs, then call"
            " rebuild()"
        )


def failed():
    """The members that this rank knows to be lost since the generation that it ran last: a list of
    dictionaries, by rank; empty when nothing waits for an acknowledgement.

    Each has rank (in that generation), host, pid, incarnation, and code (RANK_LOST or LEFT), how
    ("rank 2 (host a, pid 7) was killed by signal 9 ...") and known (unix time at which this rank
    heard of it). One that the next generation is without and of which no more was heard has None
    for these three. Looks only at what this rank has heard, so others may know more or less;
    sends nothing, and raises for no failure. ConfigError without a session.
    """
    session = _api.current_world().session
    if session.failure() is None:
        return []
    known = session.acknowledged()
    now = session.membership()
    losses = _losses(session, known["generation"])
    alive = {member["incarnation"] for member in now["members"]}
    entries = []
    for member in known["members"]:
        loss = losses.get((member["host"], member["pid"]))
        replaced = now["generation"] > known["generation"] and member["incarnation"] not in alive
        if loss is None and not replaced:
            continue
        code, text, time = loss or (None, None, None)
        entries.append({**member, "code": code, "how": text, "known": time})
    return entries


def _losses(session, generation):
    """What ended this generation and those behind it, where that was a loss: by host and pid."""
    losses = {}
    after = 0
    while (event := session.await_event(after, 0)) is not None:
        after = event["number"]
        if event["event"] == "closed":
            break
        fenced = event["event"] == "fenced" and event["generation"] >= generation
        if fenced and event["code"] in _LOSSES:
            told = event["code"], event["text"], event["time"]
            losses.setdefault((event["host"], event["pid"]), told)
    return losses


class Agreement(NamedTuple):
    """What came of an `agree`: the same on every rank that has it."""

    value: bool | int
    missing: tuple  # Ranks of that generation that had no part in it.


def agree(value):
    """What the members of this generation that are left say together, also when others fail
    meanwhile and when the generation is over: revoked, or fenced for a loss.

    `value`: of bools the answer is True if every one says True; of ints (at most 64 bits, with a
    sign) the bits that are set on every one. Returns an Agreement: `value`, and `missing`, the
    ranks whose values are not in it. The store decides at once for all, when each member of the
    generation that this rank ran last has called it, is lost, has left, or has gone on to a later
    generation by `rebuild()` or `shrink()`: who has an answer has the same. It acknowledges
    nothing: behind it operations raise as before.

    A rank that is late is waited for as long as it lives, and named every RESILIENT_WAIT_LOG; so
    every rank calls it, as often as the others, before it goes on. One thread of a rank at a time.
    Raises no failure of others. FencedError when this process itself was given up, STORE_LOST
    when the store was not reached for RESILIENT_BUDGET, ConfigError for other types, where some
    say bools and others ints, and without a session. A rank that is interrupted (Ctrl-C) has taken
    no part, unless the answer was there already.
    """
    world = _api.current_world()
    packed = _agree.pack(value, world)
    known = world.session.acknowledged()
    generation = known["generation"]
    before = world.survivor_agreements
    number = before[1] + 1 if before[0] == generation else 1
    place = f"ulfm/{generation}/{number}", known["rank"], len(known["members"])
    votes = _agree.collect(
        world,
        lambda timeout: world.store.agree_among_survivors(*place, packed, generation, timeout),
        f"ulfm.agree() number {number} of generation {generation}",
        "those of them that are alive are waited for",
    )
    world.survivor_agreements = generation, number
    missing = tuple(rank for rank, vote in enumerate(votes) if not vote)
    return Agreement(_agree.combine([vote for vote in votes if vote]), missing)


def shrink(min_world=1, timeout=None):
    """The members that are left go on without the lost ones, numbered anew in their order; with all
    members if none was lost. Returns the membership, as `membership()`.

    This is `rebuild(mode="shrink", min_world=min_world, timeout=timeout)`: all that are left must
    call it, and the first cause is raised where they are fewer than `min_world`. Returns at once
    when there is no failure. TIMEOUT behind `timeout` (seconds or timedelta; default
    RESILIENT_BUDGET).
    """
    return _api.rebuild(mode="shrink", timeout=timeout, min_world=min_world)
