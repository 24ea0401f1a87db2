"""What is scattered, as torch's dynamo exporter should write it down: ONNX wants it to have the size of the index.

torch takes its corner, which may be smaller than what is there.
"""

from __future__ import annotations

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten


def _scatter(self, dim, index, src):
    """aten.scatter.src"""
    return core.aten_scatter_src(self, dim, index, _corner(src, index))


def _scatter_add(self, dim, index, src):
    """aten.scatter_add"""
    return core.aten_scatter_add(self, dim, index, _corner(src, index))


def _scatter_reduce(self, dim, index, src, reduce, include_self=True):
    """aten.scatter_reduce.two"""
    return core.aten_scatter_reduce(self, dim, index, _corner(src, index), reduce, include_self)


def _corner(src, index):
    """`src` up to the sizes of `index`, along the axes where these are not known to be its own."""
    sizes = () if src.shape is None or index.shape is None else zip(src.shape, index.shape)
    axes = [axis for axis, (own, size) in enumerate(sizes) if own != size]
    if not axes:
        return src
    along = op.Constant(value_ints=axes)
    ends = op.Gather(op.Shape(index), along)
    found = op.Slice(src, op.Constant(value_ints=[0] * len(axes)), ends, along)
    found.shape, found.dtype = index.shape, src.dtype
    return found


TRANSLATIONS = {
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
}
