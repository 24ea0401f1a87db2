"""Python's numbers beside tensors of float64, as torch's dynamo exporter should write them down: exactly.

Its own forms make float32 of them first, so that 0.1 is 0.10000000149.
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


TRANSLATIONS = {
    aten.masked_fill.Scalar: _masked_fill,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.new_full.default: _new_full,
}
