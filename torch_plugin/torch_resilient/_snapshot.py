"""Host copies of named values: taken, sent, and loaded back."""

import io
import pickle

import torch
import torch.distributed as dist

_TREE, _TENSOR, _PLAIN = "tree", "tensor", "plain"


class Snapshot:
    """Values by name: for objects the tree of their state_dict, for tensors a tensor, for plain
    values their pickle; tensors are apart, numbered, all on the CPU."""

    def __init__(self):
        self.kinds = {}  # name -> (kind, bytes); tensors within are references by number.
        self.tensors = []


def take(values, reused=None):
    """A snapshot of the values. `reused`: an old one whose memory may be taken over."""
    snapshot = Snapshot()
    memory = iter(reused.tensors) if reused is not None else iter(())
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            kind, content = _TENSOR, value
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            kind, content = _TREE, value.state_dict()
        else:
            kind, content = _PLAIN, value
        buffer = io.BytesIO()
        _Packer(buffer, snapshot.tensors, memory).dump(content)
        snapshot.kinds[name] = (kind, buffer.getvalue())
    return snapshot


def load(values, snapshot):
    """Brings the values back. Tensors and objects are changed in place, plain values replaced, and
    gradients are gone. The snapshot stays as it is: nothing of it is shared with the values."""
    for name in values:
        if name not in snapshot.kinds:
            raise ValueError(f"the value {name!r} is not in the commit: all ranks name the same")
        kind, packed = snapshot.kinds[name]
        content = _Unpacker(io.BytesIO(packed), snapshot.tensors).load()
        if kind == _TENSOR:
            with torch.no_grad():
                values[name].copy_(content)
        elif kind == _TREE:
            values[name].load_state_dict(content)
            _drop_gradients(values[name])
        else:
            values[name] = content


def _drop_gradients(value):
    """What a backward that failed has left would be added to by the next one."""
    parameters = []
    if isinstance(value, torch.nn.Module):
        parameters = value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        parameters = [each for group in value.param_groups for each in group["params"]]
    for parameter in parameters:
        parameter.grad = None


def broadcast(snapshot, source):
    """The source's snapshot on every rank of the world."""
    header = [None]
    if dist.get_rank() == source:
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in snapshot.tensors]
        header = [(snapshot.kinds, shapes)]
    dist.broadcast_object_list(header, src=source)
    if dist.get_rank() != source:
        snapshot = Snapshot()
        snapshot.kinds, shapes = header[0]
        snapshot.tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    for tensor in snapshot.tensors:
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source)
    return snapshot


class _Packer(pickle.Pickler):
    """Pickles with the tensors kept apart, as host copies."""

    def __init__(self, file, tensors, memory):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._memory = memory

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(self._copy(value.detach()))
        return len(self._tensors) - 1

    def _copy(self, tensor):
        old = next(self._memory, None)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old.copy_(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


class _Unpacker(pickle.Unpickler):
    """The inverse, with fresh copies of the tensors: an optimizer keeps what it is given."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number):
        return self._tensors[number].clone()
