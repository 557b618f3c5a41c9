"""resilient-run as the tests start it, with shell scripts for workers."""

import json
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
    raise AssertionError(f"{wanted!r} was not said within {seconds} s:\n{''.join(seen)}")


def shell(tmp_path, text):
    path = tmp_path / "worker.sh"
    path.write_text(text)
    return ["--no-python", "/bin/sh", path]


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
