"""Sums of many numbers, of which ONNX Runtime loses digits where they are much alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.scopes import put_all_in_place
from orttrainer.graph.sizes import size_at_hand

LONG = 2**14  # numbers that ONNX Runtime may add up at once: as many equal ones are off by 1e-5
PIECE = 256  # numbers in a row, where nobody knows how many rows there are


class LongSumsPass(ir.passes.InPlacePass):
    """ReduceSum(x, axes) -> ReduceSum(ReduceSum(x, last of them), the others), where x is float32 and they are long.

    ReduceMean likewise. ONNX Runtime adds the numbers up one by one, PyTorch halves by halves: of 2 million equal ones
    the mean was off by 1e-3 to 6e-3 (1.31.1), as are the loss and its bias at the first steps of a segmentation, where
    all pixels are alike. One axis after the other is as fast, and faster where all are summed or the first ones.

    A long axis is cut where its size has a factor near its root; a row of numbers of which nobody knows how many there
    are goes through a convolution with ones, whose stride is its width.

    Args:
        sizes: of symbolic dimensions, in the batch at hand; others may be large.
        at_once: how many numbers may be added up at once.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, at_once: int = LONG):
        super().__init__()
        self._sizes, self._at_once = sizes or {}, at_once

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node for node in model.graph.all_nodes() if node.op_type in ("ReduceSum", "ReduceMean") and not node.domain
        ]
        return put_all_in_place(model, "long", [node for node in nodes if self._is_cut(node)], self._staged)

    def _is_cut(self, node: ir.Node) -> bool:
        x, axes = node.inputs[0], _axes(node)
        if not axes or self._count(x, axes) <= self._at_once:
            return False
        first, *others = self._stages(x, axes)
        return bool(others) or self._can_be_cut(x, first)

    def _can_be_cut(self, x: ir.Value, stage: Sequence[int]) -> bool:
        return len(stage) == 1 and self._count(x, stage) > self._at_once and _parts(x, *stage) is not None

    def _staged(self, op: Builder, node: ir.Node) -> ir.Value:
        x, axes = node.inputs[0], _axes(node)
        for stage in self._stages(x, axes):
            if self._can_be_cut(x, stage):
                x = _by_parts(op, node.op_type, x, *stage)
            else:
                x = op.node(node.op_type, x, stage, keepdims=1)
        return x if node.attributes.get_int("keepdims", 1) else op.Squeeze(x, axes)

    def _stages(self, x: ir.Value, axes: Sequence[int]) -> Iterator[list[int]]:
        """The axes one by one from the last to the first; at first together while they are few numbers side by side."""
        axes = [axis for axis in axes if x.shape[axis] != 1]
        inner = [axes[-1]]
        for axis in reversed(axes[:-1]):
            if inner[0] - axis > 1 or self._count(x, [axis, *inner]) > self._at_once:
                break
            inner.insert(0, axis)
        yield inner
        yield from ([axis] for axis in reversed(axes[: -len(inner)]))

    def _count(self, x: ir.Value, axes: Sequence[int]) -> float:
        """How many numbers go into one sum, infinity where that is not known."""
        known = [size_at_hand(x.shape[axis], self._sizes) for axis in axes]
        return math.inf if None in known else math.prod(known)


def _axes(node: ir.Node) -> list[int] | None:
    """The axes of a sum of float32, from the first; None where they are not known."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if x.dtype != ir.DataType.FLOAT or x.shape is None or 0 in x.shape.dims or "axes" in node.attributes:
        return None
    if axes is None:
        return None if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(len(x.shape)))
    chosen = constant_array(axes)
    return None if chosen is None or not chosen.size else sorted({int(axis) % len(x.shape) for axis in chosen})


def _by_parts(op: Builder, op_type: str, x: ir.Value, axis: int) -> ir.Value:
    """The sum along one axis, kept as 1."""
    if parts := _parts(x, axis):
        split = op.Reshape(x, [0] * axis + [parts, x.shape[axis] // parts, *x.shape[axis + 1 :]])
        return op.node(op_type, op.node(op_type, split, [axis + 1], keepdims=0), [axis], keepdims=1)
    ones = op.const(np.ones([1, 1, PIECE], np.float32))
    filled = op.Concat(op.Reshape(x, [-1]), np.zeros(1, np.float32), axis=0)  # Conv takes no empty row
    row = op.Reshape(filled, [1, 1, -1])
    pieces = op.node("Conv", row, ones, strides=[PIECE], pads=[0, PIECE - 1], kernel_shape=[PIECE])
    total = op.Reshape(op.ReduceSum(pieces, keepdims=0), [1] * len(x.shape))
    return total if op_type == "ReduceSum" else op.Div(total, op.Cast(op.size(x), to=x.dtype))


def _parts(x: ir.Value, axis: int) -> int | None:
    """Into how many equal parts the axis is cut; 0: into pieces, whatever its length; None where it cannot be."""
    size, behind = x.shape[axis], x.shape[axis + 1 :]
    if isinstance(size, int) and all(isinstance(d, int) for d in behind):
        root = math.isqrt(size)
        if parts := next((k for k in range(root, root // 16, -1) if size % k == 0), None):
            return parts
    return 0 if all(d == 1 for k, d in enumerate(x.shape) if k != axis) else None
