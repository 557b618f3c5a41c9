"""resilient-run: starts the ranks of a job on this host, watches them, and replaces those that die.

    resilient-run --nproc 4 train.py --epochs 10

Standard library only: the launcher must not pay for torch, nor die of it.
"""

import argparse
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from torch_resilient import _server

_END_SECONDS = 3.0  # From the first signal to the last process.
_STORE_SECONDS = 10.0
_STORE_RESTARTS = 8  # In a row; a store that has lived for so long begins a new one:
_STORE_STEADY_SECONDS = 60.0
_QUICK_SECONDS = 1.0  # A worker that lives shorter than this counts as a failed start.
_FIRST_BACKOFF_SECONDS = 0.5
_LAST_BACKOFF_SECONDS = 30.0
_CHUNK = 65536
_LINE_LIMIT = 1 << 20  # A longer line is passed on in pieces.
_PR_SET_PDEATHSIG = 1


def main(arguments=None):
    """Console script `resilient-run`. Returns the exit code."""
    options = _parse(arguments)
    try:
        return Launcher(options).run()
    except (OSError, _server.ProgramMissingError, LaunchError) as error:
        print(f"resilient-run: {error}", file=sys.stderr)
        return 1


class LaunchError(Exception):
    """The job could not be started; the text says why."""


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="resilient-run",
        description="Runs a script as the ranks of a job and replaces ranks that die.",
    )
    parser.add_argument("--nproc", type=_positive, default=1, help="number of ranks (default 1)")
    parser.add_argument(
        "--max-restarts",
        type=_not_negative,
        default=3,
        metavar="K",
        help="how many dead ranks are replaced, in total (default 3)",
    )
    parser.add_argument("--store", metavar="HOST:PORT", help="a running store; default: its own")
    parser.add_argument(
        "--store-data",
        metavar="DIR",
        help="where its own store keeps its state (default: a temporary directory)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="token that the store asks for and the ranks present (default: RESILIENT_TOKEN_FILE)",
    )
    parser.add_argument("--job", metavar="NAME", help="name of the job on the store")
    parser.add_argument("--events", metavar="FILE", help="write what happens as JSON lines")
    parser.add_argument(
        "--no-python", action="store_true", help="the script is a program, not Python"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, python -m")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.store and options.store_data:
        parser.error("--store-data is for a store of its own; leave it or --store out")
    return options


def _positive(text):
    number = _not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _not_negative(text):
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


class Output:
    """Passes one pipe on, line by line, each with the rank before it."""

    def __init__(self, pipe, prefix, target):
        self.pipe = pipe
        self._prefix = prefix
        self._target = target
        self._pending = b""

    def read(self):
        """What has arrived; False at the end."""
        try:
            data = os.read(self.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            self.finish()
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _LINE_LIMIT:
            lines.append(self._pending)
            self._pending = b""
        self._write(lines)
        return True

    def finish(self):
        if self._pending:
            self._write([self._pending])
            self._pending = b""

    def _write(self, lines):
        if not lines:
            return
        try:
            self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._target.flush()
        except (BrokenPipeError, ValueError):
            pass  # Nobody reads any more; the job goes on.


class Worker:
    """A process that holds a rank. The launcher owns it until it is reaped."""

    def __init__(self, rank, command, environment, selector):
        self.rank = rank
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent(os.getpid()),
            start_new_session=True,  # Signals of the terminal come through us, once.
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        self._selector = selector
        prefix = f"[{rank}] ".encode()
        self._outputs = [
            Output(self.process.stdout, prefix, sys.stdout.buffer),
            Output(self.process.stderr, prefix, sys.stderr.buffer),
        ]
        for output in self._outputs:
            os.set_blocking(output.pipe.fileno(), False)
            selector.register(output.pipe, selectors.EVENT_READ, (self._read, output))

    def watch(self, on_exit):
        self._selector.register(self.pidfd, selectors.EVENT_READ, (on_exit, self))

    def _read(self, output):
        # Not one that an end told of in the same turn has closed: by then all of it has been read.
        if output in self._outputs and not output.read():
            self._drop(output)

    def _drop(self, output):
        if output in self._outputs:
            self._outputs.remove(output)
            self._selector.unregister(output.pipe)
            output.pipe.close()

    def reap(self):
        """Exit code of the ended process, negative for a signal. Ends what it has left behind, and
        passes its last lines on."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        try:
            # Not reaped yet, so that the number still means this process's group.
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._selector.unregister(self.pidfd)
        os.close(self.pidfd)
        exit_code = self.process.wait()
        for output in list(self._outputs):
            while _readable(output.pipe) and output.read():
                pass
            output.finish()
            self._drop(output)
        return exit_code

    def signal(self, number):
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            pass


def _readable(pipe):
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0))


def _die_with_parent(parent):
    libc = ctypes.CDLL(None, use_errno=True)  # Loaded here: not between fork and exec.

    def prepare():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare


class Launcher:
    """One job: its store, its workers, and the loop that watches them. Single-threaded."""

    def __init__(self, options):
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._workers = {}  # rank -> Worker
        self._delayed = []  # (when, rank) of replacements that are held back.
        self._backoff = {}  # rank -> seconds
        self._reports = []
        self._restarts = 0
        self._finished = set()
        self._exit_code = None  # Decided; what runs is being ended.
        self._kill_at = None
        self._signals = 0
        self._store = None
        self._store_started = 0.0
        self._store_restarts = 0
        self._store_due = None  # When it is started again.
        self._store_data = options.store_data
        self._temporary_data = None
        self._address = options.store
        self._job = options.job or os.environ.get("RESILIENT_JOB") or f"run-{os.getpid()}"
        self._port = _free_port()
        if options.token_file:  # For the store, the ranks and the exit reports alike.
            os.environ[_server.TOKEN_FILE] = os.path.abspath(options.token_file)
        self._events = None
        if options.events:
            self._events = open(options.events, "a", buffering=1)  # noqa: SIM115 - as long as self

    def run(self):
        wakeup = self._watch_signals()
        try:
            if self._address is None:
                self._start_store()
            for rank in range(self._options.nproc):
                self._start(rank)
            while self._workers or (self._delayed and self._exit_code is None):
                self._turn()
        finally:
            self._end()
            signal.set_wakeup_fd(-1)
            for end in wakeup:
                end.close()
            if self._events:
                self._events.close()
        return self._exit_code or 0

    def _turn(self):
        for key, _ in self._selector.select(self._patience()):
            callback, argument = key.data
            callback(argument)
        now = time.monotonic()
        if self._store_due is not None and now >= self._store_due:
            self._store_due = None
            if self._exit_code is None:
                self._launch_store(self._address)
        due = [entry for entry in self._delayed if entry[0] <= now]
        for entry in due:
            self._delayed.remove(entry)
            if self._exit_code is None:
                self._start(entry[1])
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL)
        self._reports = [report for report in self._reports if report.poll() is None]

    def _patience(self):
        times = [when for when, _ in self._delayed]
        if self._kill_at is not None:
            times.append(self._kill_at)
        if self._store_due is not None:
            times.append(self._store_due)
        return max(min(times) - time.monotonic(), 0) if times else None

    # ---- store

    def _start_store(self):
        if self._store_data is None:
            self._temporary_data = tempfile.mkdtemp(prefix="resilient-store-")
            self._store_data = self._temporary_data
        self._launch_store("127.0.0.1:0", "--print-address")
        with selectors.DefaultSelector() as selector:
            selector.register(self._store.stdout, selectors.EVENT_READ)
            line = self._store.stdout.readline() if selector.select(_STORE_SECONDS) else b""
        words = line.decode(errors="replace").split()
        if not words:
            raise LaunchError("the store did not start; its reason is above")
        self._address = words[0]

    def _launch_store(self, listen, *options):
        command = [*_server.serve_command(listen, self._store_data), "--parent-death", *options]
        if "RESILIENT_LOG" not in os.environ:
            command += ["--log-level", "warn"]
        self._store_started = time.monotonic()
        self._store = subprocess.Popen(
            command,
            bufsize=0,  # What is read here as a line leaves nothing behind.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # A Ctrl-C ends the workers first.
        )
        self._store_fd = os.pidfd_open(self._store.pid)
        self._selector.register(self._store_fd, selectors.EVENT_READ, (self._store_ended, None))
        output = Output(self._store.stdout, b"[store] ", sys.stderr.buffer)
        self._selector.register(output.pipe, selectors.EVENT_READ, (self._read_store, output))

    def _read_store(self, output):
        if not output.read():
            self._selector.unregister(output.pipe)
            output.pipe.close()

    def _store_ended(self, _):
        self._selector.unregister(self._store_fd)
        os.close(self._store_fd)
        code = self._store.wait()
        if self._exit_code is not None or not (self._workers or self._delayed):
            return
        if time.monotonic() - self._store_started >= _STORE_STEADY_SECONDS:
            self._store_restarts = 0
        text = f"the store ended with {_how(code)}"
        if self._store_restarts == _STORE_RESTARTS:
            _say(
                f"{text}, {_STORE_RESTARTS} times after a restart; it stays away, and without it "
                "no rank can be replaced"
            )
            return
        pause = _FIRST_BACKOFF_SECONDS * 2 ** (self._store_restarts - 1)
        pause = min(pause, _LAST_BACKOFF_SECONDS) if self._store_restarts else 0.0
        self._store_restarts += 1
        self._store_due = time.monotonic() + pause
        _say(
            f"{text}; starting it again with what it kept"
            f" ({self._store_restarts} of {_STORE_RESTARTS})"
            + (f" in {pause:.1f} s" if pause else "")
        )
        self._event("store_restarted", exit_code=code, restarts=self._store_restarts)

    # ---- workers

    def _start(self, rank):
        worker = Worker(rank, self._command(), self._environment(rank), self._selector)
        worker.watch(self._exited)
        self._workers[rank] = worker
        self._event("started", rank=rank, pid=worker.process.pid)

    def _command(self):
        options = self._options
        if options.no_python:
            return [options.script, *options.args]
        python = [sys.executable, "-u"]
        if options.module:
            python.append("-m")
        return [*python, options.script, *options.args]

    def _environment(self, rank):
        size = str(self._options.nproc)
        environment = dict(os.environ)
        environment.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._port),
            RESILIENT_STORE=self._address,
            RESILIENT_JOB=self._job,
            RESILIENT_SUPERVISED="1",
            PYTHONUNBUFFERED="1",
        )
        environment.pop("RESILIENT_OWNER", None)
        environment.setdefault("RESILIENT_SEAT_WAIT", "10min")
        environment.setdefault("OMP_NUM_THREADS", "1")
        return environment

    def _exited(self, worker):
        exit_code = worker.reap()
        del self._workers[worker.rank]
        self._event("exited", rank=worker.rank, pid=worker.process.pid, exit_code=exit_code)
        if exit_code == 0:
            self._finished.add(worker.rank)
            return
        if self._exit_code is not None:
            return  # Being ended: this is the answer to our signal.
        text = f"rank {worker.rank} (pid {worker.process.pid}) ended with {_how(exit_code)}"
        self._report(worker, exit_code)
        self._replace(worker, exit_code, text)

    def _replace(self, worker, exit_code, text):
        if self._finished:
            self._give_up(exit_code, f"{text}, and other ranks have finished: it cannot rejoin")
        elif self._restarts >= self._options.max_restarts:
            self._give_up(exit_code, f"{text}; all {self._restarts} restarts are used")
        else:
            self._restarts += 1
            pause = self._pause(worker)
            _say(
                f"{text}; replacing it ({self._restarts} of {self._options.max_restarts} restarts)"
                + (f" in {pause:.1f} s" if pause else "")
            )
            self._event("restarted", rank=worker.rank, restarts=self._restarts)
            if pause:
                self._delayed.append((time.monotonic() + pause, worker.rank))
            else:
                self._start(worker.rank)

    def _pause(self, worker):
        """Nothing at the first time; more and more for a rank that dies in its start."""
        if time.monotonic() - worker.started >= _QUICK_SECONDS:
            self._backoff.pop(worker.rank, None)
            return 0.0
        pause = self._backoff.get(worker.rank, 0.0)
        longer = pause * 2 if pause else _FIRST_BACKOFF_SECONDS
        self._backoff[worker.rank] = min(longer, _LAST_BACKOFF_SECONDS)
        return pause

    def _give_up(self, exit_code, text):
        _say(f"{text}; ending the job")
        self._begin_end(128 - exit_code if exit_code < 0 else exit_code, signal.SIGTERM)

    def _report(self, worker, exit_code):
        """Tells the store how the worker ended, beside the start of the replacement."""
        command = [_server.binary(), "report", "--store", self._address, "--job", self._job]
        command += ["--rank", str(worker.rank), "--pid", str(worker.process.pid)]
        if exit_code < 0:
            command += ["--signal", str(-exit_code)]
        else:
            command += ["--exit-code", str(exit_code)]
        self._reports.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        )

    # ---- the end

    def _watch_signals(self):
        receiver, sender = socket.socketpair()
        for end in (receiver, sender):
            end.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(receiver, selectors.EVENT_READ, (self._signalled, receiver))
        return receiver, sender

    def _signalled(self, receiver):
        for number in receiver.recv(64):
            self._signals += 1
            if self._signals > 1:
                self._signal_all(signal.SIGKILL)
            else:
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
            worker.reap()
        for report in self._reports:
            if report.poll() is None:
                report.kill()
            report.wait()
        if self._store is not None:
            if self._store.poll() is None:
                self._store.terminate()
                try:
                    self._store.wait(0.4)
                except subprocess.TimeoutExpired:
                    self._store.kill()
                    self._store.wait()
            self._store.stdout.close()
        if self._temporary_data is not None:
            shutil.rmtree(self._temporary_data, ignore_errors=True)

    def _event(self, name, **fields):
        if self._events:
            self._events.write(json.dumps({"event": name, "time": time.time(), **fields}) + "\n")


def _how(exit_code):
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def _say(text):
    print(f"resilient-run: {text}", file=sys.stderr, flush=True)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
