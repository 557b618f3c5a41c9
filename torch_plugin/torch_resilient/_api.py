"""The small functions of the package: the session of this process, looked at and acknowledged."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_resilient import _address, _errors, _names, _native, _resize, _server, _worlds

MIN_WORLD = "RESILIENT_MIN_WORLD"
_STORE_TIMEOUT = timedelta(minutes=5)
_SLOW_MAX_HOURS = 24
_SLOW_TEXT_MAX = 100


def current_world():
    """The world of torch's default group, kept together by the store. ConfigError without one."""
    world = _any_world()
    if world.reconfigurable is not None:
        raise _errors.ConfigError(
            "this world was made with enable_reconfigure=True, so its members are those of the last"
            " dist._reconfigure(uuid, handles), and nothing else changes or rebuilds it"
        )
    return world


def _any_world():
    world = _worlds.registry.current()
    if world is None:
        raise _errors.ConfigError(
            "there is no session: call torch.distributed.init_process_group('resilient') first"
        )
    return world


def failure():
    """The first cause of a failure that waits for an acknowledgement, as an exception; or None."""
    world = _worlds.registry.current()
    return None if world is None else world.member_session().failure()


def membership():
    """state, life, round, generation, fence_token, rank and members (rank, host, pid, incarnation).

    fence_token is a positive integer below 2**63 for writers to something outside, such as a store
    of checkpoints that several lives of a job share: take it when the data is taken, write it with
    the data, and let what is written to refuse a token below the highest it has accepted. It is the
    same on all ranks and grows with each generation, over the lives of the job and over stores that
    begin anew. It is that of the generation that ran here last: until a failure is acknowledged
    (rebuild(), elastic) it stays the old one, also when the next generation is built already.
    """
    return _any_world().member_session().membership()


def last_incident():
    """The latest failure and when its phases ended (unix time): generation, code, cause, known,
    aborted, joined, rebuilt, running; None before the first."""
    world = _worlds.registry.current()
    return None if world is None else world.member_session().last_incident()


def op_log(group=None):
    """What this rank did in a group last: a dictionary for each of the latest 2,000 operations, the
    oldest first.

    id (counts from 1), seq (in the order of the group; point-to-point counts apart; 0: refused),
    name, dtype, count, state ("running", "completed", "failed"), call_site ("train.py:301 step"),
    started, ended (unix time; 0 while it runs) and failure. `group`: default the world.
    """
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise _errors.ConfigError("there is no such group on this rank")
    backend = group._get_backend(torch.device("cpu"))
    return _native.load().op_log(backend)


def rebuild(mode="replace", timeout=None, min_world=None):
    """Acknowledges a failure and returns the new membership once the next generation is built.

    "replace" waits for lost seats to be filled for RESILIENT_SEAT_WAIT. Then, with `min_world`, the
    world goes on without them, with so many ranks at least: they are numbered anew, in their order,
    torch.distributed.group.WORLD has the new rank and size (before torch 2.14 it is another object
    then, and the one of before raises), and groups made before raise until they are made anew.
    Otherwise the first cause is raised. "shrink" does not wait, and 1 is enough.
    All ranks that are left must want to shrink. `min_world` is RESILIENT_MIN_WORLD if not said.
    Where nothing has failed the membership stays as it is, unless a member has left: then the
    generation ends on all ranks, and the next one is without that member.

    `timeout` (seconds or timedelta) bounds the machine's part; default RESILIENT_BUDGET.
    """
    world = current_world()
    recover(world, wish(mode, min_world), timeout)
    return world.session.membership()


def wish(mode, min_world):
    """What a session's rebuild is to want of the world, as its arguments. The one place that reads
    RESILIENT_MIN_WORLD."""
    if mode not in ("replace", "shrink"):
        raise _errors.ConfigError(f"mode={mode!r} is unknown: 'replace' or 'shrink'")
    if min_world is None and (text := os.environ.get(MIN_WORLD)):
        min_world = _names.number(text)
        min_world = f"{MIN_WORLD}={text}" if min_world is None else min_world
    if mode == "shrink" and min_world is None:
        min_world = 1
    if min_world is None:
        return {}
    check_size("min_world", min_world)
    return {"min_world": min_world, **({"seat_wait": 0.0} if mode == "shrink" else {})}


_SIZES = {"min_world": "least", "max_world": "largest"}


def check_size(name, value):
    """ConfigError for what is no size of a world to go on with."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _errors.ConfigError(
            f"{name}={value!r:.200}: it is the {_SIZES[name]} number of ranks to go on with, from 1"
        )


def recover(world, wanted, timeout=None):
    """Acknowledges, waits for the next generation, and follows its numbers. `wanted`: a wish."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    world.session.rebuild(timeout, **wanted)
    _resize.follow(world)


def expect_slow(what, *, seconds=0, minutes=0, hours=0):
    """Announces that the program may show no progress: `with expect_slow("checkpoint",
    minutes=10):`, or as a decorator.

    The announcement ends with the block, or after the time, whichever comes first. Of nested ones
    the one that lasts longest counts. `what` (at most 100 characters) is shown to those who wait.
    The time is at most 24 hours. Needs no session; it counts for all of this process, and not for
    processes forked from it.
    """
    if not isinstance(what, str) or not what.strip() or len(what) > _SLOW_TEXT_MAX:
        raise _errors.ConfigError(
            f"expect_slow({what!r:.200}): the first argument says what is slow, in 1 to"
            f" {_SLOW_TEXT_MAX} characters, as in expect_slow('checkpoint', minutes=10)"
        )
    try:
        duration = timedelta(seconds=seconds, minutes=minutes, hours=hours)
    except (TypeError, ValueError, OverflowError) as error:
        raise _errors.ConfigError(
            f"expect_slow({what!r}, seconds={seconds!r}, minutes={minutes!r}, hours={hours!r}):"
            f" {error}"
        ) from None
    if not timedelta() < duration <= timedelta(hours=_SLOW_MAX_HOURS):
        raise _errors.ConfigError(
            f"expect_slow({what!r}) for {duration}: give seconds=, minutes= or hours=, together"
            f" more than nothing and at most {_SLOW_MAX_HOURS} hours"
        )
    return _expectation(what, duration.total_seconds())


@contextlib.contextmanager
def _expectation(what, seconds):
    native = _native.load()
    token = native.expect_slow(" ".join(what.split()), seconds)
    try:
        yield
    finally:
        native.end_expect_slow(token)


def _store_class():
    """A class made when first asked for: its base is in the extension."""

    class Store(_native.load().Store):
        """A c10d Store on a server of ours: `Store("host:port")`, like TCPStore.

        Its keys belong to the job, not to one init. `job`: the name of the job on a shared server;
        default the address. `timeout` (seconds or timedelta) bounds each call that waits, strictly.
        Threads may share it: one that waits does not hold up another. `token_file`: with the token
        that the server asks for; default RESILIENT_TOKEN_FILE. `tls`: the files of certificate, key
        and CA; default RESILIENT_TLS_CERT, RESILIENT_TLS_KEY, RESILIENT_TLS_CA.
        """

        def __init__(self, address, timeout=_STORE_TIMEOUT, job="", token_file=None, tls=None):
            self.addresses = _address.given(address).addresses
            self.job = job or address
            if not isinstance(timeout, timedelta):
                timeout = timedelta(seconds=timeout)
            if token_file is None:
                token_file = os.environ.get(_server.TOKEN_FILE, "")
            self.token_file = os.fspath(token_file)
            if tls is None:
                tls = (os.environ.get(name, "") for name in _server.TLS_FILES)
            self.tls = tuple(os.fspath(path) for path in tls)
            super().__init__(self.addresses, self.job, timeout, self.token_file, self.tls)

        def clone(self):
            """A store for the same keys with a connection and session of its own."""
            return Store(
                ",".join(self.addresses),
                self.timeout,
                job=self.job,
                token_file=self.token_file,
                tls=self.tls,
            )

        def __repr__(self):
            return f"torch_resilient.Store({','.join(self.addresses)!r}, job={self.job!r})"

    Store.__module__ = "torch_resilient"
    Store.__qualname__ = "Store"
    return Store


def __getattr__(name):
    if name != "Store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["Store"] = _store_class()
    return globals()["Store"]
