"""Reductions of axes that others are behind: of one element, or of few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.passes.no_axes import REDUCTIONS
from orttrainer.graph.passes.sized import SizedPass
from orttrainer.graph.scopes import put_all_in_place
from orttrainer.graph.sizes import size_at_hand

_SUMS = {"ReduceMean", "ReduceSum"}  # which are products with ones; the others are quick
# Nanoseconds of one thread, for each block of rows that are summed.
PRODUCT = 145.0
PART, NUMBER = 2.6, 0.13  # for each of its rows, and each of their numbers, where they are taken apart
MANY = 256  # blocks


class ReduceOnesPass(ir.passes.InPlacePass):
    """ReduceSum(x, [1]) -> ReduceSum(x, [1, 2]), where axis 2 of x has one element; likewise for other reductions.

    ONNX Runtime has fast kernels where what is reduced lies side by side. An axis of 1 behind it that stays counts as
    lying between, and numbers are then added up one by one from places that are looked up: 64 x 16 sums of 256 numbers
    0.76 ms, 0.035 with it (one thread, 1.31.1). What is kept of it is put back where it has to be.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return put_all_in_place(model, "ones", [node for node in model.graph if _ones(node)], _with_ones)


class ShortSumsPass(SizedPass):
    """ReduceSum(x [n, k, w], 1) -> Sum(*Split(x, 1)), where k rows of w numbers are few; ReduceMean likewise.

    ONNX Runtime calls a product of matrices for each of the n, however small: 4,096 sums of 8 rows of 2 numbers, as of the
    corners of a hash grid, 0.63 ms, 0.10 with it (one thread, 1.31.1). They are left where two threads would be as fast. (A
    transpose and sums of what lies side by side then, 0.07, it turns back where there are other transposes.)

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return put_all_in_place(model, "sums", [node for node in model.graph if self._pays(node)], _of_parts)

    def _pays(self, node: ir.Node) -> bool:
        if node.op_type not in _SUMS or node.domain or not (axes := _axes(node)):
            return False
        dims, end = node.inputs[0].shape.dims, axes[-1] + 1
        if axes != list(range(axes[0], end)) or node.inputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return False
        if not all(isinstance(size, int) and size for size in dims[axes[0] : end]):
            return False
        count, rows, width = (self._size(part) for part in (dims[: axes[0]], dims[axes[0] : end], dims[end:]))
        return count >= MANY and width > 1 and 2 * rows * (PART + NUMBER * width) < PRODUCT

    def _size(self, dims: Sequence[int | ir.SymbolicDim]) -> float:
        """Their product; NaN, which pays nowhere, where that is not known."""
        return math.prod(size if (size := size_at_hand(dim, self.sizes)) is not None else math.nan for dim in dims)


def _of_parts(op: Builder, node: ir.Node) -> ir.Value:
    x, axes = node.inputs[0], _axes(node)
    count = math.prod(x.shape[axis] for axis in axes)
    if len(axes) > 1:
        left = [op.dim(x, axis) for axis in range(len(x.shape)) if axis not in axes]
        left.insert(axes[0], op.const(np.array([count])))
        x = op.Reshape(x, op.Concat(*left, axis=0), allowzero=1)
    parts = op.Split(x, np.ones(count, np.int64), axis=axes[0], outputs=count) if count > 1 else (x,)
    y = op.Sum(*parts)
    if node.op_type == "ReduceMean":
        y = op.Div(y, op.scalar(count, y))
    return op.Unsqueeze(y, axes[1:]) if node.attributes.get_int("keepdims", 1) else op.Squeeze(y, axes[:1])


def _with_ones(op: Builder, node: ir.Node) -> ir.Value:
    x, axes, ones = node.inputs[0], _axes(node), _ones(node)
    keep = node.attributes.get_int("keepdims", 1)
    y = op.node(node.op_type, x, sorted([*axes, *ones]), keepdims=keep)
    left = [axis for axis in range(len(x.shape)) if axis not in axes]
    return y if keep else op.Unsqueeze(y, [left.index(axis) for axis in ones])


def _ones(node: ir.Node) -> list[int]:
    """The axes of one element that lie right behind those that `node` reduces."""
    found: list[int] = []
    if node.op_type in REDUCTIONS and not node.domain:
        axes = _axes(node)
        for axis, size in enumerate(node.inputs[0].shape or ()):
            if size == 1 and axis not in axes and axis - 1 in (*axes, *found):
                found.append(axis)
    return found


def _axes(node: ir.Node) -> list[int]:
    """Those that are reduced, from the first; none where they are not known."""
    x, given = node.inputs[0], constant_array(node.inputs[1] if len(node.inputs) > 1 else None)
    return [] if given is None or x.shape is None else sorted(int(axis) % len(x.shape) for axis in given.reshape(-1))
