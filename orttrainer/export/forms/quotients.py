"""Whole quotients and what they leave, as torch's dynamo exporter should write them down.

Its own forms round a quotient: of 1 and 0.1 that is 10 and leaves nothing, where PyTorch has 9 and 0.1, since 0.1 is a little
more than a tenth. Quotients of whole numbers they compute in float32, which has no digits for those above 2^24, and those of
sizes they round towards 0, where Python rounds down: -(-n // 4).
"""

from __future__ import annotations

import math
import operator

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

from orttrainer.export.values.sizes import is_never_negative

__all__ = ["TRANSLATIONS", "remainder"]

aten = torch.ops.aten


def _floor_divide(self, other):
    """aten.floor_divide: the largest whole number of times that `other` is in `self`; self / other where that is 0."""
    self, other = _operands(self, other)
    if not self.dtype.is_floating_point():
        return core.aten_floor_divide(self, other)
    rest = op.Mod(self, other, fmod=1)
    whole = op.Round(op.Div(op.Sub(self, rest), other))
    floor = op.Sub(whole, op.CastLike(_of_other_sign(rest, other), self))
    return op.Where(op.Equal(other, _zero(other)), op.Div(self, other), floor)


def _div_mode(self, other, rounding_mode=None):
    """aten.div.Tensor_mode."""
    if rounding_mode == "floor":
        return _floor_divide(self, other)
    if rounding_mode == "trunc":
        self, other = _operands(self, other)
        if self.dtype.is_integer():
            return op.Div(self, other)
    return core.aten_div_mode(self, other, rounding_mode)


def remainder(self, other):
    """aten.remainder: what is left, of the sign of `other`."""
    exact = isinstance(other, (int, float)) and abs(math.frexp(other)[0]) == 0.5  # by a power of 2: nothing is rounded
    self, other = _operands(self, other)
    if exact or not self.dtype.is_floating_point():
        return core.aten_remainder(self, other)
    rest = op.Mod(self, other, fmod=1)
    return op.Where(_of_other_sign(rest, other), op.Add(rest, other), rest)


def _whole_quotient(self, other):
    """operator.floordiv, of sizes and what is computed of them."""
    if not (_is_never_negative(self) and _is_never_negative(other)):
        self = op.Sub(self, op.Mod(self, other))
    return op.Div(self, other)


def _is_never_negative(number) -> bool:
    """Whether a number, or what a node of torch's gives, is known to be 0 or more."""
    if isinstance(number, int):
        return number >= 0
    node = number.producer().meta.get("node") if number.producer() is not None else None
    return node is not None and is_never_negative(node.meta["val"])


def _of_other_sign(rest, other):
    """Whether `rest` is not 0 and on the other side of 0 than `other`."""
    zero = _zero(other)
    below = op.And(op.Less(rest, zero), op.Greater(other, zero))
    return op.Or(below, op.And(op.Greater(rest, zero), op.Less(other, zero)))


def _operands(self, other):
    """Both as values of the graph: numbers take the dtype of the other one, whose dtype is that of the result by now."""
    dtype = (self if hasattr(self, "dtype") else other).dtype
    return tuple(x if hasattr(x, "dtype") else _number(x, dtype) for x in (self, other))


def _number(x, dtype):
    value = op.Constant(value=ir.tensor(x, dtype=dtype))
    value.dtype, value.shape = dtype, ir.Shape([])
    return value


def _zero(like):
    return op.CastLike(0, like)


TRANSLATIONS = {
    aten.div.Scalar_mode: _div_mode,
    aten.div.Tensor_mode: _div_mode,
    aten.floor_divide.Scalar: _floor_divide,
    aten.floor_divide.default: _floor_divide,
    aten.remainder.Scalar_Tensor: remainder,
    aten.remainder.Tensor: remainder,
    operator.floordiv: _whole_quotient,
}
