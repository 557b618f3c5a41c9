"""Our collectives against Gloo's and two MPI libraries', side by side on one machine.

The peers: ours through PyTorch ("resilient"), ours in C++ alone ("native": the CPU communicator,
without session and store), Gloo through PyTorch, MPICH and Open MPI (in C; left out, with a note,
where they are not installed), and memcpy: the same bytes copied once by each rank, a limit for all
that use shared memory.

    python benchmarks/collective_bench.py --out benchmarks/results/collectives.json

prints a table and writes the JSON, which collective_plot.py draws. With "--peers tcp checksums
encrypted" it compares ours over TCP, as between hosts whose network takes no time. A size is that
of the tensor on each rank; where a collective consists of parts, there is one for each rank, of at
least one float. All peers of N ranks run at the same time, one of them measures while the others
wait for a line. A round measures each peer once, in random order; a figure is the median of the
rounds, of the slowest rank's time for one call. The calls of a broadcast have their roots in turn.
All results are checked once for each measurement.

How a peer is driven: rank R reads the lines of the FIFO DIRECTORY/rank-R, "COLLECTIVE BYTES CALLS"
or "end"; to DIRECTORY/answers it writes "R ready" once and "R SECONDS" for each, or "R error ...".
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

HERE = Path(__file__).resolve().parent
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
SIZES = tuple(8**power for power in range(1, 9)) + (64 << 20,)
# Ours through PyTorch over TCP, by their settings.
LINKS = {
    "tcp": {},
    "checksums": {"RESILIENT_CHECKSUM": "1"},
    "encrypted": {"RESILIENT_LINK_TLS": "1"},
}
PEERS = ("resilient", "native", "gloo", "mpich", "openmpi")
START_SECONDS = 120
ANSWER_SECONDS = 120
CALLS_MAX = 2000
CALLS_MIN = 3


class PeerFailed(Exception):
    pass


class World:
    """The ranks of one peer as processes, until close()."""

    def __init__(self, name, ranks, command, environment=None):
        self.name = name
        self.ranks = ranks
        self.directory = tempfile.mkdtemp(prefix="collective_bench-")
        names = [f"rank-{rank}" for rank in range(ranks)]
        for fifo in (*names, "answers"):
            os.mkfifo(self._path(fifo))
        # Opened for both: so it waits for nobody, and ends for the ranks when this process ends.
        self.commands = [os.open(self._path(fifo), os.O_RDWR) for fifo in names]
        self.answers = os.open(self._path("answers"), os.O_RDWR)
        self.rest = b""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*map(str, command), self.directory],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def _path(self, name):
        return os.path.join(self.directory, name)

    def wait_until_ready(self):
        answers = self._answers(START_SECONDS)
        if set(answers) != {"ready"}:
            self._fail(" ".join(answers))

    def seconds_a_call(self, operation, size, calls):
        self._tell(f"{operation} {size} {calls}\n")
        answers = self._answers(ANSWER_SECONDS)
        for text in answers:
            if text.startswith("error"):
                self._fail(text)
        return max(map(float, answers)) / calls

    def close(self):
        with contextlib.suppress(PeerFailed):
            if self.process.poll() is None:
                self._tell("end\n")
                self.process.wait(30)
        for descriptor in (*self.commands, self.answers):
            os.close(descriptor)
        self._stop()
        self.log.close()
        shutil.rmtree(self.directory)

    def _tell(self, line):
        for descriptor in self.commands:
            os.write(descriptor, line.encode())

    def _answers(self, seconds):
        """One answer of each rank."""
        found = []
        deadline = time.monotonic() + seconds
        while len(found) < self.ranks:
            while b"\n" not in self.rest:
                if self.process.poll() is not None:
                    self._fail(f"it has ended with {self.process.returncode}")
                if time.monotonic() > deadline:
                    self._fail(f"no answer within {seconds} s")
                if select.select([self.answers], [], [], 0.5)[0]:
                    self.rest += os.read(self.answers, 65536)
            line, self.rest = self.rest.split(b"\n", 1)
            found.append(line.decode().partition(" ")[2])
        return found

    def _fail(self, why):
        self._stop()
        self.log.seek(0)
        output = self.log.read().decode(errors="replace")[-4000:]
        raise PeerFailed(f"{self.name}, {self.ranks} ranks: {why}\n{output}")

    def _stop(self):
        """Every peer's ranks end with the process that started them, and that one on SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


# ---- The peers ----


def mpi_programs(peers, directory):
    """{peer: (program, version)} of the MPI libraries that are installed."""
    found = {}
    for peer in ("mpich", "openmpi"):
        if peer not in peers:
            continue
        compiler, launcher = f"mpicc.{peer}", f"mpiexec.{peer}"
        if not (shutil.which(compiler) and shutil.which(launcher)):
            print(f"{peer} is left out: {compiler} or {launcher} is not installed")
            continue
        program = os.path.join(directory, f"mpi_bench.{peer}")
        subprocess.run([compiler, "-O2", "-o", program, HERE / "mpi_bench.c"], check=True)
        said = subprocess.run([program], env=mpi_environment(), capture_output=True, text=True)
        found[peer] = program, " ".join(said.stdout.splitlines()[0].partition(",")[0].split())
    return found


def mpi_environment():
    """Open MPI refuses to run as root without these two; in containers everybody is root."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def start_worlds(args, programs, ranks):
    """{peer: world}; all ranks are ready."""
    worlds = {}
    try:
        for peer in args.peers:
            environment = {"RESILIENT_LOG": "error"}
            if peer in ("resilient", "gloo"):
                command = [sys.executable, HERE / "collective_ranks.py", peer, ranks]
            elif peer in LINKS:
                command = [sys.executable, HERE / "collective_ranks.py", "resilient", ranks]
                environment |= {"RESILIENT_SHM_LIMIT": "0", **LINKS[peer]}
            elif peer == "native":
                command = [args.native, ranks]
            elif peer not in programs:
                continue
            else:
                environment = mpi_environment()
                more = ["--oversubscribe", "--bind-to", "none"] if peer == "openmpi" else []
                command = [f"mpiexec.{peer}", *more, "-n", ranks, programs[peer][0]]
            worlds[peer] = World(peer, ranks, command, environment)
        for world in worlds.values():
            world.wait_until_ready()
    except BaseException:
        close_all(worlds)
        raise
    return worlds


def close_all(worlds):
    for world in worlds.values():
        world.close()


# ---- The measurements ----


def measure(worlds, operation, size, args, chance):
    """A row for each world."""
    calls, found = {}, {peer: [] for peer in worlds}
    for peer, world in worlds.items():
        once = world.seconds_a_call(operation, size, CALLS_MIN)
        calls[peer] = max(CALLS_MIN, min(CALLS_MAX, int(args.seconds / once)))
    order = list(worlds)
    for _ in range(args.rounds):
        chance.shuffle(order)
        for peer in order:
            found[peer].append(worlds[peer].seconds_a_call(operation, size, calls[peer]))
    for peer, times in found.items():
        yield {
            "operation": operation,
            "ranks": worlds[peer].ranks,
            "bytes": size,
            "peer": peer,
            "seconds": statistics.median(times),
            "least": min(times),
            "most": max(times),
            "calls": calls[peer],
        }


def all_rows(args, programs, chance):
    for ranks in args.ranks:
        worlds = start_worlds(args, programs, ranks)
        try:
            print(f"\n{ranks} ranks, us a call {'':11}" + "".join(f"{p:>12}" for p in worlds))
            for operation in args.operations:
                for size in [0] if operation == "barrier" else args.sizes:
                    rows = list(measure(worlds, operation, size, args, chance))
                    show(rows)
                    yield from rows
            if "native" in worlds:
                yield from copies(worlds["native"], args, chance)
        finally:
            close_all(worlds)


def copies(world, args, chance):
    for size in args.sizes:
        for row in measure({"native": world}, "copy", size, args, chance):
            row["peer"] = "memcpy"
            show([row])
            yield row


def show(rows):
    first = rows[0]
    size = f"{first['bytes']:,} B" if first["bytes"] else ""
    figures = "".join(f"{row['seconds'] * 1e6:12.1f}" for row in rows)
    print(f"{first['operation']:15} {size:>13}{figures}", flush=True)


# ---- The report ----


def versions(programs):
    found = {peer: version for peer, (_, version) in programs.items()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


def commit():
    """Of this tree; with "+" where something is not committed."""
    command = ["git", "-C", HERE, "describe", "--always", "--dirty=+", "--exclude=*"]
    said = subprocess.run(command, capture_output=True, text=True)
    return said.stdout.strip()


def main():
    parser = record.parser(__doc__)
    native = HERE.parent / "build" / "bin" / "collective_bench"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, *LINKS), default=PEERS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of a measurement")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the peers")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--native", default=native, help="the program collective_bench")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 7)
    args.seconds = args.seconds or (0.02 if args.quick else 0.05)
    args.sizes = args.sizes or (SIZES[::2] if args.quick else SIZES)
    began = record.machine()
    with tempfile.TemporaryDirectory() as directory:
        programs = mpi_programs(args.peers, directory)
        rows = list(all_rows(args, programs, random.Random(args.seed)))
    if args.out:
        head = {
            "machine": began,
            "versions": versions(programs),
            "commit": commit(),
            "seed": args.seed,
            "rounds": args.rounds,
        }
        record.write(args.out, {**head, "rows": rows})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PeerFailed as error:
        sys.exit(f"collective_bench: {error}")
