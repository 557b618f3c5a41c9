"""A rank of an elastic run. Rank 1 ends once, at step 3, in the way and at the place it is told:
end_program.py MARK WAY WHERE. MARK: a file that says that it has ended."""

import atexit
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import torch_resilient

MARK, WAY, WHERE = sys.argv[1:4]
END = 3
STEPS = 6
TEARDOWN_SECONDS = 3.0


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise ValueError("a sample is broken")


def backward():
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: fail("in backward"))
    with torch.enable_grad():  # A commit has none.
        weight.sum().backward()


def fail(text):
    raise RuntimeError(text)


def say(line):
    """In one write: all ranks have the same file."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def end_all_from_a_thread():
    thread = threading.Thread(target=fail, args=("in a thread",))
    thread.start()
    thread.join()
    sys.exit(4)


def exit_slowly():
    atexit.register(time.sleep, TEARDOWN_SECONDS)
    fail("CUDA out of memory (pretended)")


def leave():
    dist.destroy_process_group()
    os._exit(1)


def end_by(number):
    if number == signal.SIGQUIT:  # Ignored where a shell has started all this in the background.
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(60)


WAYS = {
    "raise": lambda: fail("CUDA out of memory (pretended)"),
    "slow": exit_slowly,
    "exit": lambda: sys.exit(3),
    "system_exit": lambda: (_ for _ in ()).throw(SystemExit(5)),
    "os_exit": lambda: os._exit(6),
    "thread": end_all_from_a_thread,
    "loader": lambda: list(torch.utils.data.DataLoader(Broken(), num_workers=1)),
    "backward": backward,
    "abort": os.abort,
    "leave": leave,
    **{
        name: (lambda number=number: end_by(number))
        for name, number in [
            ("term", signal.SIGTERM),
            ("int", signal.SIGINT),
            ("quit", signal.SIGQUIT),
            ("kill", signal.SIGKILL),
        ]
    },
}


class Value:
    """Of the state; ends the process while it is being kept."""

    def __init__(self):
        self.is_due = False

    def __reduce__(self):
        if self.is_due:
            WAYS[WAY]()
        return Value, ()


def is_due(state):
    if dist.get_rank() != 1 or state.step != END or os.path.exists(MARK):
        return False
    open(MARK, "w").close()
    return True


def train(state):
    say(f"rank {dist.get_rank()} begins at step {state.step}")
    while state.step < STEPS:
        if WHERE == "collective" and is_due(state):
            WAYS[WAY]()
        dist.all_reduce(torch.ones(2))
        if WHERE == "idle" and is_due(state):
            WAYS[WAY]()
        if WHERE == "idle" and dist.get_rank() != 1 and state.step == END:
            time.sleep(0.3)  # It is gone before anybody needs it.
        state.step += 1
        state.value.is_due = WHERE == "commit" and is_due(state)
        state.commit()


def tell(event):
    if event["event"] == "fenced":
        say(f"FENCED {event['code']} {event['text']}")


dist.init_process_group("resilient")
torch_resilient.on_event(tell)
torch_resilient.elastic(train)(torch_resilient.State(step=0, value=Value()))
say(f"rank {dist.get_rank()} done")
