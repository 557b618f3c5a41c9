"""What a situation is, and the ways in which its ranks are started."""

import os
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import harness

PROGRAM = Path(__file__).parent / "programs.py"
STORE_LINGERS = "2s"
# What a shell or a scheduler around the tests may have set; each situation sets its own.
FOREIGN = ("RESILIENT_", "MASTER_", "WORLD_", "RANK", "LOCAL_", "GROUP_", "SLURM_", "OMPI_")
FOREIGN += ("PMI_", "PMIX_", "MPI_", "TORCHELASTIC_", "PET_", "KUBERNETES_", "ACCELERATE_")


@dataclass(frozen=True)
class Command:
    """One process that a user starts."""

    arguments: list
    environment: dict
    stdin: str = ""
    folder: str | None = None


@dataclass(frozen=True)
class Situation:
    """A start of `program` (a function of programs.py, uses.py or ends.py) and what is right.

    What is right is that all `ranks` have trained (or as many worlds as `worlds` says, each rank
    counted) and all commands end with 0, unless `ends` is set: then no command ends with 0 and the
    errors speak of `ends`. `shortfall` says why ours is not right yet. Texts of `environment`,
    `each` and `wrap` may name {folder}, {port} and {host}.
    """

    name: str
    about: str
    program: str = "train"
    start: "Callable[[Situation, Place], list[Command]] | None" = None
    ranks: int = 2
    python: tuple = ()
    wrap: tuple = ()
    environment: dict = field(default_factory=dict)
    each: tuple = ()
    prepare: "Callable[[Place], None] | None" = None
    act: "Callable[[Place, list], None] | None" = None
    worlds: int | None = None
    ends: str = ""
    codes: tuple = ()
    taken_over: bool = False
    needs: tuple = ()
    quick: bool = False
    shortfall: str = ""

    def trained(self) -> int:
        return self.ranks if self.worlds is None else self.worlds


class Place:
    """The folder, the port and the variables of one run."""

    def __init__(self, folder: Path, backend: str, taken_over: bool = False):
        self.folder = folder
        self.backend = backend
        self.port = harness.free_port()
        self.named = "gloo" if taken_over else backend
        self.kept: object = None  # What `prepare` holds until the end.

    def fill(self, text: str) -> str:
        names = {"folder": self.folder, "port": self.port, "host": socket.gethostname()}
        for name, value in names.items():
            text = text.replace("{" + name + "}", str(value))
        return text

    def environment(self, *more: dict) -> dict:
        """That of the tests without what belongs to a job; None takes a variable away."""
        result = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        result |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RESILIENT_LINGER": STORE_LINGERS,
            "SITUATION_BACKEND": self.named,
            "SITUATION_FOLDER": str(self.folder),
            "TMPDIR": str(self.folder),
            "TORCH_FR_DUMP_TEMP_FILE": f"{self.folder}/trace_",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        if self.backend != "resilient":
            result["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # Nothing of ours is loaded.
        elif self.named == "gloo":
            result["RESILIENT_TAKE_OVER"] = "gloo"
        for variables in more:
            for name, value in variables.items():
                if value is None:
                    result.pop(name, None)
                else:
                    result[name] = self.fill(value)
        return result

    def marks(self, kind: str) -> list[str]:
        """What the ranks have left: the texts of their marks, the earliest first."""
        found = sorted(self.folder.glob(f"{kind}-*"), key=lambda path: path.name)
        return [path.read_text(errors="replace") for path in found]


def shell(text: str) -> tuple:
    """A wrapper that does `text` in a shell before it runs the program."""
    return ("bash", "-c", f'{text}; exec "$@"', "bash")


def python(situation: Situation, *arguments) -> list:
    return [sys.executable, *situation.python, *map(str, arguments)]


def variables(situation: Situation, rank: int) -> dict:
    """What plain variables say of one rank, and what the situation adds."""
    plain = {"RANK": str(rank), "WORLD_SIZE": str(situation.ranks)}
    plain |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(situation.ranks)}
    each = situation.each[rank] if situation.each else {}
    return plain | situation.environment | each


def ranks_of(situation: Situation, place: Place, command: list, **options) -> list[Command]:
    """The command once for each rank, wrapped, with the plain variables."""
    wrapped = [*map(place.fill, situation.wrap), *command]
    return [
        Command(wrapped, place.environment(variables(situation, rank)), **options)
        for rank in range(situation.ranks)
    ]


def plain(situation: Situation, place: Place) -> list[Command]:
    return ranks_of(situation, place, python(situation, PROGRAM, situation.program))


def from_stdin(situation: Situation, place: Place) -> list[Command]:
    text = f"import programs; programs.run({situation.program!r})"
    path = {"PYTHONPATH": str(PROGRAM.parent)}
    commands = ranks_of(situation, place, python(situation, "-"), stdin=text)
    return [Command(c.arguments, c.environment | path, c.stdin) for c in commands]


def inline(situation: Situation, place: Place) -> list[Command]:
    text = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import programs"
    text += f"; programs.run({situation.program!r})"
    return ranks_of(situation, place, python(situation, "-c", text))


def module(situation: Situation, place: Place) -> list[Command]:
    """python -m, in the folder of the programs."""
    command = python(situation, "-m", "programs", situation.program)
    return ranks_of(situation, place, command, folder=str(PROGRAM.parent))


def alone(situation: Situation, place: Place) -> list[Command]:
    """One process without any rank's variables, which starts the ranks itself."""
    wrapped = [*map(place.fill, situation.wrap), *python(situation, PROGRAM, situation.program)]
    return [Command(wrapped, place.environment(situation.environment))]


def together(situation: Situation, place: Place) -> list[Command]:
    """A script that starts all ranks in the background and waits for each; `wrap` is around it."""
    program = shlex.join(python(situation, PROGRAM, situation.program))
    lines = ["pids=''"]
    for rank in range(situation.ranks):
        given = variables(situation, rank)
        pairs = [f"{name}={place.fill(value)}" for name, value in given.items()]
        lines.append(f'env {shlex.join(pairs)} {program} & pids="$pids $!"')
    lines += ["code=0", "for pid in $pids; do wait $pid || code=$?; done", "exit $code"]
    wrapped = [*map(place.fill, situation.wrap), "bash", "-c", "\n".join(lines)]
    return [Command(wrapped, place.environment(situation.environment))]


def command(*arguments) -> "Callable[[Situation, Place], list[Command]]":
    """One command line of a launcher; {program} stands for programs.py, {python} for Python."""

    def start(situation: Situation, place: Place) -> list[Command]:
        words = [
            place.fill(word.replace("{program}", str(PROGRAM)).replace("{python}", sys.executable))
            for word in map(str, arguments)
        ]
        none = {"MASTER_ADDR": None, "MASTER_PORT": None}
        return [Command(words, place.environment(none, situation.environment))]

    return start
