"""The loop that starts the ranks of a job, watches them, and replaces those that die."""

import os
import selectors
import signal
import tempfile
import time
from typing import NamedTuple

from torch_resilient import _server
from torch_resilient._launch import status
from torch_resilient._launch.backoff import Backoff
from torch_resilient._launch.exits import Exits
from torch_resilient._launch.family import MARK, Family
from torch_resilient._launch.guard import Guard
from torch_resilient._launch.losses import Losses
from torch_resilient._launch.nodes import MEET_SECONDS, Nodes, free_port
from torch_resilient._launch.options import seat_wait, worker_command
from torch_resilient._launch.output import Console, Events, Outputs, finish
from torch_resilient._launch.signals import Signals
from torch_resilient._launch.store import Store
from torch_resilient._launch.worker import SEATED, Worker, how

_END_SECONDS = 3.0  # From the first signal to the last process.
_WAIT_TOLD_SECONDS = 5.0  # Of all nodes, before it is told who is missing.
_AT_ONCE = 2  # Starts of a rank in a row; an ordinary kill or two costs nothing.


class _Start(NamedTuple):
    """A start that is held back."""

    when: float
    rank: int
    lost: tuple | None = None  # Who is replaced: its worker, exit code, and how it ended.


def _own_folder():
    try:
        return tempfile.TemporaryDirectory(prefix="resilient-run-")
    except OSError:  # Nothing can be written: a read-only container, full disks.
        return tempfile.TemporaryDirectory(prefix="resilient-run-", dir="/dev/shm")


class Launcher:
    """One job: its store, its workers, and the loop that watches them. Single-threaded."""

    def __init__(self, options):
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._exits = Exits(self._selector)
        self._numbers = list(range(options.nproc + options.spares))  # RANK of each,
        self._ranks = options.nproc  # among so many ranks
        self._spares = options.spares  # and spares of all nodes.
        self._workers = {}  # RANK -> Worker; a spare's RANK is beyond those of the world.
        self._delayed = []  # _Start of each that is held back.
        self._losses = Losses(options.restart_policy == "replace" and options.nnodes == 1)
        self._backoff = Backoff(_AT_ONCE, options.steady_after)
        self._restarts = 0
        self._attempt = 0  # How often all ranks were started anew.
        self._renewing = False  # What runs is being ended, to be started anew,
        self._renew_at = 0.0  # not before this,
        self._gather_until = None  # and not before all launchers are ready for it.
        self._wait_told_at = 0.0
        self._stay_until = None  # Own ranks have finished; others may yet have all started anew.
        self._finished = set()
        self._lost = set()  # Died, and not started again.
        self._said = set()  # Losses of other nodes.
        self._exit_code = None  # Decided; what runs is being ended.
        self._kill_at = None
        # What its own store keeps, and a file of each worker that has had a seat.
        self._folder = _own_folder()
        self._console = Console()
        self._events = Events(options.events, self._console.say)
        self._outputs = Outputs(self._console, options.log_dir, options.log_only)
        data = options.store_data or os.path.join(self._folder.name, "store")
        self._store = Store(
            options.store, data, self._exits, self._console, self._goes_on, self._event
        )
        self._job = options.job or os.environ.get("RESILIENT_JOB") or f"run-{os.getpid()}"
        self._port = free_port("127.0.0.1")
        if options.token_file:  # For the store, the ranks and the exit reports alike.
            os.environ[_server.TOKEN_FILE] = os.path.abspath(options.token_file)
        self._nodes = None
        if options.nnodes > 1:
            self._nodes = Nodes(
                options, self._job, self._exits, self._console.say, self._heard_of_others
            )
        self._has_met = self._nodes is None  # And knows its numbers.

    def run(self):
        """The exit code, once nothing runs any more."""
        self._started = time.monotonic()
        self._family = Family(self._own_processes)
        last_words = self._nodes and self._nodes.last_words()
        self._guard = Guard(self._family.mark, self._folder.name, last_words)
        self._caught = Signals()
        self._selector.register(
            self._caught.receiver, selectors.EVENT_READ, (self._signalled, self._caught)
        )
        try:
            self._store.start()
            self._meet()
            if self._nodes is None:
                self._start_all()
            while not self._is_over():
                self._show_status()
                self._turn()
            self._tell_others(ended=self._exit_code or 0)
        finally:
            if self._console.has_status:
                self._console.show("")
            self._end()
            self._folder.cleanup()
            finish([self._events, self._outputs], self._caught.is_hurried)
            self._caught.close()
        return self._exit_code or 0

    def _is_over(self):
        """Whether nothing runs, and there is nothing to do for what may run later."""
        may_run = self._delayed or self._gather_until or self._stay_until or not self._has_met
        return not self._workers and (self._exit_code is not None or not may_run)

    def _own_processes(self):
        others = self._nodes.processes() if self._nodes else set()
        return {self._guard.pid} | self._store.processes() | others

    def _goes_on(self):
        return self._exit_code is None and bool(self._workers or self._delayed)

    def _turn(self):
        for key, _ in self._selector.select(self._patience()):
            callback, argument = key.data
            callback(argument)
        now = time.monotonic()
        self._store.turn(now)
        if self._nodes:
            self._nodes.turn(now)
            self._gather(now)
            self._stay(now)
        if self._family.due is not None and now >= self._family.due:
            self._family.sweep()
        due = [entry for entry in self._delayed if entry.when <= now]
        for entry in due:
            if entry in self._delayed and self._exit_code is None:
                self._delayed.remove(entry)
                self._start_late(entry)
        self._obey()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL)

    def _patience(self):
        times = [entry.when for entry in self._delayed]
        times += [
            when
            for when in (
                *(self._kill_at, self._store.due, self._family.due),
                *(self._gather_until, self._stay_until),
            )
            if when is not None
        ]
        if self._gather_until is not None and self._exit_code is None:
            is_ready = self._nodes.roster.mine.ready >= self._attempt
            times.append(self._wait_told_at if is_ready else self._renew_at)
        if self._nodes and (when := self._nodes.when()) is not None:
            times.append(when)
        if self._console.has_status:
            times.append(time.monotonic() + status.SECONDS)
        return max(min(times) - time.monotonic(), 0) if times else None

    def _show_status(self):
        if not self._console.has_status:
            return
        doing = "ending the job" if self._exit_code is not None else ""
        doing = doing or ("ending all ranks, to start them anew" if self._renewing else "")
        if self._gather_until is not None:
            doing = doing or "waiting for the other nodes to begin anew"
        held = [entry.rank for entry in self._delayed]
        all_anew = self._options.restart_policy == "all"
        doing = doing or status.flapping(held, self._backoff, _AT_ONCE, all_anew)
        states = {
            "running": self._workers.keys(),
            "held back": held,
            "finished": self._finished,
            "lost": self._lost,
        }
        seconds = time.monotonic() - self._started
        most = self._options.max_restarts
        self._console.show(status.text(states, self._restarts, most, seconds, doing))

    # ---- workers

    def _start_all(self):
        for rank in self._numbers:
            self._start(rank)

    def _start(self, rank, replaces=False):
        """`replaces`: it takes the place of one that was lost."""
        mark = self._family.next_mark()
        environment = {**self._environment(rank), MARK: mark}
        environment[SEATED] = os.path.join(self._folder.name, mark)
        if replaces and self._options.min_world:  # The world may have gone on without that one.
            environment["RESILIENT_REPLACES"] = "1"
        command = worker_command(self._options)
        worker = Worker(rank, command, environment, self._exits, self._outputs, replaces)
        self._family.began(worker.process.pid, mark)
        self._guard.began(worker.process.pid)
        worker.watch(self._exited)
        self._workers[rank] = worker
        self._event("started", rank=rank, pid=worker.process.pid)

    def _environment(self, rank):
        address, port = "127.0.0.1", self._port
        if self._nodes:
            first = self._nodes.roster.first()
            address, port = first.address, first.port
        environment = dict(os.environ)
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(self._numbers.index(rank)),
            WORLD_SIZE=str(self._ranks + self._spares),
            LOCAL_WORLD_SIZE=str(len(self._numbers)),
            GROUP_RANK=str(self._options.node_rank or 0),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            RESILIENT_STORE=self._store.address,
            RESILIENT_JOB=self._job,
            RESILIENT_SUPERVISED="1",
            PYTHONUNBUFFERED="1",
        )
        if self._spares:
            environment["RESILIENT_SPARES"] = str(self._spares)
        environment.pop("RESILIENT_OWNER", None)
        if self._options.min_world:
            environment["RESILIENT_MIN_WORLD"] = str(self._options.min_world)
        if wait := seat_wait(self._options, self._spares):
            environment.setdefault("RESILIENT_SEAT_WAIT", wait)
        if self._attempt:  # The store ends what is left of an earlier one.
            environment["RESILIENT_ATTEMPT"] = str(self._attempt)
        environment.setdefault("OMP_NUM_THREADS", "1")
        return environment

    def _exited(self, worker):
        exit_code = worker.reap(self._ended)
        del self._workers[worker.rank]
        pid = worker.process.pid
        self._event("exited", rank=worker.rank, pid=pid, exit_code=exit_code)
        if self._renewing:
            self._renew()
            return
        if exit_code == 0:
            if not worker.has_left():  # Else others take it for a loss.
                self._store.report(self._job, worker.rank, pid, exit_code)
            # A spare that never had a seat has finished nobody's part.
            ran = worker.rank < self._ranks or worker.has_seat()
            (self._finished if ran else self._lost).add(worker.rank)
            self._tell_others(finished=len(self._finished), lost=len(self._lost))
            self._end_if_done()
            return
        if self._exit_code is not None:
            return  # Being ended: this is the answer to our signal.
        self._store.report(self._job, worker.rank, pid, exit_code)
        text = f"rank {worker.rank} (pid {pid}) ended with {how(exit_code)}"
        self._after(worker, exit_code, text)

    def _end_if_done(self):
        if self._exit_code is None and not self._renewing and self._is_done():
            self._begin_end(0, signal.SIGTERM)

    def _is_done(self):
        """Whether nobody needs what still runs: the ranks have finished, and it has had no seat."""
        is_to_begin = self._gather_until is not None  # Others may have finished already.
        if is_to_begin or any(worker.has_seat() for worker in self._workers.values()):
            return False  # The world may have grown.
        finished = self._nodes.roster.finished() if self._nodes else len(self._finished)
        if self._spares:
            return finished >= self._ranks
        enough = bool(self._options.min_world) and finished >= self._options.min_world
        return enough and all(worker.replaces for worker in self._workers.values())

    def _has_spare(self, dead):
        """Whether there is a process for each seat of the world, which may have grown, without that
        worker. Who has which does not matter: a spare may have taken it before its loss is known
        here."""
        others = self._nodes and self._nodes.roster.others_finished()
        if not self._spares or self._finished or others:
            return False
        return self._left() >= self._seats(dead)

    def _is_idle(self, dead):
        """Whether it only waited for a seat, and there is a process for each without it."""
        is_spare = dead.rank >= self._ranks or dead.replaces
        return is_spare and not dead.has_seat() and self._left() >= self._seats(dead)

    def _seats(self, *dead):
        """Of the world, as far as the processes of this node have told."""
        workers = [*dead, *self._workers.values()]
        return max((worker.world_size() for worker in workers), default=0) or self._ranks

    def _ended(self, pid):
        self._family.ended(pid)
        self._guard.ended(pid)

    def _after(self, worker, exit_code, text):
        """A rank has died: starts it again, or all, goes on without it, or ends the job."""
        if why := self._losses.why_in_vain(worker, exit_code, self._workers.values()):
            return self._give_up(exit_code, f"{text}{why}")
        why_not = self._why_not_again()
        is_spare = worker.rank >= self._ranks and not worker.has_seat()
        is_idle = self._options.restart_policy == "all" and is_spare
        if why_not is None and not is_idle:
            self._start_again(worker, exit_code, text)
        else:
            self._go_on_without(worker, exit_code, text, why_not, is_idle)

    def _go_on_without(self, worker, exit_code, text, why_not, is_idle=False):
        """Or ends the job."""
        self._lost.add(worker.rank)
        self._tell_others(lost=len(self._lost), loss=exit_code)
        left = self._left()
        least = self._options.min_world
        if is_idle or self._is_idle(worker):
            self._console.say(f"{text}; it waited for a seat, and the job goes on without it")
        elif self._has_spare(worker):
            self._console.say(f"{text}; it is not started again, as a spare takes its seat")
        elif least and left >= least:
            text = f"{text}{why_not}; the job goes on with {left}, as {least} are enough"
            self._console.say(f"{text} (--min-world)")
            self._event("lost", rank=worker.rank, left=left)
        else:
            few = f"; {self._few(left)}" if least else ""
            self._give_up(exit_code, f"{text}{why_not}{few}")

    def _left(self):
        """Ranks and spares that run, are to be started, or have finished, on all nodes."""
        if self._nodes:
            return self._nodes.roster.left()
        return len(self._workers) + len(self._delayed) + len(self._finished)

    def _why_not_again(self):
        """What keeps a rank that has died from being started again; None: nothing does."""
        policy = self._options.restart_policy
        if policy == "all" and self._nodes and (over := self._nodes.roster.over()):
            return f", and node {status.ranges(over)} has finished: it cannot begin anew"
        if policy == "replace" and (why_not := self._why_not_rejoin()):
            return why_not
        if policy == "never":
            return ""
        if self._restarts >= self._options.max_restarts:
            return f"; all {self._restarts} restarts are used"
        return None

    def _why_not_rejoin(self):
        others = self._nodes and self._nodes.roster.others_finished()
        if self._finished or others:
            return ", and other ranks have finished: it cannot rejoin"
        return None

    def _start_late(self, entry):
        """What was held back, if it may still come."""
        why_not = self._why_not_rejoin() if entry.lost else None
        if why_not is None:
            self._start(entry.rank, replaces=self._options.restart_policy == "replace")
        else:
            self._go_on_without(*entry.lost, why_not)

    def _start_again(self, worker, exit_code, text):
        policy, most = self._options.restart_policy, self._options.max_restarts
        self._restarts += 1
        who = worker.rank if policy == "replace" else None
        pause = self._backoff.ended(who, time.monotonic() - worker.started)
        why = f" in {pause:.1f} s, as {'it' if policy == 'replace' else 'a rank'} has ended"
        why += f" {self._backoff.ends(who)} times in a row within {self._options.steady_after} s"
        self._console.say(
            f"{text}; {'replacing it' if policy == 'replace' else 'starting all ranks anew'}"
            f" ({self._restarts} of {most} restarts)"
            + (f"{why} of its start (--steady-after)" if pause else "")
        )
        self._event("restarted", rank=worker.rank, restarts=self._restarts)
        if policy == "replace":
            lost = (worker, exit_code, text)
            self._delayed.append(_Start(time.monotonic() + pause, worker.rank, lost))
        else:
            self._renew_after(pause, self._restarts, text)

    def _renew_after(self, pause, attempt, why):
        self._attempt = attempt
        self._tell_others(attempt=attempt, why=why, finished=0, lost=0, loss=0)
        self._renewing = True
        self._stay_until = self._gather_until = None
        self._renew_at = time.monotonic() + pause
        self._delayed.clear()
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + _END_SECONDS - 0.5
        self._renew()

    def _renew(self):
        """All ranks anew, once the last one of the old ones has ended."""
        if self._workers or self._exit_code is not None:
            return
        self._renewing = False
        self._kill_at = None
        self._finished.clear()
        self._lost.clear()
        self._port = free_port("127.0.0.1")
        if self._nodes:
            self._begin_to_gather()
        else:
            self._delayed = [_Start(self._renew_at, rank) for rank in self._numbers]

    def _give_up(self, exit_code, text):
        self._console.say(f"{text}; ending the job")
        code = 128 - exit_code if exit_code < 0 else exit_code
        self._tell_others(ended=code, why=text)
        self._begin_end(code, signal.SIGTERM)

    # ---- the other nodes

    def _meet(self):
        """Waits until the launchers of all nodes have come, or one gives up."""
        if self._nodes is None:
            return
        roster = self._nodes.roster
        self._nodes.start()
        while self._exit_code is None and not roster.meet():
            self._turn()
            if self._exit_code is None and self._nodes.is_late(time.monotonic()):
                missing = status.ranges(roster.missing()) or "none, but not all have answered"
                text = f"the launchers of {self._options.nnodes} nodes have not met in"
                text = f"{text} {MEET_SECONDS:.0f} s (missing: node {missing})"
                self._give_up(1, f"{text}: start them with the same --store, --job and --nnodes")
        if self._exit_code is not None:
            return
        self._has_met = True
        self._numbers = roster.numbers()
        self._ranks, self._spares = roster.ranks(), roster.spares()
        least = self._options.min_world
        if least and least > self._ranks:
            self._give_up(
                2, f"--min-world {least} is more than the {self._ranks} ranks of all nodes"
            )
        self._attempt, _ = roster.newest()  # Of a job that this launcher comes late to.
        self._restarts = self._attempt
        self._tell_others(attempt=self._attempt)
        self._begin_to_gather()
        self._heard_of_others()  # What they told with the last word that this one waited for.

    def _begin_to_gather(self):
        self._gather_until = time.monotonic() + MEET_SECONDS
        self._wait_told_at = max(time.monotonic(), self._renew_at) + _WAIT_TOLD_SECONDS

    def _gather(self, now):
        """Starts the ranks once no node has any of an earlier attempt."""
        if self._gather_until is None or self._exit_code is not None or now < self._renew_at:
            return
        roster = self._nodes.roster
        if roster.mine.ready < self._attempt:
            self._tell_others(ready=self._attempt, port=free_port(""))
        missing = roster.not_ready(self._attempt)
        if not missing:
            self._gather_until = None
            self._start_all()
        elif gone := set(missing) & {*roster.over(), *(node for node, _ in roster.killed())}:
            text = f"the launcher of node {status.ranges(gone)} has ended, so none can begin anew"
            self._give_up(1, f"{roster.mine.why}; {text}")
        elif now >= self._gather_until:
            text = f"has not ended its ranks in {MEET_SECONDS:.0f} s, so none can begin anew"
            self._give_up(1, f"{roster.mine.why}; node {status.ranges(missing)} {text}")
        elif now >= self._wait_told_at:
            self._wait_told_at = self._gather_until
            text = f"waits up to {MEET_SECONDS:.0f} s for node {status.ranges(missing)} to end its"
            self._console.say(f"{text} ranks, before all begin anew")

    def _stay(self, now):
        """Where one loss has all ranks started anew, those that have finished too, a launcher stays
        until all ranks of all nodes have finished."""
        if self._options.restart_policy != "all" or self._exit_code is not None:
            return
        if self._workers or len(self._finished) + len(self._lost) < len(self._numbers):
            return
        if self._nodes.roster.finished() >= self._ranks:
            self._stay_until = None
        elif self._stay_until is None:
            self._stay_until = now + MEET_SECONDS
        elif now >= self._stay_until:
            self._console.say(
                f"the ranks of this node finished {MEET_SECONDS:.0f} s ago, and those of others"
                " have not; it takes no part any more"
            )
            self._begin_end(0, signal.SIGTERM)

    def _tell_others(self, **fields):
        if self._nodes:
            self._nodes.change(**fields)

    def _heard_of_others(self):
        if self._exit_code is not None:
            return
        roster = self._nodes.roster
        if other := roster.usurper:
            where = f"{other.host}, pid {other.pid}"
            text = f"a launcher with the same --node-rank {roster.node} has come later ({where})"
            self._give_up(1, f"{text} and has this one's place")
        elif end := roster.end():
            node, entry = end
            self._give_up(entry.ended, f"node {node} ({entry.host}) gave up: {entry.why}")
        elif self._has_met:
            self._heard_of_ranks(roster)

    def _heard_of_ranks(self, roster):
        if killed := roster.killed():
            names = ", ".join(f"{node} ({entry.host})" for node, entry in killed)
            text = f"the launcher of node {names} was killed, and its ranks with it"
            self._without_others(text, killed[-1][1].ended)
        if self._exit_code is not None:
            return
        # Several at once, perhaps on nodes that had no other process and have ended by now.
        if roster.loss() and not self._is_enough():
            self._give_up(roster.loss(), self._few(self._left()))
        elif roster.mine.renews and roster.newest()[0] > self._attempt:
            self._follow(*roster.newest())
        else:
            self._end_if_done()

    def _follow(self, attempt, node):
        """Another node has lost a rank, and all are started anew."""
        other = self._nodes.roster.entry(node)
        self._restarts = attempt
        self._console.say(
            f"node {node} ({other.host}): {other.why}; starting all ranks anew"
            f" ({attempt} of {self._options.max_restarts} restarts)"
        )
        self._renew_after(0.0, attempt, other.why)

    def _is_enough(self):
        """Whether what is left is enough for the job to go on, without a start."""
        least = self._options.min_world
        return self._left() >= (least or self._seats())

    def _few(self, left):
        least = self._options.min_world
        if least:
            return f"{left} are left, fewer than --min-world {least}"
        return f"{left} processes are left for {self._seats()} ranks"

    def _without_others(self, text, code):
        left, least = self._left(), self._options.min_world
        if not (least or self._spares) or not self._is_enough():
            few = f"; {self._few(left)}" if least or self._spares else ""
            self._give_up(code, f"{text}{few}")
        elif text not in self._said:
            self._said.add(text)
            why = f"{least} are enough" if least else "spares take their seats"
            self._console.say(f"{text}; the job goes on with {left}, as {why}")

    # ---- the end

    def _signalled(self, caught):
        if caught.take():
            self._exits.look()
            self._family.sweep()

    def _obey(self):
        """The signals that have come, once all that ended before them is known: of a job that is
        over, or being ended for another cause, they do not change the exit code."""
        for number, is_first in self._caught.ends():
            if not is_first:
                self._signal_all(signal.SIGKILL)
            elif self._exit_code is not None:
                self._signal_all(number)
            elif not self._is_over():
                self._tell_others(ended=128 + number, why=f"it was ended by {how(-number)}")
                self._begin_end(128 + number, number)

    def _begin_end(self, exit_code, number):
        self._exit_code = exit_code
        self._delayed.clear()
        self._signal_all(number)
        # The rest of the bound is for SIGKILL and for the store.
        self._kill_at = time.monotonic() + _END_SECONDS - 0.5

    def _signal_all(self, number):
        for worker in self._workers.values():
            worker.signal(number)

    def _end(self):
        """Leaves no process behind, however the loop ended."""
        self._signal_all(signal.SIGKILL)
        for worker in list(self._workers.values()):
            worker.reap(self._ended)
        self._family.end()
        if self._nodes:
            self._tell_others(ended=1, why="its launcher failed")
            self._nodes.end()
        self._store.end()
        self._guard.dismiss()

    def _event(self, name, **fields):
        self._events.write(name, **fields)
