"""What programs of more than one framework, or of more than one test, have in common."""

import contextlib
import sys
import time
from datetime import timedelta


def tell(*values):
    """A line for the test. In one write, for the ranks of a launcher share their output."""
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def telling_failure():
    """The time of what is raised inside, as it reaches the program."""
    try:
        yield
    except Exception:
        tell("failed", time.time())
        raise


def accelerator(backend, timeout):
    """An Accelerator on the CPU; `backend` may be None."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    options = {"timeout": timedelta(seconds=timeout)}
    if backend:
        options["backend"] = backend
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(**options)])


def batches_of_one_ratio(ratios, rank, size, batch):
    """(ratio, indices) of the batches of one rank, which has a contiguous part of `ratios`; what is
    left of each ratio is dropped."""
    share = len(ratios) // size
    buckets = {}
    for image in range(rank * share, (rank + 1) * share):
        bucket = buckets.setdefault(ratios[image], [])
        bucket.append(image)
        if len(bucket) == batch:
            yield ratios[image], list(bucket)
            bucket.clear()
