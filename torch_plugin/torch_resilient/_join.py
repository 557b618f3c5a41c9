"""Uneven inputs: ranks whose batches have run out keep the others company until all are done."""

import contextlib
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from torch_resilient import _errors

_AVERAGES = ("active", "all")
_warned = False


@contextlib.contextmanager
def join(model, *, optimizer=None, average_over="active"):
    """Trains with a different number of batches on each rank: `with torch_resilient.join(model):`
    around the loop over them. For DistributedDataParallel only.

    A rank that has left its loop adds zeros to the gradients of the others until the last one has
    left it, then all have the model of one that was there to the end. All ranks of the model's
    group must enter. `average_over`: gradients are divided by the number of ranks that still have
    data ("active"), or of all ("all"); a communication hook divides as it always does.
    `optimizer`: its state is made the same on all ranks too; needed when it has any (momentum,
    Adam) and training goes on afterwards.

    Each step costs two all_reduces of one element, one more with buffers. What else communicates
    inside the loop (a gather of losses, a barrier, evaluation) is not shadowed: it belongs behind
    it.
    """
    _check(model, average_over)
    _warn_once(model, average_over)
    joinables = [model]
    if optimizer is not None:
        joinables.append(_OptimizerState(optimizer, model))
    context = Join(joinables, divide_by_initial_world_size=average_over == "all")
    try:
        yield model
        with warnings.catch_warnings():  # Its end changes the filters of the whole process.
            context.__exit__(None, None, None)
    finally:
        # Join leaves it on: each forward from here on would still communicate.
        model._join_config = _JoinConfig.construct_disabled_join_config()
        model._divide_by_initial_world_size = True


def _check(model, average_over):
    if not isinstance(model, DistributedDataParallel):
        raise _errors.ConfigError(
            f"join() is for DistributedDataParallel and was given {type(model).__name__}: wrap the"
            " model first, or, where gradients are reduced in another way (FSDP, DeepSpeed), give"
            " all ranks the same number of batches (drop_last, a sampler that pads)"
        )
    if model._join_config.enable:
        raise _errors.ConfigError("this model is inside a join() already: one at a time")
    if average_over not in _AVERAGES:
        raise _errors.ConfigError(f"average_over={average_over!r}: it is one of {_AVERAGES}")


def _warn_once(model, average_over):
    global _warned
    if _warned or dist.get_rank() != 0:
        return
    _warned = True
    if model._comm_hooks:
        average = "averaged as the model's communication hook does it"
    elif average_over == "active":
        average = "averaged over the ranks that still have data"
    else:
        average = "divided by the number of all ranks"
    warnings.warn(
        "torch_resilient.join: a rank whose batches have run out adds zeros to the gradients of the"
        f" others until all are done; gradients are {average}. Two all_reduces of one element are"
        " added to each step. Only the steps of this DistributedDataParallel model are shadowed:"
        " other collectives inside the loop are not. The state of the optimizer is made the same on"
        " all ranks only with optimizer=",
        stacklevel=_depth_of_caller(),
    )


def _depth_of_caller():
    """Of the `with` statement, behind contextlib, for warnings.warn in the caller of this."""
    depth = 2
    while sys._getframe(depth).f_globals.get("__name__") in (__name__, "contextlib"):
        depth += 1
    return depth


class _OptimizerState(Joinable):
    """Nothing to shadow in a step; at the end the state of the rank whose model all have got."""

    def __init__(self, optimizer, model):
        super().__init__()
        self.optimizer = optimizer
        self.model = model

    def join_hook(self, **_):
        return _OptimizerHook(self)

    @property
    def join_device(self):
        return self.model.join_device

    @property
    def join_process_group(self):
        return self.model.join_process_group


class _OptimizerHook(JoinHook):
    def __init__(self, state):
        self._state = state

    def post_hook(self, is_last_joiner):
        model, group = self._state.model, self._state.join_process_group
        early = torch.tensor(
            [0 if is_last_joiner else 1], dtype=torch.int64, device=self._state.join_device
        )
        dist.all_reduce(early, group=group)
        if not early.item():
            return  # All have taken the same steps.
        source = model._authoritative_rank
        ours = dist.get_rank(group) == source
        box = [_on_cpu(self._state.optimizer.state_dict()) if ours else None]
        dist.broadcast_object_list(box, group_src=source, group=group)
        if not ours:
            self._state.optimizer.load_state_dict(box[0])


def _on_cpu(state):
    """The device of another rank means nothing here; load_state_dict puts tensors where they go."""
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), state)
