"""Activation checkpoints (`torch.utils.checkpoint`), which autograd computes a second time in the backward.

A graph has no use for that: what it computes again is chosen with `Recompute`. But BatchNorm takes the second time
for another batch: its running statistics move twice, and do so here.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

__all__ = ["run_again", "without_checkpoints"]

# Before PyTorch 2.14 and since.
_OTHER_CHECKPOINTS = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"

# Per checkpoint, the calls of layers that move statistics: those within that go on, and those that are over.
_entered: list[list] = []
_left: list[list] = []


@contextlib.contextmanager
def without_checkpoints(asked=lambda: None):
    """Run checkpoints as plain calls: what they compute again, autograd does outside of any mode, with dropout.

    Args:
        asked: called where one asks whether there are gradients: the reentrant ones, of their arguments, for else PyTorch
            gives none to the parameters within; and where layers would be called again.
    """

    def reentrant(function, preserve, *args):
        asked()
        trains = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        with _region(asked) if trains else torch.no_grad():
            return function(*args)

    def around(function, *rest, **options):
        contexts = options["context_fn"] if "context_fn" in options else rest[1]
        with contexts()[0], _region(asked, stops=True):
            yield

    with contextlib.ExitStack() as stack:
        stack.callback(_left.clear)
        stack.enter_context(mock.patch.object(checkpoint.CheckpointFunction, "apply", staticmethod(reentrant)))
        for name in filter(checkpoint.__dict__.__contains__, _OTHER_CHECKPOINTS):
            stack.enter_context(mock.patch.object(checkpoint, name, around))
        for layer in (_BatchNorm, _InstanceNorm):
            stack.enter_context(mock.patch.object(layer, "forward", _noted(layer.forward)))
        yield


def run_again() -> None:
    """Move the statistics as the backward would: it goes through the last checkpoint first, and through one before those in it."""
    while _left:
        for forward, layer, x in _left.pop():
            with torch.no_grad():
                forward(layer, x)


@contextlib.contextmanager
def _region(asked, stops=False):
    """Note the calls of layers within.

    Args:
        stops: whether they are made again only up to what gradients need last.
    """
    calls = []
    _entered.append(calls)
    try:
        with _Trains(calls) as trains:
            yield
    finally:
        _entered.pop()
    if calls:
        asked()
        if trains.found:
            _left.append(calls[: trains.needed] if stops else calls)


class _Trains(TorchFunctionMode):
    """Finds out whether anything within has a gradient, else nothing is computed again, and up to which of `calls`."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.found, self.needed = calls, False, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # who asks here is not forward
            trains = any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(result))
        self.found |= trains
        if trains and _entered[-1] is self.calls:  # what one within needs is computed again by itself
            # An instance norm has what its gradient needs before its statistics move.
            self.needed = max(self.needed, len(self.calls) - (func is F.instance_norm))
        return result


def _noted(forward):
    def call(layer, x):
        if layer.training and layer.track_running_stats:
            for calls in _entered:
                calls.append((forward, layer, x))
        return forward(layer, x)

    return call
