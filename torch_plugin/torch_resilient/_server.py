"""The program of the store server, and its addresses as text. Needs no torch."""

import importlib.util
import os
import sys

from torch_resilient._say import say

PROGRAM = "resilient-store"
TOKEN_FILE = "RESILIENT_TOKEN_FILE"
TLS_FILES = ("RESILIENT_TLS_CERT", "RESILIENT_TLS_KEY", "RESILIENT_TLS_CA")


class ProgramMissingError(Exception):
    """The installation is not whole."""


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
    raise ProgramMissingError(
        f"the program {PROGRAM} is missing (looked in {', '.join(f + '/bin' for f in folders)});"
        " install the package again: pip install --no-build-isolation ."
    )


def main():
    """Console script `resilient-store`: becomes the server's binary."""
    try:
        path = binary()
    except ProgramMissingError as error:
        say(f"resilient-store: {error}")
        return 1
    os.execv(path, [path, *sys.argv[1:]])


def serve_command(listen, data=None):
    """The command of a server at that address; `data`: the directory that it keeps its state in."""
    command = [binary(), "serve", "--listen", listen]
    return command + ["--data", os.path.abspath(data)] if data else command


def join_host_port(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address):
    """(host, port) of host:port or [v6]:port. ValueError when it is neither."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
