"""torchrun --rdzv-backend=resilient: how the agents of a job find each other, through a store of
ours.

Each agent is present by a key that lives as long as its lease: who is there is said by the store,
and no clock of another host is read. All else is one value that the agents change by compare_set:
the round, who is in it, who waits. What an agent makes of it is a pure function (`enter`).

The store is the running one at --rdzv-endpoint (or RESILIENT_STORE), or one that the first agent on
the host of that address starts, as ranks do. The workers of a round use the same store
(RESILIENT_STORE); the address in MASTER_ADDR and MASTER_PORT is a free one of each round, for
workers that use other backends.
"""

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from torch_resilient import _address, _api, _errors, _init, _native, _reach, _server

NAME = "resilient"
DEFAULT_PORT = 29400  # torchrun's own, for an endpoint without one.
JOIN_SECONDS = 600
LAST_CALL_SECONDS = 30
_STATE = "state"
_PRESENT = "agent/"
_ROUND = "round/"
_POLL_SECONDS = 0.1
_LOOK_TIMEOUT = timedelta(seconds=2)  # For one answer; the workers are not looked after meanwhile.
_AGENT_TIMEOUT = timedelta(seconds=60)  # For what agents of a round tell each other.


def handler_creator():
    """Entry point of the group torchrun.handlers."""
    return Handler


@dataclass(frozen=True)
class State:
    """What the agents of a job agree on. `running`: the round is complete, its members are ranked
    in their order; until then they gather. Agents are named by random ids, new for each process."""

    round: int = 0
    running: bool = True  # Round 0 has no members: it is over.
    members: tuple = ()
    waiting: tuple = ()
    closed: bool = False

    @staticmethod
    def parse(text):
        if not text:
            return State()
        fields = json.loads(text)
        return State(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()},
        )

    def text(self):
        return json.dumps(asdict(self))


def enter(state, me, seen, alive, most):
    """The state that an agent wants which is to take part in a round later than `seen`.

    `alive`: who is present. A round that runs ends when a member of it asks for the next, which all
    members notice; anybody else waits until then. Nobody waits for the dead.
    """
    living = set(alive) | {me}
    if state.closed and me not in state.members and living == {me}:
        state = replace(state, closed=False, running=True, members=())  # Of a run that is over.
    members = tuple(one for one in state.members if one in living)
    waiting = tuple(one for one in state.waiting if one in living)
    if state.running and me in members and state.round > seen:
        return state  # Admitted.
    if state.running and (me in members or not members):
        number, members = max(state.round, seen) + 1, ()
        state = replace(state, round=number, running=False)
    elif me in members:
        return replace(state, members=members, waiting=waiting)
    if state.running or len(members) == most:
        waiting = waiting if me in waiting else (*waiting, me)
        # Of a round that runs the dead stay, for its members to notice.
        return replace(state, members=state.members if state.running else members, waiting=waiting)
    members = (*members, me)
    waiting = tuple(one for one in waiting if one != me)
    return replace(state, members=members, waiting=waiting, running=len(members) == most)


def newcomers(state, seen, alive, most):
    """Why the round `seen` should end, as a number of agents: others wait and there is room, a
    member is gone, or the next round has begun. 0: it should not."""
    if state.closed:
        return 0  # The others are finishing; so will this one.
    if state.round != seen:
        return 1
    lost = sum(one not in alive for one in state.members)
    room = most - len(state.members) + lost
    return max(lost, min(room, sum(one in alive for one in state.waiting)))


@dataclass
class _Line:
    """An agent's connections to one server: the keys, and its own presence."""

    address: str
    store: object
    presence: object
    rounds: object = None  # A store for what torchrun's agents tell each other in a round.

    def look(self):
        """(text of the state, state, ids of the agents that are present)"""
        keys = self.store.list_keys()
        text = self.store.get(_STATE).decode() if _STATE in keys else ""
        alive = {key[len(_PRESENT) :] for key in keys if key.startswith(_PRESENT)}
        return text, State.parse(text), alive

    def swap(self, text, state):
        wanted = state.text()
        return self.store.compare_set(_STATE, text, wanted).decode() == wanted

    def open_round(self):
        if self.rounds is None:
            self.rounds = self.store.clone()
            self.rounds.set_timeout(_AGENT_TIMEOUT)
        return self.rounds

    def close(self):
        self.presence.close()
        self.store.close()
        if self.rounds is not None:
            self.rounds.close()


class Handler(RendezvousHandler):
    """See the module. Owner: torchrun's agent. Thread: the agent's."""

    def __init__(self, parameters):
        self._id = uuid.uuid4().hex
        self._run_id = parameters.run_id
        self._job = f"{parameters.run_id}/agents"
        self._least, self._most = parameters.min_nodes, parameters.max_nodes
        self._join_seconds = _seconds(parameters, "join_timeout", JOIN_SECONDS)
        self._last_call_seconds = _seconds(parameters, "last_call_timeout", LAST_CALL_SECONDS)
        self._local_addr = parameters.local_addr
        self._native = _native.load()
        self._settings = _init.read_settings(self._native, os.environ)
        self._native.set_log(self._settings["log"], "agent")
        self._given = "" if parameters.endpoint else self._settings["store"]
        self._endpoint = _endpoint(parameters, self._given)
        self._line = None
        self._round = 0  # The latest that this agent was in.

    def get_backend(self):
        return NAME

    def get_run_id(self):
        return self._run_id

    def next_rendezvous(self):
        deadline = time.monotonic() + self._join_seconds
        trouble = None
        while True:
            try:
                self._attend(deadline)
                return self._meet(deadline)
            except _errors.ConfigError as error:
                raise RendezvousConnectionError(str(error)) from error
            except (dist.DistStoreError, _errors.ConnectError) as error:
                trouble = error
            self._drop()
            final = getattr(trouble, "code", "") in ("PROTOCOL", "AUTH")
            if final or time.monotonic() > deadline:
                raise RendezvousConnectionError(
                    f"the agents of job {self._run_id} have no store: {trouble}"
                ) from trouble
            time.sleep(_POLL_SECONDS)

    def num_nodes_waiting(self):
        line = self._line
        if line is None or line.presence.lost:
            return 1  # The store was started anew and knows nobody: the agents meet again there.
        try:
            _, state, alive = line.look()
        except _errors.ResilientError:
            return 0  # What runs goes on without a store.
        return newcomers(state, self._round, alive | {self._id}, self._most)

    def is_closed(self):
        try:
            return self._line is not None and self._line.look()[1].closed
        except _errors.ResilientError:
            return False

    def set_closed(self):
        if self._line is None:
            return
        while True:
            text, state, _ = self._line.look()
            if state.closed or self._line.swap(text, replace(state, closed=True)):
                return

    def shutdown(self):
        try:
            self.set_closed()
            if self._line is not None and not self._line.look()[2] - {self._id}:
                for key in self._line.store.list_keys():
                    self._line.store.delete_key(key)
        except _errors.ResilientError as error:
            self._log(f"the rendezvous could not be closed: {error}")
            return False
        finally:
            self._drop()
        return True

    # ---- The store.

    def _attend(self, deadline):
        """Connects, and is present, unless it is so already."""
        if self._line is not None and not self._line.presence.lost:
            return
        self._drop()
        address = self._find(deadline)
        access = {"token_file": self._settings["token_file"], "tls": self._settings["tls"]}
        store = _api.Store(address, _LOOK_TIMEOUT, job=self._job, **access)
        who = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        try:
            presence = self._native.Presence(
                store.addresses,
                self._job,
                _PRESENT + self._id,
                who,
                max(deadline - time.monotonic(), 1.0),
                **access,
            )
        except BaseException:
            store.close()
            raise
        self._line = _Line(address, store, presence)

    def _find(self, deadline):
        if self._given:
            return self._given
        host, port = self._endpoint
        search = _address.Search(
            self._native, self._settings, -1, self._job, deadline, self._log, self._log
        )
        if port == 0:
            address, _ = search.start(host)
            self._endpoint = _server.split_host_port(address)
            return address
        spans = self._most > 1 and not _reach.is_loopback(host)
        numbers = _address.addresses_of(host, deadline) if spans else ()
        host = _reach.host_of_store(host, numbers, spans, self._settings)
        return _address.at(search, host, port).addresses[0]

    def _drop(self):
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # ---- The agents.

    def _meet(self, deadline):
        enough_since = None
        while True:
            if self._line.presence.lost:
                raise _errors.StoreLostError(self._line.presence.lost)
            text, state, alive = self._line.look()
            others = alive - {self._id}
            if state.closed and (others or self._id in state.members):
                raise RendezvousClosedError(f"the job {self._run_id} has been ended by an agent")
            wanted = enter(state, self._id, self._round, alive, self._most)
            now = time.monotonic()
            if wanted == state and state.running and self._id in state.members:
                return self._begin(state)
            gathered = self._id in wanted.members and len(wanted.members) >= self._least
            enough_since = (enough_since or now) if gathered and not wanted.running else None
            if enough_since is not None and now - enough_since >= self._last_call_seconds:
                wanted = replace(wanted, running=True)
            if wanted != state and self._line.swap(text, wanted):
                continue
            if now > deadline:
                raise RendezvousTimeoutError(self._too_few(state, alive))
            time.sleep(_POLL_SECONDS)

    def _begin(self, state):
        self._round = state.round
        rank = state.members.index(self._id)
        store = self._line.open_round()
        if rank == 0:
            self._forget_rounds(store)
        store = dist.PrefixStore(f"{_ROUND}{state.round}", store)
        host = _server.split_host_port(self._line.address.split(",")[0])[0]
        own = self._local_addr or _address.own_address_towards(host)
        master = RendezvousStoreInfo.build(rank, store, own)
        os.environ["RESILIENT_STORE"] = self._line.address  # Workers inherit it.
        os.environ["RESILIENT_ATTEMPT"] = str(state.round)
        return RendezvousInfo(store, rank, len(state.members), master)

    def _forget_rounds(self, store):
        for key in store.list_keys():
            number = key[len(_ROUND) :].partition("/")[0]
            if key.startswith(_ROUND) and int(number) < self._round - 1:
                store.delete_key(key)

    def _too_few(self, state, alive):
        seconds = f"{self._join_seconds:g} s"
        if state.running:
            return (
                f"the agents of job {self._run_id} have not let this one in for {seconds}:"
                f" round {state.round} runs on {len(state.members)} nodes, of at most {self._most}"
            )
        return (
            f"{len(state.members)} of at least {self._least} agents of job {self._run_id} have come"
            f" within {seconds} ({len(alive)} are present at the store {self._line.address});"
            " start the others, or set --rdzv-conf join_timeout="
        )

    def _log(self, text):
        _init.log_line(self._settings, "agent", "info", text)


def _seconds(parameters, name, default):
    seconds = parameters.get_as_int(name, default)
    if seconds < 0:
        raise ValueError(f"--rdzv-conf {name}={seconds}: must not be negative")
    return seconds


def _endpoint(parameters, given):
    """(host, port) of the store; port 0: one of this agent's own, which is alone."""
    text = parameters.endpoint.strip()
    if text:
        host, separator, port = text.rpartition(":")
        if not separator or text.endswith("]"):
            return text.strip("[]"), DEFAULT_PORT
        try:
            return _server.split_host_port(f"{host}:{port}")
        except ValueError as error:
            raise ValueError(f"--rdzv-endpoint: {error}") from None
    if parameters.max_nodes > 1 and not given:
        raise ValueError(
            "--rdzv-backend=resilient with more than one node needs the address of a store:"
            " --rdzv-endpoint=host:port (a running resilient-store, or the first node's address)"
        )
    return parameters.local_addr or "127.0.0.1", 0
