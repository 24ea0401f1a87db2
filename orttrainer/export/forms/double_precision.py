"""Python's numbers as torch's dynamo exporter should write them down: exactly, what is computed of them and `arange`, too.

Its own forms make float32 of them first, so that 0.1 is 0.10000000149, and `int(n * 0.29)` of 100 is 29, where Python has 28;
and ONNX's Range adds that up: it may have an element more than PyTorch's.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from unittest import mock

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core, linalg, nn

__all__ = ["TRANSLATIONS", "exact_numbers", "is_double"]

aten = torch.ops.aten


_CAST = {"Cast", "CastLike", "Log"}  # of a number, before it has the dtype of a tensor; torch casts logarithms, too


def is_double(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether all floating-point tensors that there are before forward are float64."""
    dtypes = {x.dtype for x in (*module.parameters(), *module.buffers(), *inputs) if x.is_floating_point()}
    return dtypes == {torch.float64}


@contextlib.contextmanager
def exact_numbers() -> Iterator[None]:
    """Let torch write down as float64 what it then casts to the dtype of a tensor, and compute so what Python does."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_symbols_of_float64())
        with contextlib.suppress(ImportError, AttributeError):  # private names: other torch versions may lack them
            from torch.onnx._internal.exporter import _building

            process, constant = _building._process_python_constants, _building._get_or_create_constant

            def process_python_constants(signature, named_inputs, type_binding, constants, opset):
                for name, number in named_inputs.items() if signature.name in _CAST else ():
                    if type(number) is float and signature.params_map[name].type_constraint not in type_binding:
                        named_inputs[name] = constant(constants, number, ir.DataType.DOUBLE, opset)
                return process(signature, named_inputs, type_binding, constants, opset)

            stack.enter_context(mock.patch.object(_building, "_process_python_constants", process_python_constants))
        yield


@contextlib.contextmanager
def _symbols_of_float64() -> Iterator[None]:
    """Let torch take its symbols of floats for float64, as Python's floats are."""
    from torch.onnx._internal.exporter import _core
    from torch.onnx._internal.fx import type_utils

    set_type, known = _core._set_shape_type, type_utils.from_scalar_type_to_torch_dtype

    def set_shape_type(value, meta_val, *args, **kwargs):
        set_type(value, meta_val, *args, **kwargs)
        if isinstance(meta_val, (float, torch.SymFloat)):
            value.dtype = ir.DataType.DOUBLE

    def dtype_of(scalar_type):
        return torch.float64 if scalar_type is torch.SymFloat else known(scalar_type)

    with (
        mock.patch.object(_core, "_set_shape_type", set_shape_type),
        mock.patch.object(type_utils, "from_scalar_type_to_torch_dtype", dtype_of),
    ):
        yield


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


def _fill(self, value):
    """aten.fill.Scalar."""
    return op.Expand(op.CastLike(value, self), op.Shape(self))


def _clamp_tensor(self, min=None, max=None):
    """aten.clamp.Tensor, which torch makes of numbers beside float64; Max and Min would have another slope at these."""
    if any(bound is not None and len(bound.shape) for bound in (min, max)):
        return core.aten_clamp_tensor(self, min, max)
    return op.Clip(self, *(bound if bound is None else op.CastLike(bound, self) for bound in (min, max)))


def _vector_norm(self, ord=2.0, dim=None, keepdim=False, dtype=-1):
    """aten.linalg_vector_norm."""
    if self.dtype != ir.DataType.DOUBLE or dtype != -1 or math.isinf(ord) or ord in (0, 1, 2):
        return linalg.aten_linalg_vector_norm(self, ord, dim, keepdim, dtype)
    powers = op.Pow(op.Abs(self), op.CastLike(float(ord), self))
    return op.Pow(op.ReduceSum(powers, dim, keepdims=keepdim and dim is not None), op.CastLike(1 / ord, self))


def _isinf(self):
    """aten.isinf, where 1e300 is finite."""
    return op.IsInf(self) if self.dtype == ir.DataType.DOUBLE else core.aten_isinf(self)


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


# torch writes these as functions, whose numbers are attributes.


def _addbmm(self, batch1, batch2, beta=1.0, alpha=1.0):
    """aten.addbmm."""
    product = op.ReduceSum(op.MatMul(batch1, batch2), [0], keepdims=False)
    return op.Add(op.Mul(self, beta), op.Mul(product, op.CastLike(alpha, self)))


def _addcdiv(self, tensor1, tensor2, value=1.0):
    """aten.addcdiv."""
    return op.Add(self, op.Mul(op.Div(tensor1, tensor2), op.CastLike(value, self)))


def _addcmul(self, tensor1, tensor2, value=1.0):
    """aten.addcmul."""
    return op.Add(self, op.Mul(op.Mul(value, tensor1), tensor2))


def _addmv(self, mat, vec, beta=1.0, alpha=1.0):
    """aten.addmv."""
    return op.Add(op.Mul(self, beta), op.Mul(op.MatMul(mat, vec), op.CastLike(alpha, self)))


def _celu(self, alpha=1.0):
    """aten.celu, which ONNX has in float32 only."""
    if self.dtype != ir.DataType.DOUBLE:
        return nn.aten_celu(self, alpha)
    positive = op.Greater(self, 0.0)
    alpha, one = op.CastLike(alpha, self), op.CastLike(1.0, self)
    below = op.Exp(op.Div(op.Where(positive, 0.0, self), alpha))
    return op.Where(positive, self, op.Mul(op.Sub(below, one), alpha))


def _softplus(self, beta=1.0, threshold=20.0):
    """aten.softplus."""
    scaled = op.Mul(self, beta)
    return op.Where(
        op.Greater(scaled, op.CastLike(threshold, self)), self, op.Div(op.Softplus(scaled), op.CastLike(beta, self))
    )


def _local_scalar_dense(self):
    """aten._local_scalar_dense: `item()`."""
    if not self.dtype.is_floating_point():
        return core.aten__local_scalar_dense(self)
    return op.Cast(op.Gather(op.Reshape(self, [-1]), 0), to=ir.DataType.DOUBLE)


def _truediv(self, other):
    """operator.truediv, of numbers."""
    return op.Div(_in_float64(self), _in_float64(other))


def _pow(self, other):
    """operator.pow, of numbers; torch's own form of a float and a whole one has that of neither."""
    if all(isinstance(x, int) or getattr(x, "dtype", None) == ir.DataType.INT64 for x in (self, other)):
        return core.aten_pow(self, other)
    return op.Pow(_in_float64(self), _in_float64(other))


def _root(self):
    """torch.sym_sqrt, math.sqrt of a size."""
    return op.Sqrt(_in_float64(self))


def _round(self, ndigits=None):
    """round(), of what is computed of sizes, to whole numbers."""
    return op.Cast(op.Round(_in_float64(self)), to=ir.DataType.INT64)


TRANSLATIONS = {
    round: _round,
    torch.sym_sqrt: _root,
    aten._local_scalar_dense.default: _local_scalar_dense,
    operator.pow: _pow,
    operator.truediv: _truediv,
    torch.sym_float: _in_float64,
    aten.addbmm.default: _addbmm,
    aten.addcdiv.default: _addcdiv,
    aten.addcmul.default: _addcmul,
    aten.addmv.default: _addmv,
    aten.isinf.default: _isinf,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.celu.default: _celu,
    aten.clamp.Tensor: _clamp_tensor,
    aten.fill.Scalar: _fill,
    aten.softplus.default: _softplus,
    aten.arange.default: _arange,
    aten.arange.start: _arange_start,
    aten.arange.start_step: _arange_start_step,
    aten.masked_fill.Scalar: _masked_fill,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.new_full.default: _new_full,
}
