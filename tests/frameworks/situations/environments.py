"""Situations of the environment: shells, interpreters, folders, limits, hosts and addresses."""

import socket
import zipapp

from situations import situation
from situations.situation import PROGRAM, Place, Situation, shell

# ---- What is done before the start, or to what was started.


def make_zip(place: Place) -> None:
    zipapp.create_archive(PROGRAM.parent, place.folder / "programs.pyz", main="programs:main")


def make_odd_folder(place: Place) -> None:
    (place.folder / "ein Ordner für Läufe").mkdir()


def hold_port(place: Place) -> None:
    """A server of somebody else's at the job's port."""
    place.kept = socket.create_server(("127.0.0.1", place.port))


def zipped(one: Situation, place: Place) -> list:
    command = situation.python(one, place.folder / "programs.pyz", one.program)
    return situation.ranks_of(one, place, command)


def odd_path(one: Situation, place: Place) -> list:
    """The folder of the programs under another name, by a link."""
    link = place.folder / "ein Ordner für Läufe" / "programs"
    link.symlink_to(PROGRAM.parent)
    return situation.ranks_of(one, place, situation.python(one, link / PROGRAM.name, one.program))


def bare(one: Situation, place: Place) -> list:
    """env -i and what the job says, nothing else."""
    commands = situation.ranks_of(one, place, situation.python(one, PROGRAM, one.program))
    prefixes = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "SITUATION_", "RESILIENT_LINGER", "TORCH_")
    result = []
    for command in commands:
        kept = {k: v for k, v in command.environment.items() if k.startswith(prefixes)}
        pairs = [f"{name}={value}" for name, value in kept.items()]
        arguments = ["env", "-i", *pairs, *command.arguments]
        result.append(situation.Command(arguments, command.environment))
    return result


INTERPRETERS = [
    Situation("plain variables", "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT", quick=True),
    Situation("python -c", "the program is a text of the command line", start=situation.inline),
    Situation(
        "stdin program", "`python - < program`", start=situation.from_stdin
    ),
    Situation("python -m", "the program is a module", start=situation.module),
    Situation("zipapp", "the program is a .pyz", start=zipped, prepare=make_zip),
    Situation("python -O", "asserts are left out", python=("-O",)),
    Situation("python -I", "isolated: no PYTHON* variables, no user site", python=("-I",)),
    Situation("python -X dev", "development mode", python=("-X", "dev")),
    Situation(
        "PYTHONUNBUFFERED", "the same by variables",
        environment={"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    ),
    Situation(
        "PYTHONHASHSEED", "each rank with another seed of its own",
        each=({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}),
    ),
    Situation("python -m cProfile", "under a profiler", python=("-m", "cProfile")),
    Situation("python -m pdb", "under a debugger", python=("-m", "pdb", "-c", "continue")),
    Situation("path with blanks", "the program's folder has blanks and umlauts", start=odd_path,
              prepare=make_odd_folder),
]  # fmt: skip

SHELLS = [
    Situation(
        "bash -c", "one script starts all ranks with `&` and waits", start=situation.together,
        quick=True,
    ),
    Situation("env -i", "an empty environment but for the job's variables", start=bare),
    Situation("setsid", "each rank has a session of its own", wrap=("setsid", "--wait")),
    Situation("timeout", "each rank under `timeout 50`", wrap=("timeout", "50")),
    Situation("taskset", "all ranks on one core", wrap=("taskset", "-c", "0"),
              needs=("taskset",)),
    Situation("pipe", "`python program 2>&1 | cat`",
              wrap=("bash", "-o", "pipefail", "-c", '"$@" 2>&1 | cat', "bash")),
    Situation(
        "stderr without a reader", "what read the ranks' stderr has ended",
        wrap=shell("exec 2> >(exec true); wait $!"),
    ),
    Situation("closed streams", "`<&- >&- 2>&-`", wrap=shell("exec <&- >&- 2>&-"), quick=True),
    Situation("stderr to /dev/full", "no write to stderr succeeds", wrap=shell("exec 2>/dev/full")),
    Situation("umask 077", "files are for their owner alone", wrap=shell("umask 077")),
    Situation("umask 777", "files are for nobody", wrap=shell("umask 777")),
    Situation("cwd deleted", "the working folder is gone: MKL does not load, torch cannot compute",
              ends="oneMKL",
              wrap=shell('mkdir "{folder}/cwd-$$"; cd "{folder}/cwd-$$"; rmdir "$PWD"')),
    Situation("ulimit -n 64", "64 descriptors at the most", wrap=shell("ulimit -n 64"),
              quick=True),
    Situation("ulimit -f 64", "no file above 64 KiB", wrap=shell("ulimit -f 64")),
    Situation("ulimit -l 0", "no locked memory", wrap=shell("ulimit -l 0")),
    Situation("SIGPIPE and SIGCHLD ignored", "by whoever started the ranks",
              wrap=shell("trap '' PIPE CHLD")),
    Situation("all signals blocked", "by whoever started the ranks", program="blocked_signals"),
    Situation("no new privileges", "`setpriv --no-new-privs`",
              wrap=("setpriv", "--no-new-privs"), needs=("setpriv",)),
]  # fmt: skip

FOLDERS = [
    Situation("HOME unset", "no HOME", environment={"HOME": None}),
    Situation("HOME read-only", "HOME=/proc", environment={"HOME": "/proc"}),
    Situation("TMPDIR missing", "TMPDIR names no folder",
              environment={"TMPDIR": "/scratch/job-4711"}, quick=True),
    Situation("TMPDIR read-only", "TMPDIR=/proc", environment={"TMPDIR": "/proc"}),
    Situation("TMPDIR long", "a TMPDIR longer than a socket's path may be",
              environment={"TMPDIR": "{folder}/" + "long" * 50},
              prepare=lambda place: (place.folder / ("long" * 50)).mkdir()),
    Situation("TMPDIR a file", "TMPDIR=/etc/hostname", environment={"TMPDIR": "/etc/hostname"}),
    Situation("TMPDIR relative", "a relative path, which leads nowhere",
              environment={"TMPDIR": "no/such"}),
    Situation("TMPDIR full", "on a file system without a free block", needs=("mounts",),
              wrap=("unshare", "-m", *shell(
                  "mkdir -p {folder}/full; mount -t tmpfs -o size=4k none {folder}/full;"
                  " head -c 4096 /dev/zero > {folder}/full/x; export TMPDIR={folder}/full"))),
    Situation("no PATH", "PATH is not set", environment={"PATH": None}),
    Situation("LANG=C", "ASCII alone: LC_ALL=C, PYTHONUTF8=0, no coercion",
              environment={"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0",
                           "PYTHONCOERCECLOCALE": "0"}),
    Situation("LANG unknown", "a locale that is not installed",
              environment={"LC_ALL": "xx_XX.ISO-8859-7"}),
    Situation("http_proxy", "proxies that are not there",
              environment={"http_proxy": "http://10.255.255.1:1", "all_proxy": "socks5://10.1:1"}),
    Situation("/dev/shm tiny", "64 KiB of shared memory", needs=("mounts",),
              wrap=("unshare", "-m", *shell("mount -t tmpfs -o size=64k none /dev/shm"))),
    Situation("/dev/shm read-only", "no shared memory can be made", needs=("mounts",),
              wrap=("unshare", "-m", *shell("mount -t tmpfs -o ro none /dev/shm"))),
    Situation("/tmp read-only", "and TMPDIR is not set", needs=("mounts",),
              environment={"TMPDIR": None},
              wrap=("unshare", "-m", *shell(
                  'mkdir -p {folder}/in; mount --bind /tmp /tmp; mount --bind {folder} {folder};'
                  ' mount -o remount,ro,bind /tmp'))),
    Situation("/proc hidden", "/proc is empty", needs=("mounts",),
              wrap=("unshare", "-m", *shell("mount -t tmpfs none /proc"))),
]  # fmt: skip


def name_is(name: str) -> tuple:
    """A rank with a UTS namespace and a host name of its own."""
    return ("unshare", "-u", *shell(f"echo -n '{name}' > /proc/sys/kernel/hostname"))


ODD = "Node_7.rack-1.Süd"
HOSTS = [
    Situation("host name odd", f"the host is called {ODD}", wrap=name_is(ODD), needs=("names",)),
    Situation("host name of 64", "64 characters", wrap=name_is("n" * 64), needs=("names",)),
    Situation("host name unknown", "a name that resolves to nothing",
              wrap=name_is("nowhere.invalid"), needs=("names",)),
    Situation("host names differ", "two containers with one network",
              wrap=("unshare", "-u", *shell("hostname container-$RANK")), needs=("names",)),
    Situation("network none", "a network of the loopback alone, as `docker run --network none`",
              start=situation.together, needs=("network",),
              wrap=("unshare", "-n", *shell("ip link set lo up"))),
    Situation("loopback down", "a network without any address", start=situation.together,
              needs=("network",), wrap=("unshare", "-n"), ends="127.0.0.1"),
    Situation("pid namespaces", "each rank is process 1 of its container", needs=("mounts",),
              wrap=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")),
    Situation("containers of a pod", "each rank with processes, /dev/shm, IPC and a host name of"
              " its own, and one network", needs=("mounts",),
              wrap=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--ipc", "--uts",
                    *shell("mount -t tmpfs none /dev/shm; hostname pod-$RANK"))),
    Situation("user without a name", "a user id that is in no list, as on OpenShift",
              needs=("setpriv", "mounts"),
              wrap=("setpriv", "--reuid=123456", "--regid=123456", "--clear-groups",
                    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")),
    Situation("pidfd refused", "an old container runtime: pidfd_open is EPERM",
              program="without_pidfd"),
    Situation("MASTER_ADDR=localhost", "a name", environment={"MASTER_ADDR": "localhost"}),
    Situation("MASTER_ADDR=0.0.0.0", "on all ranks", environment={"MASTER_ADDR": "0.0.0.0"}),
    Situation("MASTER_ADDR own name", "the host's own name, 127.0.0.1 in /etc/hosts",
              environment={"MASTER_ADDR": "{host}"}),
    Situation("MASTER_ADDR two spellings", "PyTorchJob: localhost on the master, its address"
              " elsewhere", each=({"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}),
              quick=True),
    Situation("MASTER_ADDR upper case", "LOCALHOST and localhost",
              each=({"MASTER_ADDR": "LOCALHOST"}, {"MASTER_ADDR": "localhost"})),
    Situation("MASTER_ADDR=::1", "IPv6's loopback", environment={"MASTER_ADDR": "::1"}),
    Situation("MASTER_ADDR unknown", "a name that resolves to nothing", program="impatient",
              environment={"MASTER_ADDR": "nowhere.invalid"}, ends="nowhere.invalid"),
    Situation("MASTER_ADDR another loopback", "127.0.0.2",
              environment={"MASTER_ADDR": "127.0.0.2"}),
    Situation("MASTER_ADDR short", "127.1, as inet_aton reads it",
              environment={"MASTER_ADDR": "127.1"}),
    Situation("tcp://[::1]:port", "IPv6's loopback in the URL", program="tcp_six"),
    Situation("port with blanks", "MASTER_PORT=' 1234 ', RANK='0\\n'",
              environment={"MASTER_PORT": " {port} "}, each=({"RANK": "0\n"}, {"RANK": " 1"})),
    Situation("RANK with a sign", "RANK=+1, WORLD_SIZE=02",
              each=({"RANK": "+0"}, {"RANK": "+1"}), environment={"WORLD_SIZE": "02"}),
    Situation("MASTER_PORT=0", "two ranks cannot know which", environment={"MASTER_PORT": "0"},
              ends="port"),
    Situation("MASTER_PORT empty", "", environment={"MASTER_PORT": ""}, ends="MASTER_PORT"),
    Situation("MASTER_PORT unset", "", environment={"MASTER_PORT": None}, ends="MASTER_PORT"),
    Situation("RANK unset", "", environment={"RANK": None}, ends="RANK"),
    Situation("RANK beyond", "ranks 0 and 2 of 2", each=({"RANK": "0"}, {"RANK": "2"}),
              program="impatient", ends="rank"),
    Situation("RANK twice", "two ranks 0 of 2", environment={"RANK": "0"}, program="impatient",
              ends="Error"),
    Situation("port taken", "another server listens there and says nothing", program="impatient",
              prepare=hold_port, ends="127.0.0.1"),
]  # fmt: skip
