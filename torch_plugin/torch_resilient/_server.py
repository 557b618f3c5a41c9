"""Finds and starts the store server, a program of its own. Needs no torch."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = "resilient-store"
TOKEN_FILE = "RESILIENT_TOKEN_FILE"
TLS_FILES = ("RESILIENT_TLS_CERT", "RESILIENT_TLS_KEY", "RESILIENT_TLS_CA")
ADDRESS_IN_USE = 3  # Exit code: another process listens there.
START_SECONDS = 10.0
_POLL_SECONDS = 0.005


class ServerStartError(Exception):
    """The server did not start. `exit_code` is None when it was too slow to say anything."""

    def __init__(self, message, exit_code=None):
        super().__init__(message)
        self.exit_code = exit_code


def binary():
    """The server's binary: beside the package, or beside the extension (editable install)."""
    folders = [os.path.dirname(os.path.abspath(__file__))]
    spec = importlib.util.find_spec("torch_resilient._C")
    if spec is not None and spec.origin:
        folders.append(os.path.dirname(spec.origin))
    for folder in folders:
        path = os.path.join(folder, "bin", PROGRAM)
        if os.access(path, os.X_OK):
            return path
    raise ServerStartError(
        f"the program {PROGRAM} is missing (looked in {', '.join(f + '/bin' for f in folders)});"
        " install the package again: pip install --no-build-isolation ."
    )


def main():
    """Console script `resilient-store`: becomes the server's binary."""
    try:
        path = binary()
    except ServerStartError as error:
        print(f"resilient-store: {error}", file=sys.stderr)
        return 1
    os.execv(path, [path, *sys.argv[1:]])


def serve_command(listen, data=None):
    """The command of a server at that address; `data`: the directory that it keeps its state in."""
    command = [binary(), "serve", "--listen", listen]
    return command + ["--data", os.path.abspath(data)] if data else command


def spawn(host, port, linger):
    """Starts a detached server and returns ("host:port", server id, path of its log file).

    It outlives this process; it ends by itself when its last member has said goodbye, or `linger`
    seconds after its members vanished. Raises ServerStartError.
    """
    with tempfile.TemporaryDirectory(prefix="resilient-store-") as folder:
        address_file = os.path.join(folder, "address")
        handle, log_path = tempfile.mkstemp(prefix="resilient-store-", suffix=".log")
        command = serve_command(join_host_port(host, port))
        command += ["--linger", f"{round(linger * 1000)}ms", "--address-file", address_file]
        with os.fdopen(handle, "wb") as log:
            process = _start_detached(command, log)
        try:
            address, server_id = _await_address(process, address_file, log_path)
        except ServerStartError:
            with contextlib.suppress(OSError):
                os.unlink(log_path)
            raise
    return address, server_id, log_path


def _start_detached(command, log):
    # The signal mask and dispositions of a trainer are no business of the server.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    for name in (TOKEN_FILE, *TLS_FILES):
        if environment.get(name):
            environment[name] = os.path.abspath(environment[name])  # Its cwd is another.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        close_fds=True,
        start_new_session=True,
        cwd="/",
        env=environment,
    )


def _await_address(process, address_file, log_path):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError), open(address_file, encoding="utf-8") as file:
            text = file.read()
            if text.count("\n") == 2:
                _reap_later(process)
                return text.split()
        exit_code = process.poll()
        if exit_code is not None:
            raise ServerStartError(_last_line(log_path, exit_code), exit_code)
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    raise ServerStartError(f"{PROGRAM} did not listen within {START_SECONDS:.0f} s")


def _reap_later(process):
    """Collects the server's exit status whenever it ends, so that it never stays as a zombie."""
    threading.Thread(target=process.wait, name="res-reap", daemon=True).start()


def _last_line(log_path, exit_code):
    with open(log_path, encoding="utf-8", errors="replace") as log:
        lines = [line.strip() for line in log if line.strip()]
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"{PROGRAM} ended with {how}" + (f": {lines[-1]}" if lines else "")


def join_host_port(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address):
    """(host, port) of host:port or [v6]:port. ValueError when it is neither."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
