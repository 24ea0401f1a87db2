"""Calls inside `torch.nn.functional`, `torch.nn.init` and `torch.autograd.grad`, which a TorchFunctionMode does not see by itself.

A mode is off while it handles a call. So the softmax, the dropout and the cross entropy that, say,
`F.multi_head_attention_forward` or `F.linear_cross_entropy` call would pass it by; and the draws of a layer that forward makes, or
of a backward.
"""

from __future__ import annotations

import functools
import inspect
import types
from unittest import mock

import torch
import torch.nn.functional as F
from torch._jit_internal import boolean_dispatched

from orttrainer.export.values.stand_ins import Function

__all__ = ["opened", "weights_passed_on"]


def opened(func):
    """`func` so that a mode sees the calls that it makes; None for no Python function of those modules."""
    if not inspect.isfunction(func):
        return None
    if func.__globals__ is vars(torch.nn.init):
        return _initialization(func)
    chosen = boolean_dispatched[func]["if_true"] if func in boolean_dispatched else func  # of torch.unique, too
    return _opened(func) if chosen.__globals__ is vars(F) or func is torch.autograd.grad else None


def weights_passed_on():
    """F.l1_loss gives the mode that it asks all its arguments but `weight`, which it only names among the tensors.

    And one in whose place there is another says that this is called, as it has its name.
    """

    def handle(func, tensors, *args, **kwargs):
        func = func.replaced if isinstance(func, Function) else func
        if func is F.l1_loss and len(tensors) == 3:
            kwargs["weight"] = tensors[2]
        return torch.overrides.handle_torch_function(func, tensors, *args, **kwargs)

    return mock.patch.object(F, "handle_torch_function", handle)


@functools.cache
def _opened(func):
    """A copy with other globals; of a pair of functions that a flag chooses from (`max_pool2d`), with both opened."""
    within = _Globals(func.__globals__) if func not in boolean_dispatched else func.__globals__
    cells = tuple(types.CellType(opened(cell.cell_contents) or cell.cell_contents) for cell in func.__closure__ or ())
    copy = types.FunctionType(func.__code__, within, func.__name__, func.__defaults__, cells)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


@functools.cache
def _initialization(func):
    """Those of `torch.nn.init` ask `torch.overrides`, by that name, whether to call the mode."""

    def call(*args, **kwargs):
        with mock.patch.object(torch.overrides, "has_torch_function_variadic", _no):
            return func(*args, **kwargs)

    return call


class _Globals(dict):
    """The globals of torch's functions as they are at the moment; but no tensor asks to be handled.

    Else the function would call the mode again, and that the function.
    """

    def __init__(self, whole):
        self._whole = whole
        super().__init__(
            dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
        )

    def __missing__(self, name):
        return self._whole[name]


def _no(*tensors):
    return False
