"""Brings named values back to what a snapshot has of them, in the form that they had then.

What the program has replaced since, or not yet, by a value of another type, shape or dtype takes
nothing of the form that is there now: the value of the commit replaces it. Where an object cannot
be given that form, it is a misfit: a text for all ranks.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_resilient import _snapshot


class _Misfit(Exception):
    """A value cannot be brought back; the text says which, why, and what to do."""


def load(values, snapshot, names=None):
    """Brings the values back, or those of `names`. Tensors of the same form and objects are changed
    in place, others replaced, and gradients are gone. What is None for want of its object stays so.
    The snapshot stays as it is: nothing of it is shared with the values. Returns the misfits, of
    which some may be half loaded."""
    misfits = []
    with _snapshot.own_modes():
        for name in values if names is None else names:
            try:
                values[name] = _restored(name, values, snapshot)
            except _Misfit as misfit:
                misfits.append(str(misfit))
            except Exception as error:  # Of the object's own load_state_dict.
                kind = type(values[name]).__name__
                misfits.append(
                    f"{name!r} ({kind}) does not take its state of the commit:"
                    f" {type(error).__name__}: {error}. Make it, before elastic or sync() on every"
                    " start, such that it does"
                )
    return misfits


def _restored(name, values, snapshot):
    value, kept = values[name], snapshot.kinds.get(name)
    if kept is None:
        raise _Misfit(f"the value {name!r} is not in the commit: all ranks name the same")
    if kept.kind == _snapshot.PLAIN:
        return _snapshot.unpack(kept, snapshot)
    if value is None and kept.bound:
        return None
    if kept.kind == _snapshot.TENSOR:
        return _tensor(name, value, _snapshot.unpack(kept, snapshot))
    _check_type(name, value, kept)
    if isinstance(value, nn.Module):
        _load_module(name, value, _snapshot.unpack(kept, snapshot, placed=False))
    elif isinstance(value, torch.optim.Optimizer):
        content = _snapshot.unpack(kept, snapshot, placed=False)
        _load_optimizer(name, value, content, kept, values)
    else:
        value.load_state_dict(_snapshot.unpack(kept, snapshot))
    return value


def _check_type(name, value, kept):
    if value is None:
        raise _Misfit(
            f"{name!r} is None here and a {kept.type_name} in the commit: make it before elastic or"
            f" sync() on every start, or give it by state.bind({name}=...) inside the function"
        )
    # Classes of modules change by themselves, as when they are spread or parametrized; whether
    # their tensors fit is found below.
    modules = isinstance(value, nn.Module)
    if not _snapshot.is_object(value) or (
        not modules and _snapshot.type_name(value) != kept.type_name
    ):
        raise _Misfit(
            f"{name!r} is a {_snapshot.type_name(value)} here and a {kept.type_name} in the commit:"
            f" an object is not replaced by one of another class in training; give each a name of"
            " its own in the State, made before elastic or sync() on every start"
        )


def _tensor(name, present, content):
    if isinstance(content, _snapshot.Shard):
        content = _whole(name, content, present)
        return present.copy_(content)
    if not _same_form(present, content):
        return content
    present.copy_(content)
    if present.is_leaf:
        present.requires_grad_(content.requires_grad)
        present.grad = None
    return present


def _same_form(present, content):
    """Whether the content can be written into the present value and is the same then."""
    return (
        isinstance(present, torch.Tensor)
        and not _snapshot.is_spread(present)
        and isinstance(present, nn.Parameter) == isinstance(content, nn.Parameter)
        and (present.dtype, present.shape, present.layout)
        == (content.dtype, content.shape, content.layout)
        and present.device.type == content.device.type
        and not present.is_inference()
        # Elements that share memory, as those of an expanded tensor, cannot be written one by one.
        and all(
            step or size < 2 for step, size in zip(present.stride(), present.shape, strict=True)
        )
    )


def _load_module(name, module, content):
    for parameter in module.parameters():
        parameter.grad = None  # What a backward that failed has left would be added to.
    own = _snapshot.own_state_dict(module)
    tensors = module.state_dict(keep_vars=True) if own else {}
    for key, present in tensors.items():
        wanted = content.get(key)
        if isinstance(wanted, _snapshot.Shard):
            content[key] = _whole(f"{name}.{key}", wanted, present)
        elif isinstance(wanted, torch.Tensor) and isinstance(present, torch.Tensor):
            _make_room(present, wanted)
    # What was made in inference mode can be written to in it only; all else can be, too.
    with torch.inference_mode(any(_is_inference(each) for each in tensors.values())):
        module.load_state_dict(content)
        for key, present in (module.state_dict(keep_vars=True) if own else {}).items():
            wanted = content.get(key)
            if not isinstance(wanted, torch.Tensor) or not isinstance(present, nn.Parameter):
                continue
            if present.requires_grad != wanted.requires_grad:
                present.requires_grad_(wanted.requires_grad)


def _is_inference(value):
    return isinstance(value, torch.Tensor) and value.is_inference()


def _make_room(present, wanted):
    """load_state_dict casts to the dtype that is there. As Module.to() does it: the parameter stays
    the object that optimizers have."""
    if is_lazy(present) or present.shape != wanted.shape or _snapshot.is_spread(present):
        return
    if present.dtype != wanted.dtype:
        present.data = torch.empty_like(present.data, dtype=wanted.dtype)


def _load_optimizer(name, optimizer, content, kept, values):
    _match_groups(name, optimizer, content, kept, values)
    # Its state is numbered as its parameters are, and spread as they are.
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        parameter.grad = None
        state = content["state"].get(number, {})
        for key in [key for key in state if isinstance(state[key], _snapshot.Shard)]:
            state[key] = _whole(f"{name}.state[{number}].{key}", state[key], parameter)
    optimizer.load_state_dict(content)
    for number, parameter in enumerate(parameters):
        # load_state_dict casts to the dtype of the parameter what may be of a finer one.
        present = optimizer.state.get(parameter, {})
        for key, wanted in content["state"].get(number, {}).items():
            if not isinstance(wanted, torch.Tensor) or _snapshot.is_spread(wanted):
                continue
            if isinstance(present.get(key), torch.Tensor) and present[key].dtype != wanted.dtype:
                present[key] = wanted.to(present[key].device)


def _match_groups(name, optimizer, content, kept, values):
    """Gives the optimizer the parameter groups that were added until the commit, and takes those
    that were added after it."""
    wanted = len(content["param_groups"])
    del optimizer.param_groups[wanted:]
    for index in range(len(optimizer.param_groups), wanted):
        group = []
        for found in kept.added.get(index, [None]):
            module, key = found or (None, None)
            parameters = dict(values[module].named_parameters()) if module in values else {}
            if key not in parameters:
                raise _Misfit(
                    f"{name!r} has {wanted} parameter groups in the commit and {index} here, and"
                    f" parameters of group {index} are of no module in the State: put the module"
                    " that they are of into the same part of the State, or make the optimizer with"
                    " all its groups before elastic or sync() on every start"
                )
            group.append(parameters[key])
        optimizer.add_param_group({"params": group})


def _whole(what, shard, like):
    spread = _snapshot.is_spread(like)
    if not spread or like.to_local().shape != shard.local.shape:
        here = tuple(like.to_local().shape) if spread else "none"
        raise _Misfit(
            f"this rank's shard of {what} is {here}, and that of the commit is"
            f" {tuple(shard.local.shape)}: shards fit a world of the size and mesh that they were"
            " made in; for another one start from a checkpoint (torch.distributed.checkpoint)"
        )
    whole = torch.distributed.tensor.DTensor.from_local(
        shard.local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return whole.requires_grad_(shard.requires_grad)
