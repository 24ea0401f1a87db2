"""Masks, and reads and writes at them, as torch's dynamo exporter should write them down.

Its own forms take numbers beside a mask for masks, forget what stands behind a mask of several axes, and know no writes
but those of one mask that comes first; to them something is true where there is nothing, and a sum of masks is one of numbers.
Places of int32 they write down as such, where ONNX has int64 alone.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten
_WITH_NONZERO = {ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8}


def _index(self, indices):
    """aten.index: self[indices]."""
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and _is_mask(given[0])
    return core.aten_index(self, indices if alone else _places(indices))


def _index_put(self, indices, values, accumulate=False):
    """aten.index_put: `self` with `values` in the places of self[indices], or added to them."""
    at, *others = (at for at, index in enumerate(indices) if index is not None)
    alone = _is_mask(indices[at]) and not others
    if alone and not accumulate and values.shape is not None and not len(values.shape):
        return _filled(self, indices[at], at, values)
    if alone and not at:
        return core.aten_index_put(self, indices, values, accumulate)
    places = _places(indices)
    return core.aten_index_put(self, _in_one_shape(places) if others else places, values, accumulate)


def _is_mask(index) -> bool:
    return index is not None and index.dtype == ir.DataType.BOOL and bool(len(index.shape))


def _filled(self, mask, at, number):
    """One number wherever the mask of the axes from `at` on says so."""
    behind = len(self.shape) - at - len(mask.shape)
    if behind:
        mask = op.Unsqueeze(mask, op.Constant(value_ints=list(range(-behind, 0))))
    return op.Where(mask, number, self)


def _places(indices):
    """The indices, in int64, with the places that a mask chooses, one vector for each of its axes, where it was."""
    found = []
    for index in indices:
        if not _is_mask(index):
            found.append(_in_int64(index))
            continue
        chosen = op.NonZero(index)
        for axis in range(len(index.shape)):
            vector = op.Gather(chosen, op.Constant(value_int=axis), axis=0)
            vector.dtype, vector.shape = ir.DataType.INT64, ir.Shape([None])
            found.append(vector)
    return found


def _in_one_shape(places):
    """The places that are written to, one beside the other: torch.onnx takes the larger size, which is not the one of none and one."""
    given = [place for place in places if place is not None]
    sizes = [tuple(place.shape) for place in given]
    if sizes.count(sizes[0]) == len(sizes) and all(isinstance(size, int) or size.value for size in sizes[0]):
        return places
    size = op.Shape(op.Max(*given))
    found = [None if place is None else op.Expand(place, size) for place in places]
    for place in found:
        if place is not None:
            place.dtype, place.shape = ir.DataType.INT64, ir.Shape([None] * max(map(len, sizes)))
    return found


def _nonzero(self):
    """aten.nonzero, of types that ONNX Runtime has no kernel for, such as float64, too."""
    return core.aten_nonzero(self if self.dtype in _WITH_NONZERO else op.Cast(self, to=ir.DataType.BOOL))


def _in_int64(index):
    if index is None or index.dtype != ir.DataType.INT32:
        return index
    cast = op.Cast(index, to=ir.DataType.INT64)
    cast.dtype, cast.shape = ir.DataType.INT64, index.shape
    return cast


def _any(self):
    """aten.any over all axes."""
    return _any_of(self, None, False) if len(self.shape) else op.Cast(self, to=ir.DataType.BOOL)


def _any_dim(self, dim, keepdim=False):
    """aten.any along an axis."""
    return _any_of(self, op.Constant(value_ints=[dim % len(self.shape)]), keepdim) if len(self.shape) else _any(self)


def _any_dims(self, dim=None, keepdim=False):
    """aten.any along several axes; None for all."""
    rank = len(self.shape)
    axes = range(rank) if dim is None else sorted({axis % rank for axis in dim if rank})
    if not axes:
        return op.Cast(self, to=ir.DataType.BOOL)
    return _any_of(self, op.Constant(value_ints=list(axes)), keepdim)


def _any_of(self, axes, keepdim):
    """By a count: of no elements ONNX Runtime's largest is true."""
    true = op.Cast(op.Cast(self, to=ir.DataType.BOOL), to=ir.DataType.INT64)
    return op.Cast(op.ReduceSum(true, axes, keepdims=keepdim), to=ir.DataType.BOOL)


TRANSLATIONS = {
    aten.add.Tensor: core.aten_add,
    aten.any.default: _any,
    aten.any.dim: _any_dim,
    aten.any.dims: _any_dims,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.nonzero.default: _nonzero,
}
