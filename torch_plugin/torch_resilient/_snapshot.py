"""Host copies of named values: taken, sent, and read. _restore.py brings them back."""

import contextlib
import io
import pickle
import sys
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

TREE, TENSOR, PLAIN = "tree", "tensor", "plain"
# What shards can be given back to.
_SPREAD_TYPES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
# Of each optimizer of a State: how many parameter groups it had when the State got it.
_first_groups = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_modes():
    """No inference mode and no gradients for what we do, whatever the caller is in: a tensor that
    is made in inference mode cannot be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Kept(NamedTuple):
    """One value in a snapshot."""

    kind: str  # TREE: the state_dict of an object; TENSOR; PLAIN: the value itself.
    packed: bytes  # Its pickle; tensors within are references to the snapshot's.
    type_name: str
    bound: bool  # The function that elastic runs makes the object itself, State.bind.
    # Of an optimizer: the parameters of each group that it was given later, by the index of the
    # group, as (name of the module in the State, name of the parameter). None: of no module there.
    added: dict


class Snapshot:
    """Values by name, as Kept; their tensors are apart, numbered, all on the CPU."""

    def __init__(self):
        self.kinds = {}
        self.tensors = []


class Shard:
    """This rank's part of a tensor that is spread over ranks."""

    def __init__(self, local, requires_grad):
        self.local = local
        self.requires_grad = requires_grad


# A reference to a tensor is its number, shifted, and what it is besides its numbers; with the kind
# of its device in a pair where that is not the CPU.
_PARAMETER, _GRADIENT, _SHIFT = 1, 2, 2


def note(value):
    """A State has got this value."""
    if isinstance(value, torch.optim.Optimizer):
        _first_groups.setdefault(value, len(value.param_groups))


def take(values, reused=None, shards=False, bound=()):
    """A snapshot of the values. `reused`: an old one whose memory may be taken over. Of a tensor
    that is spread over ranks this one's part is taken, if `shards` are wanted, and it is in what
    can be given it back; else ValueError. `bound`: names of objects that State.bind gave."""
    snapshot = Snapshot()
    memory = iter(reused.tensors) if reused is not None else iter(())
    with own_modes():
        for name, value in values.items():
            kind, content = _content_of(value)
            buffer = io.BytesIO()
            # In a state_dict every tensor has its own name.
            packer = _Packer(buffer, snapshot.tensors, memory, aliases=kind == PLAIN)
            packer.dump(content)
            if packer.has_shards:
                _check_shards(name, value, shards)
            added = _added_groups(value, values)
            kept = Kept(kind, buffer.getvalue(), type_name(value), name in bound, added)
            snapshot.kinds[name] = kept
    return snapshot


def type_name(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_object(value):
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def own_state_dict(module):
    """Whether a module's state_dict is torch's, and so takes its arguments."""
    return type(module).state_dict is torch.nn.Module.state_dict


def _content_of(value):
    if isinstance(value, torch.Tensor):
        return TENSOR, value
    if isinstance(value, torch.nn.Module) and own_state_dict(value):
        return TREE, value.state_dict(keep_vars=True)  # With what requires a gradient.
    if is_object(value):
        return TREE, value.state_dict()
    return PLAIN, value


def _check_shards(name, value, wanted):
    if not wanted:
        raise ValueError(
            f"{name!r} has tensors that are spread over ranks (DTensor), which are not the same"
            " on every rank: name it in per_rank={...}"
        )
    if not isinstance(value, _SPREAD_TYPES):
        raise ValueError(
            f"{name!r} is a {type(value).__name__} with tensors that are spread over ranks"
            " (DTensor): these come back in a module, an optimizer, or alone; give them names"
            " of their own in per_rank={...}"
        )


def _added_groups(value, values):
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    note(value)
    groups = value.param_groups
    first = _first_groups[value]
    if len(groups) <= first:
        return {}
    names = {
        id(parameter): (module_name, name)
        for module_name, module in values.items()
        if isinstance(module, torch.nn.Module)
        for name, parameter in module.named_parameters()
    }
    return {
        index: [names.get(id(parameter)) for parameter in groups[index]["params"]]
        for index in range(first, len(groups))
    }


def unpack(kept, snapshot, placed=True):
    """The content of a value, with tensors of its own: an optimizer keeps what it is given.
    `placed`: on devices of the kind that they were on; otherwise on the CPU."""
    return _Unpacker(io.BytesIO(kept.packed), snapshot.tensors, placed).load()


def number_of(reference):
    """Of the tensor in the snapshot that a reference is to."""
    while isinstance(reference, tuple):
        reference = reference[1] if reference[0] == "shard" else reference[0]
    return reference >> _SHIFT


def is_spread(value):
    """Whether it is a DTensor; where nobody has imported these there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


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
        with own_modes():  # A later commit takes this memory over.
            snapshot.tensors = [
                torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes
            ]
    for tensor in snapshot.tensors:
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=source)
    return snapshot


class _Packer(pickle.Pickler):
    """Pickles with the tensors kept apart, as host copies. `aliases`: a tensor that is met twice is
    kept once. Runs for every tensor in every commit."""

    def __init__(self, file, tensors, memory, aliases):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._memory = memory
        self._known = {} if aliases else None  # id -> (the tensor, which keeps its id, reference).
        self.has_shards = False

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        if self._known is None:
            return self._keep(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, self._keep(value)
        return self._known[id(value)][1]

    def _keep(self, value):
        flags = 0
        if type(value) is not torch.Tensor:
            if is_spread(value):
                self.has_shards = True
                return "shard", self._keep(value.detach().to_local()), value.requires_grad
            if is_lazy(value):
                raise ValueError(
                    "a lazy module has no parameters yet: run it once before the first commit, so"
                    " that all ranks have parameters of the same shapes"
                )
            flags = _PARAMETER if isinstance(value, torch.nn.Parameter) else 0
        # One that was computed comes back as a value of its own, without what it came from.
        if value.requires_grad and value.is_leaf:
            flags |= _GRADIENT
        reference = len(self._tensors) << _SHIFT | flags
        self._tensors.append(self._copy(value))
        return reference if value.is_cpu else (reference, value.device.type)

    def _copy(self, tensor):
        old = next(self._memory, None)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old.copy_(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


class _Unpacker(pickle.Unpickler):
    """The inverse, with fresh copies of the tensors."""

    def __init__(self, file, tensors, placed):
        super().__init__(file)
        self._tensors = tensors
        self._placed = placed
        self._made = {}  # By reference: what was one tensor is one again.

    def persistent_load(self, reference):
        if isinstance(reference, tuple) and reference[0] == "shard":
            return Shard(self.persistent_load(reference[1]), reference[2])
        if reference not in self._made:
            self._made[reference] = self._make(reference)
        return self._made[reference]

    def _make(self, reference):
        code, device = reference if isinstance(reference, tuple) else (reference, "cpu")
        tensor = self._tensors[number_of(reference)].clone()
        if self._placed and device != "cpu":
            tensor = tensor.to(device)
        if code & _PARAMETER:
            return torch.nn.Parameter(tensor, requires_grad=bool(code & _GRADIENT))
        return tensor.requires_grad_() if code & _GRADIENT else tensor
