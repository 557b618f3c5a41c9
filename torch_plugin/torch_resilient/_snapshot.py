"""Host copies of named values: taken, sent, and loaded back."""

import io
import pickle
import sys

import torch
import torch.distributed as dist

_TREE, _TENSOR, _PLAIN = "tree", "tensor", "plain"
# What shards can be given back to.
_SPREAD_TYPES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


class Snapshot:
    """Values by name: for objects the tree of their state_dict, for tensors a tensor, for plain
    values their pickle; tensors are apart, numbered, all on the CPU."""

    def __init__(self):
        self.kinds = {}  # name -> (kind, bytes); tensors within are references by number.
        self.tensors = []


class _Shard:
    """This rank's part of a tensor that is spread over ranks."""

    def __init__(self, local):
        self.local = local


def take(values, reused=None, shards=False):
    """A snapshot of the values. `reused`: an old one whose memory may be taken over. Of a tensor
    that is spread over ranks this one's part is taken, if `shards` are wanted, and it is in what
    can be given it back; else ValueError."""
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
        packer = _Packer(buffer, snapshot.tensors, memory)
        packer.dump(content)
        if packer.has_shards and not shards:
            raise ValueError(
                f"{name!r} has tensors that are spread over ranks (DTensor), which are not the same"
                " on every rank: name it in per_rank={...}"
            )
        if packer.has_shards and not isinstance(value, _SPREAD_TYPES):
            raise ValueError(
                f"{name!r} is a {type(value).__name__} with tensors that are spread over ranks"
                " (DTensor): these come back in a module, an optimizer, or alone; give them names"
                " of their own in per_rank={...}"
            )
        snapshot.kinds[name] = (kind, buffer.getvalue())
    return snapshot


def load(values, snapshot):
    """Brings the values back. Tensors and objects are changed in place, plain values replaced, and
    gradients are gone. What is None for want of its object stays so. The snapshot stays as it is:
    nothing of it is shared with the values."""
    for name in values:
        if name not in snapshot.kinds:
            raise ValueError(f"the value {name!r} is not in the commit: all ranks name the same")
        kind, packed = snapshot.kinds[name]
        if kind != _PLAIN and values[name] is None:
            continue
        content = _Unpacker(io.BytesIO(packed), snapshot.tensors).load()
        if kind == _TENSOR:
            if isinstance(content, _Shard):
                content = _whole(name, content, values[name])
            with torch.no_grad():
                values[name].copy_(content)
        elif kind == _TREE:
            _spread(name, values[name], content)
            values[name].load_state_dict(content)
            _drop_gradients(values[name])
        else:
            values[name] = content


def load_object(name, value, snapshot):
    """Brings an object, or a tensor, back; not where the snapshot has no state of one. Returns
    whether it has."""
    if snapshot.kinds[name][0] == _PLAIN:
        return False
    load({name: value}, snapshot)
    return True


def _spread(name, value, content):
    """Makes tensors that are spread over the present ranks of the shards in a tree."""
    if isinstance(value, torch.nn.Module):
        for key, present in value.state_dict(keep_vars=True).items():
            if isinstance(content.get(key), _Shard):
                content[key] = _whole(f"{name}.{key}", content[key], present)
    elif isinstance(value, torch.optim.Optimizer):
        # Its state is numbered as its parameters are, and spread as they are.
        parameters = [each for group in value.param_groups for each in group["params"]]
        for number, parameter in enumerate(parameters):
            state = content["state"].get(number, {})
            for key in [key for key in state if isinstance(state[key], _Shard)]:
                state[key] = _whole(f"{name}.state[{number}].{key}", state[key], parameter)


def _is_spread(value):
    """Whether it is a DTensor; where nobody has imported these there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _whole(what, shard, like):
    spread = _is_spread(like)
    if not spread or like.to_local().shape != shard.local.shape:
        here = tuple(like.to_local().shape) if spread else "none"
        raise ValueError(
            f"this rank's shard of {what} is {here}, and that of the commit is"
            f" {tuple(shard.local.shape)}: shards fit a world of the size and mesh that they were"
            " made in; for another one start from a checkpoint (torch.distributed.checkpoint)"
        )
    return torch.distributed.tensor.DTensor.from_local(
        shard.local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


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
        self.has_shards = False

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        if _is_spread(value):
            self.has_shards = True
            return "shard", self.persistent_id(value.to_local())
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
        if isinstance(number, tuple):
            return _Shard(self.persistent_load(number[1]))
        return self._tensors[number].clone()
