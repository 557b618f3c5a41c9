"""The launchers of a job on several nodes: each says by a key of the store how it stands, and
watches the keys of all. By the commands of resilient-store, so that the loop never waits."""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import time
import uuid

from torch_resilient import _resolver, _server
from torch_resilient._launch.output import Output
from torch_resilient._launch.roster import Entry, Roster
from torch_resilient._launch.worker import die_with_parent

MEET_SECONDS = 600.0
_PREFIX = "node/"
_PAUSE_SECONDS = 1.0  # Between tries, when the store does not answer.
_REASON_LIMIT = 4096
# For the last word, when everything else has ended: as long as its command tries, and a bit. Where
# it is lost the others run on, and wait for who is gone.
_LAST_SECONDS = 6.0


class Nodes:
    """Owner and thread: the launcher, whose loop calls `turn`.

    changed: called when there is news of others. say: writes a line.
    """

    def __init__(self, options, job, exits, say, changed):
        self._store = options.store
        self._job = f"{job}/launchers"
        self._exits = exits
        self._selector = exits.selector
        self._say = say
        self._changed = changed
        self._watch = None
        self._watch_due = None
        self._set = None
        self._set_due = None
        self._said = None  # What the command under way says, then what the store has.
        self._told = set()  # What was said once.
        self._read_lines = []  # Of others, in this turn,
        self._news = []  # and in the one before.
        mine = Entry(
            id=uuid.uuid4().hex,
            nodes=options.nnodes,
            nproc=options.nproc,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=_own_address(options.store),
            port=free_port(""),
            spares=options.spares,
            renews=options.restart_policy == "all",
        )
        self.roster = Roster(options.node_rank, mine)

    def start(self):
        """Says that this launcher is there; then, so that whoever else stands in its place came
        later, looks who else is."""
        self._meet_until = time.monotonic() + MEET_SECONDS
        self._tell()

    def last_words(self):
        """Command by which somebody else says that this launcher was killed."""
        words = {"ended": 137, "killed": True, "why": "its launcher was killed"}
        return self._set_command({**self.roster.mine.fields(), **words})

    def change(self, **fields):
        """Says it of this node, with the next turn: what comes of one event is said at once. The
        end that is said first stays."""
        if self.roster.mine.ended is None:
            self.roster.change(**fields)
            self._set_due = time.monotonic()

    def turn(self, now):
        # What others say may come of an end here. The loop does not know in which order it learns
        # of both, but with its next turn it has learned of that end.
        news, self._news, self._read_lines = self._news, self._read_lines, []
        if news:
            self._heard(news)
        if self._set_due is not None and now >= self._set_due:
            self._set_due = None
            self._tell()
        if self._watch_due is not None and now >= self._watch_due:
            self._watch_due = None
            self._look()

    def when(self):
        """The next moment at which `turn` has something to do, or None."""
        times = [self._set_due, self._watch_due, self._late_at(), 0.0 if self._news else None]
        return min((when for when in times if when is not None), default=None)

    def is_late(self, now):
        """Whether the others have not all come in time."""
        late_at = self._late_at()
        return late_at is not None and now >= late_at

    def _late_at(self):
        return None if self.roster.meet() else self._meet_until

    def processes(self):
        started = [process for process in (self._set, self._watch) if process is not None]
        return {process.pid for process in started if process.returncode is None}

    def end(self):
        """The last word, if the store takes it in time. Leaves no process."""
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait()
            self._watch.stdout.close()
        until = time.monotonic() + _LAST_SECONDS
        while not self.roster.usurper and (self._set or self._said != self.roster.mine):
            if self._set is None:
                self._begin_set()
            try:
                self._set.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                break
            if self._set.returncode != 0:
                break
            self._set.stderr.close()
            self._set = None
        if self._set is not None:
            self._set.kill()
            self._set.wait()
            self._set.stderr.close()

    # ---- what this one says: one command at a time, as two could arrive in either order

    def _tell(self):
        if self._set is None and not self.roster.usurper and self._said != self.roster.mine:
            self._begin_set()
            self._exits.watch(self._set.pid, self._has_told)

    def _begin_set(self):
        self._said = self.roster.mine
        self._set = subprocess.Popen(
            self._set_command(self._said.fields()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # A Ctrl-C ends the workers first.
        )

    def _set_command(self, fields):
        key = f"{_PREFIX}{self.roster.node}"
        return [*self._command("set", "5s"), key, json.dumps(fields)]

    def _has_told(self, _):
        self._exits.forget(self._set.pid)
        failed = self._set.wait() != 0
        reason = self._set.stderr.read(_REASON_LIMIT).decode(errors="replace").strip()
        self._set.stderr.close()
        self._set = None
        if failed:
            if reason not in self._told:
                self._told.add(reason)
                self._say(f"the other nodes cannot be told yet; trying on: {reason}")
            self._said = None
            self._set_due = time.monotonic() + _PAUSE_SECONDS
            return
        if self._watch is None and self._watch_due is None:
            self._look()
        self._tell()

    # ---- what the others say

    def _look(self):
        self._watch = subprocess.Popen(
            [*self._command("watch", "1min"), "--json", _PREFIX],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(os.getpid()),
            start_new_session=True,
        )
        os.set_blocking(self._watch.stdout.fileno(), False)
        output = Output(self._watch.stdout, self._keep)
        self._selector.register(output.pipe, selectors.EVENT_READ, (self._read, output))

    def _read(self, output):
        if output.read():
            return
        self._selector.unregister(output.pipe)
        output.pipe.close()
        self._watch.kill()
        self._watch.wait()
        self._watch = None
        # A store that began anew has nothing of what was said.
        self._said = None
        self._watch_due = time.monotonic() + _PAUSE_SECONDS
        self._tell()

    def _keep(self, lines):
        self._read_lines += lines

    def _heard(self, lines):
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # Of another version.
                message = json.loads(line)
                # Of printable ASCII the command doubles the backslash, and nothing else.
                entry = Entry.parse(json.loads(message["value"].replace("\\\\", "\\")))
                if self.roster.hear(int(message["key"].removeprefix(_PREFIX)), entry):
                    self._said = None
        for node, why in self.roster.refused.items():
            if (node, why) not in self._told:
                self._told.add((node, why))
                self._say(f"node {node} {why}; it cannot take part")
        self.roster.change(sees=self.roster.seen() or self.roster.mine.sees)
        self._tell()
        self._changed()

    def _command(self, verb, timeout):
        where = ["--store", self._store, "--job", self._job, "--timeout", timeout]
        return [_server.binary(), verb, *where]


def _own_address(store):
    """The address of this host on the way to the store; nothing is sent."""
    host, _ = _server.split_host_port(store.split(",")[0])
    return _resolver.own_towards(_resolver.addresses(host)[0])


def free_port(host):
    """A port of that address ("": of all) that nobody has now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
