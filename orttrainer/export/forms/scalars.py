"""Sums and products with one number, as torch's dynamo exporter should write them down where that is computed of a size.

Its own forms take it for a number of Python's, of which they make a constant: `1 / len(x)` is none.
"""

from __future__ import annotations

import functools

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

from orttrainer.export.forms.quotients import remainder

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten


def _add(self, other, alpha=1.0):
    """aten.add.Scalar."""
    return (
        core.aten_add_scalar(self, other, alpha) if _is_known(other) else core.aten_add(self, _like(other, self), alpha)
    )


def _sub(self, other, alpha=1.0):
    """aten.sub.Scalar."""
    return (
        core.aten_sub_scalar(self, other, alpha) if _is_known(other) else core.aten_sub(self, _like(other, self), alpha)
    )


def _mul(self, other):
    """aten.mul.Scalar."""
    return core.aten_mul_scalar(self, other) if _is_known(other) else core.aten_mul(self, _like(other, self))


def _remainder(self, other):
    """aten.remainder.Scalar."""
    return remainder(self, other if _is_known(other) else _like(other, self))


def _sym_numel(self):
    """aten.sym_numel, of which torch has no form."""
    return op.Size(self)


def _sym_sum(args):
    """torch.sym_sum, of which PyTorch 2.9 has no form."""
    return functools.reduce(op.Add, args)


def _is_known(number) -> bool:
    return isinstance(number, (bool, int, float))


def _like(number, tensor):
    return op.CastLike(number, tensor)


TRANSLATIONS = {
    aten.add.Scalar: _add,
    aten.mul.Scalar: _mul,
    aten.remainder.Scalar: _remainder,
    aten.sub.Scalar: _sub,
    aten.sym_numel.default: _sym_numel,
    torch.sym_sum: _sym_sum,
}
