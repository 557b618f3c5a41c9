"""Names of backends, which are ours, and numbers of variables. Imported with torch, so that it
imports nothing itself."""

BACKEND = "resilient"
TAKE_OVER = "RESILIENT_TAKE_OVER"

TORCH_DEFAULT = "cpu:gloo,cuda:nccl"  # What torch makes of no name at all.


def number(text):
    """Of a variable, with blanks or an end of line around it: what int() makes of it, as torch
    does; None: it is no number."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


def names_us(backend):
    """True for "resilient", and for "cpu:resilient,..." where any device is served by us."""
    if not isinstance(backend, str):
        return False
    return any(part.rpartition(":")[2].strip() == BACKEND for part in backend.lower().split(","))


def serves(backend, device):
    """True where tensors of that type of device are ours in a group of that backend."""
    if not isinstance(backend, str):
        return False
    parts = (part.rpartition(":") for part in backend.lower().split(","))
    return any(name.strip() == BACKEND and on.strip() in ("", device) for on, _, name in parts)
