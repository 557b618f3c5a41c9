"""What tests use to run ranks as real processes, and to find what they leave behind."""

import contextlib
import ctypes
import inspect
import itertools
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import rank_server

PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_SECONDS = 4.0
CLOSE_SECONDS = 10.0
TRACE = "TORCH_FR_DUMP_TEMP_FILE"  # Where torch's flight recorder writes at a failure.
START_SECONDS = 180  # The first import of torch after its installation, from a cold disk.
_numbers = itertools.count(1)


class RankFailed(AssertionError):
    """A rank raised, or ended otherwise than the test expected."""


class Server:
    """A fork server and the ranks made by it, over the server's control socket."""

    process = None

    def __init__(self, control):
        self._control = control
        self._ranks = {}
        message = self._receive(START_SECONDS)
        assert message and message[0] == "ready", "the fork server did not start"
        self.threads = message[1]

    @classmethod
    def launch(cls):
        """The one of a pytest session, with its process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["MKL_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            [sys.executable, rank_server.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        server = cls(ours)
        server.process = process
        return server

    def start(self, function, args, environment):
        return self._start(
            {
                "file": inspect.getsourcefile(function),
                "function": function.__name__,
                "args": args,
                "environment": environment,
            }
        )

    def start_host(self, router, name):
        """A host (see namespaces.py) as a process of this server, and the server inside it."""
        process = self._start({"host": (router, name)})
        return process, Server(process.take_channel())

    def _start(self, request):
        rank = Rank(self, next(_numbers))
        self._ranks[rank.number] = rank
        rank.launch(self._control, {"number": rank.number, **request})
        while rank.pid is None:
            assert self.pump(10), "the fork server does not answer"
        return rank

    def pump(self, seconds):
        """Handles one message of the fork server; False when none came in time."""
        message = self._receive(seconds)
        if message is None:
            return False
        kind, number, value = message
        rank = self._ranks[number]
        if kind == "started":
            rank.pid = value
            self._control.send(b"1")
        else:
            rank.end(value)
        return True

    def _receive(self, seconds):
        self._control.settimeout(max(seconds, 0.001))
        try:
            data, passed, _, _ = socket.recv_fds(self._control, rank_server.MESSAGE_LIMIT, 1)
        except TimeoutError:
            return None
        if not data:
            raise RankFailed("the fork server ended")
        message = pickle.loads(data)
        return (*message, *map(_process_id, passed))

    def forget(self, rank):
        """Nothing more will be heard of it."""
        self._ranks.pop(rank.number, None)

    def killed(self):
        """The server and all that it has started were killed from outside."""
        for rank in self._ranks.values():
            rank.end(-signal.SIGKILL)

    def close(self):
        self._control.close()
        if self.process is not None:
            self.process.wait(10)


class Rank:
    """One forked rank: its process, its output files, and its channel to the test."""

    def __init__(self, server, number):
        self._server = server
        self.number = number
        self.pid = None
        self.exit_code = None
        self.ended_at = None
        # In memory: a line of the log is there when its call returns, even if a signal comes next.
        self._stdout = open(os.memfd_create("stdout"), "w+b")  # noqa: SIM115
        self._stderr = open(os.memfd_create("stderr"), "w+b")  # noqa: SIM115
        self._channel, self._their_channel = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._told = []
        self._outcome = None

    def launch(self, control, request):
        descriptors = [self._stdout.fileno(), self._stderr.fileno(), self._their_channel.fileno()]
        socket.send_fds(control, [pickle.dumps(request)], descriptors)
        self._their_channel.close()

    def end(self, exit_code):
        if self.exit_code is None:
            self.exit_code = exit_code
            self.ended_at = time.monotonic()

    def close(self):
        """Lets go of the files of a rank that has ended: a session starts a thousand and more."""
        if self.exit_code is not None:
            self._server.forget(self)
            for file in (self._stdout, self._stderr, self._channel):
                file.close()

    def take_channel(self):
        """For what is no rank and speaks otherwise."""
        return self._channel

    def signal(self, number=signal.SIGKILL):
        """Sends the signal; returns the time (monotonic, unix) right before."""
        now = time.monotonic(), time.time()
        os.kill(self.pid, number)
        return now

    def say(self, message):
        self._channel.send(pickle.dumps(message))

    def told(self, seconds=30):
        """The rank's next message. Fails when the rank ends or nothing comes in time."""
        deadline = time.monotonic() + seconds
        while not self._told:
            if self._outcome is not None or not self._read(deadline):
                self._fail(f"said nothing within {seconds} s")
        return self._told.pop(0)

    def wait(self, seconds=30):
        """Exit code; fails after the time, and kills the process."""
        if not self.ends_by(time.monotonic() + seconds):
            os.kill(self.pid, signal.SIGKILL)
            self._fail(f"still runs after {seconds} s")
        return self.exit_code

    def outcome(self, seconds=30):
        """("returned", value) or ("raised", exception, text); None when it ended without."""
        deadline = time.monotonic() + seconds
        while self._outcome is None and self._read(deadline):
            pass
        return self._outcome

    def value(self, seconds=30):
        """What the function returned; fails when it raised. Waits for the end of the process."""
        deadline = time.monotonic() + seconds
        outcome = self.outcome(seconds)
        exit_code = self.wait(max(deadline - time.monotonic(), 1))
        if outcome is None or outcome[0] != "returned" or exit_code != 0:
            self._fail("did not return")
        return outcome[1]

    def error(self, seconds=30):
        """What the function raised; fails when it returned."""
        outcome = self.outcome(seconds)
        if outcome is None or outcome[0] != "raised":
            self._fail("did not raise")
        return outcome[1]

    def stdout(self):
        return _content(self._stdout)

    def stderr(self):
        return _content(self._stderr)

    def alive(self):
        return not self.ends_by(time.monotonic())

    def ends_by(self, deadline):
        """Whether the process has ended by that time; waits as long as it has not."""
        while self.exit_code is None and self._server.pump(max(deadline - time.monotonic(), 0)):
            pass
        return self.exit_code is not None

    def _read(self, deadline):
        """One message of the channel; False at its end or after the deadline."""
        self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = self._channel.recv(rank_server.MESSAGE_LIMIT)
        except (TimeoutError, ConnectionResetError):
            return False
        if not data:
            return False
        message = pickle.loads(data)
        if message[0] == "told":
            self._told.append(message[1])
        else:
            self._outcome = message
        return True

    def _fail(self, what):
        text = self._outcome[2] if self._outcome and self._outcome[0] == "raised" else ""
        raise RankFailed(
            f"the process {self.pid} {what} (exit code {self.exit_code}, outcome"
            f" {self._outcome!r})\n{text}\n--- stderr\n{self.stderr()}\n--- stdout\n{self.stdout()}"
        )


class World:
    """Ranks of one job on the session's store. One that does not end with the test is killed and
    is a failure."""

    def __init__(self, server, store_address):
        self._server = server
        self.store_address = store_address
        self.job = f"test-{os.getpid()}-{next(_numbers)}"
        self.ranks = []

    def environment(self, rank, size, extra=None):
        """Of a rank as resilient-run would start it; None as a value removes the name."""
        keep = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", TRACE)
        environment = {name: os.environ[name] for name in keep if name in os.environ}
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
            RESILIENT_STORE=self.store_address,
            RESILIENT_JOB=self.job,
            OMP_NUM_THREADS="1",
        )
        environment.update(extra or {})
        return {name: value for name, value in environment.items() if value is not None}

    def server_of(self, rank, size):
        """Where that rank is started."""
        return self._server

    def start_rank(self, function, rank, size, *args, env=None):
        server = self.server_of(rank, size)
        started = server.start(function, args, self.environment(rank, size, env))
        self.ranks.append(started)
        return started

    def start(self, function, size, *args, env=None):
        """Starts the function as all ranks of a world."""
        return [self.start_rank(function, rank, size, *args, env=env) for rank in range(size)]

    def run(self, function, size, *args, env=None, seconds=60):
        """The values that the function returned on each rank."""
        deadline = time.monotonic() + seconds
        ranks = self.start(function, size, *args, env=env)
        return [rank.value(max(deadline - time.monotonic(), 1)) for rank in ranks]

    def close(self, seconds=CLOSE_SECONDS):
        """Reports the ranks that do not end. A test may be over before they are: it knows the end
        of a rank from the others, which hear of it as the rank begins to end."""
        deadline = time.monotonic() + seconds
        left = [rank for rank in self.ranks if not rank.ends_by(deadline)]
        for rank in left:
            with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(RankFailed):
                rank.wait(10)
        report = [f"rank process {rank.pid}:\n{rank.stderr()}" for rank in left]
        for rank in self.ranks:
            rank.close()
        return report


def become_subreaper():
    """Orphans of what the tests start become our children, so that they can be found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children():
    """{pid: command line} of the living children of this process; ended ones are collected."""
    found = {}
    for pid in _child_pids():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            # Empty for one that has ended, but also in the midst of exec.
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                found[pid] = command.decode(errors="replace").strip() or stat
    return found


def _child_pids():
    """A thread that ends hands its children to another one, perhaps one already read: then anew."""
    while True:
        tasks = os.listdir("/proc/self/task")
        pids = set()
        for task in tasks:
            path = f"/proc/self/task/{task}/children"
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path) as file:
                pids.update(map(int, file.read().split()))
        if set(tasks) <= set(os.listdir("/proc/self/task")):
            return pids


def collect_orphans(known):
    """Waits for children that are not in `known` to end; kills and returns what does not."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while True:
        left = {pid: line for pid, line in children().items() if pid not in known}
        if not left or time.monotonic() > deadline:
            break
        with selectors.DefaultSelector() as selector:
            pidfds = []
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    pidfds.append(os.pidfd_open(pid))
                    selector.register(pidfds[-1], selectors.EVENT_READ)
            selector.select(max(deadline - time.monotonic(), 0))
        for pidfd in pidfds:
            os.close(pidfd)
        _reap(left)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _reap(left, wait=True)
    return left


def _reap(pids, wait=False):
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0 if wait else os.WNOHANG)


def thread_names():
    """Of this process, sorted; without those that end meanwhile."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sorted(names)


def settled(look, expected):
    """What `look` gives as soon as that is as expected, or after some seconds: a thread has its
    name a moment after its start, and may be listed for a moment after it was joined."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while (seen := look()) != expected and time.monotonic() < deadline:
        pass
    return seen


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _process_id(pidfd):
    """As this process sees it; closes the descriptor."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    os.close(pidfd)
    pid = int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pid:")))
    assert pid > 0, "it ended before it was known"
    return pid


def _content(file):
    """At places of its own: a rank that still writes has the same file offset as `file`."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
