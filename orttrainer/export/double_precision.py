"""Python's numbers beside tensors of float64, and in `arange`, as torch's dynamo exporter should write them down: exactly.

Its own forms make float32 of them first, so that 0.1 is 0.10000000149, and ONNX's Range adds that up: it may have an element
more than PyTorch's.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten


def _exact(number, dtype):
    """The number as a constant where it is a float of Python's, and float64 is wanted."""
    if not isinstance(number, float) or dtype != ir.DataType.DOUBLE:
        return number
    return op.Constant(value=ir.tensor(number, dtype=ir.DataType.DOUBLE))


def _scalar_tensor(s, dtype=-1, layout="", device="", pin_memory=False):
    """aten.scalar_tensor."""
    return core.aten_scalar_tensor(_exact(s, dtype), dtype)


def _full(size, fill_value, dtype=-1, layout="", device="", pin_memory=False):
    """aten.full."""
    return core.aten_full(size, _exact(fill_value, dtype), dtype)


def _full_like(self, fill_value, dtype=-1, layout="", device="", pin_memory=False, memory_format=""):
    """aten.full_like."""
    return core.aten_full_like(self, _exact(fill_value, self.dtype if dtype == -1 else dtype), dtype)


def _new_full(self, size, fill_value, dtype=-1, layout="", device="", pin_memory=False):
    """aten.new_full."""
    return core.aten_new_full(self, size, _exact(fill_value, self.dtype if dtype == -1 else dtype), dtype)


def _masked_fill(self, mask, value):
    """aten.masked_fill."""
    return core.aten_masked_fill(self, mask, _exact(value, self.dtype))


def _arange(end, dtype=-1, layout="", device="", pin_memory=False):
    """aten.arange."""
    return _series(0, end, 1, dtype) if _is_broken(end) else core.aten_arange(end, dtype)


def _arange_start(start, end, dtype=-1, layout="", device="", pin_memory=False):
    """aten.arange.start."""
    broken = _is_broken(start) or _is_broken(end)
    return _series(start, end, 1, dtype) if broken else core.aten_arange_start(start, end, dtype)


def _arange_start_step(start, end, step=1, dtype=-1, layout="", device="", pin_memory=False):
    """aten.arange.start_step."""
    broken = any(map(_is_broken, (start, end, step)))
    return _series(start, end, step, dtype) if broken else core.aten_arange_start_step(start, end, step, dtype)


def _is_broken(number) -> bool:
    """Whether it is, or may be, no whole number."""
    if isinstance(number, (int, float)):
        return number != int(number)
    return number.dtype != ir.DataType.INT64


def _series(start, end, step, dtype):
    """start + step * [0, 1, ...] up to `end`, in float64, as PyTorch counts and computes it."""
    dtype = ir.DataType.FLOAT if dtype == -1 else dtype
    if not dtype.is_floating_point():  # of whole numbers near these
        return core.aten_arange_start_step(start, end, step, dtype)
    start, end, step = map(_in_float64, (start, end, step))
    count = op.Cast(op.Ceil(op.Div(op.Sub(end, start), step)), to=ir.DataType.INT64)
    place = op.Range(*(op.Constant(value=ir.tensor(0)), count, op.Constant(value=ir.tensor(1))))
    return op.Cast(op.Add(op.Mul(op.Cast(place, to=ir.DataType.DOUBLE), step), start), to=dtype)


def _in_float64(number):
    if isinstance(number, (int, float)):
        return op.Constant(value=ir.tensor(float(number), dtype=ir.DataType.DOUBLE))
    return op.Cast(number, to=ir.DataType.DOUBLE)


TRANSLATIONS = {
    aten.arange.default: _arange,
    aten.arange.start: _arange_start,
    aten.arange.start_step: _arange_start_step,
    aten.masked_fill.Scalar: _masked_fill,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.new_full.default: _new_full,
}
