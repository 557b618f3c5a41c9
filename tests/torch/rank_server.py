"""Forks rank processes from a process that has imported torch and started no thread.

Importing torch costs a second and a half of a core; a fork costs some milliseconds. Run by the
harness with the number of its control socket; each request there is one pickled message with three
descriptors: stdout, stderr and the rank's channel. A request for a host makes a fork server in
namespaces of its own, whose control socket is that channel.
"""

import gc
import importlib.util
import os
import pickle
import select
import signal
import socket
import sys
import traceback

import namespaces

# Functions of ranks come from files of tests, which may use what is in tests/support.
sys.path.insert(1, os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))

MESSAGE_LIMIT = 1 << 20
EXIT_RAISED = 1
FRAMEWORKS = (
    "torch._dynamo",  # Two seconds that DDP and optimizers would spend in each rank.
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.data",
)

channel = None  # In a rank: the socket to the test.


def tell(message):
    """Rank side: sends a message to the test."""
    channel.send(pickle.dumps(("told", message)))


def hear():
    """Rank side: the next message of the test; blocks."""
    return pickle.loads(channel.recv(MESSAGE_LIMIT))


def serve(control):
    """Returns in a forked rank only, with what it has to run."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children = {}  # pidfd -> (number of the request, pid)
    control.send(pickle.dumps(("ready", _threads())))
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != control.fileno():
                number, pid = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                status = os.waitpid(pid, 0)[1]
                control.send(pickle.dumps(("exited", number, os.waitstatus_to_exitcode(status))))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_LIMIT, 3)
            if not message:
                sys.exit(0)
            request = pickle.loads(message)
            pid = os.fork()
            if pid == 0:
                for inherited in children:
                    os.close(inherited)
                control.close()
                return request, descriptors
            for passed in descriptors:
                os.close(passed)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (request["number"], pid)
            poll.register(pidfd, select.POLLIN)
            # The harness sees other numbers of processes than a host does.
            socket.send_fds(control, [pickle.dumps(("started", request["number"]))], [pidfd])
            if not control.recv(1):  # It knows the process: from now on that may be reaped.
                sys.exit(0)


def adopt(descriptors):
    """Makes a forked process the owner of what came with its request; returns its socket."""
    os.setsid()
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)
    for used in descriptors[:2]:
        os.close(used)
    return socket.socket(fileno=descriptors[2])


def become_rank(request, descriptors):
    """Runs the request in this forked process; ends like a Python program does."""
    global channel
    channel = adopt(descriptors)
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [request["file"]]
    try:
        function = getattr(_load(request["file"]), request["function"])
        value = function(*request["args"])
        channel.send(pickle.dumps(("returned", value)))
    except BaseException as error:
        _send_error(error)
        raise


def _load(file):
    name = os.path.splitext(os.path.basename(file))[0]
    sys.path.insert(0, os.path.dirname(file))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Before it runs: what it defines is pickled by its name.
    spec.loader.exec_module(module)
    return module


def _send_error(error):
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(("raised", error, text))
    except Exception:
        message = pickle.dumps(("raised", RuntimeError(repr(error)), text))
    try:
        channel.send(message)
    except OSError:
        pass


def _threads():
    return len(os.listdir("/proc/self/task"))


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.modules["triton"] = None  # Makes code for GPUs; at a rank's end it lists what is frozen.
    import numpy
    import torch

    # On a real GPU none of it: what asks CUDA here leaves the forked ranks without.
    if os.environ.get("GPU_TESTS") != "real":
        for name in FRAMEWORKS:
            importlib.import_module(name)
    torch.set_num_threads(1)
    numpy.random.seed(0)
    # The modules of ranks say `import rank_server`; they must find this one, with its channel.
    sys.modules["rank_server"] = sys.modules["__main__"]
    # A rank's end looks only at what the rank has made, and takes 0.4 s of a core instead of 1.1.
    gc.collect()
    gc.freeze()
    request, descriptors = serve(control)
    while "host" in request:
        control = adopt(descriptors)
        namespaces.become_host(*request["host"])
        request, descriptors = serve(control)
    become_rank(request, descriptors)


if __name__ == "__main__":
    main()
