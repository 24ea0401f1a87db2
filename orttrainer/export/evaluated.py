"""A module in train mode that computes as `eval_step` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["RunningStatistics", "by_running_statistics"]

_OF_BATCH = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}  # they refuse a batch too small to train on


def by_running_statistics(func: Callable, args: tuple, kwargs: Mapping) -> tuple[tuple, Mapping]:
    """The arguments with which `func`, should it normalize by statistics of the batch, takes its running ones, if it has any."""
    if func in (torch.batch_norm, torch.instance_norm) and args[3] is not None:
        return (*args[:5], False, *args[6:]), kwargs
    if func in _OF_BATCH:
        given = inspect.signature(func).bind(*args, **kwargs)
        if given.arguments.get("running_mean") is not None:
            given.arguments[_OF_BATCH[func]] = False
        return given.args, given.kwargs
    return args, kwargs


class RunningStatistics(TorchFunctionMode):
    """Within the block layers in train mode normalize by their running statistics."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = by_running_statistics(func, args, kwargs or {})
        return func(*args, **kwargs)
