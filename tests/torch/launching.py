"""resilient-run as the tests start it, with shell scripts for workers."""

import contextlib
import json
import os
import subprocess
import sys
import threading

RESILIENT_RUN = ("-m", "torch_resilient.run")


def launch(*arguments, prefix=(), program=RESILIENT_RUN, **options):
    """`prefix`: of the command. `program`: what Python is to run."""
    command = [*prefix, sys.executable, *program, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})


def run(*arguments, seconds=20, **options):
    """(exit code, stdout, stderr)"""
    process = launch(*arguments, **options)
    stdout, stderr = process.communicate(timeout=seconds)
    return process.returncode, stdout, stderr


def line_with(process, name, wanted, seconds=60):
    """The next line of its `name` (stdout, stderr) with that text. Fails when it ends without, and
    after the time, at which it is killed."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    seen = []
    try:
        for line in getattr(process, name):
            if wanted in line:
                return line
            seen.append(line)
    finally:
        timer.cancel()
        timer.join()
    said = "".join(seen) + _waiting_in(process.stderr if name == "stdout" else process.stdout)
    raise AssertionError(f"{wanted!r} was not said within {seconds} s:\n{said}")


def _waiting_in(pipe):
    """What was written to it and not read yet, also while somebody keeps it open."""
    with contextlib.suppress(AttributeError, OSError):
        os.set_blocking(pipe.fileno(), False)
        return os.read(pipe.fileno(), 1 << 20).decode(errors="replace")
    return ""


def shell(tmp_path, text):
    path = tmp_path / "worker.sh"
    path.write_text(text)
    return ["--no-python", "/bin/sh", path]


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
