"""Pools but MaxPool: sums along one axis after the other; and MaxUnpool."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.convolution import sliding
from orttrainer.differentiate.rules.pooling import origins, reciprocal_counts
from orttrainer.differentiate.rules.tools import attribute
from orttrainer.differentiate.rules.unfold import MANY, gathered_along, offsets_of, padded, taps_along
from orttrainer.differentiate.rules.windows import Window, ints

__all__ = ["FORMS"]


def average_pool(op, node: ir.Node) -> ir.Value | None:
    """The sum over each window, over how many positions its mean is of."""
    (x,) = node.inputs
    if x.shape is None:
        return None
    window, images, begin = sliding(op, node, x, attribute(node, "kernel_shape", None))
    y = _sums(op, images, window, attribute(node, "ceil_mode", 0))
    for factor in reciprocal_counts(op, x, y, window, begin, attribute(node, "count_include_pad", 0)):
        y = op.Mul(y, factor)
    return y


def lp_pool(op, node: ir.Node) -> ir.Value | None:
    """The p-norm of each window."""
    (x,) = node.inputs
    if x.shape is None:
        return None
    p = attribute(node, "p", 2)
    window, images, _ = sliding(op, node, _power(op, x, p), attribute(node, "kernel_shape", None))
    return _root(op, _sums(op, images, window, attribute(node, "ceil_mode", 0)), p)


def global_average_pool(op, node: ir.Node) -> ir.Value | None:
    """The mean of each channel."""
    (x,) = node.inputs
    return None if x.shape is None else op.ReduceMean(x, _spatial(x), keepdims=1)


def global_max_pool(op, node: ir.Node) -> ir.Value | None:
    """The maximum of each channel."""
    (x,) = node.inputs
    return None if x.shape is None else op.ReduceMax(x, _spatial(x), keepdims=1)


def global_lp_pool(op, node: ir.Node) -> ir.Value | None:
    """The p-norm of each channel."""
    (x,) = node.inputs
    if x.shape is None:
        return None
    p = attribute(node, "p", 2)
    return _root(op, op.ReduceSum(_power(op, x, p), _spatial(x), keepdims=1), p)


def max_unpool(op, node: ir.Node) -> ir.Value:
    """Each number in its place, 0 elsewhere."""
    x = node.inputs[0]
    return op.Gather(op.Concat(op.const(np.zeros(1), x.dtype), op.Reshape(x, [-1]), axis=0), origins(op, node))


def _spatial(x: ir.Value) -> list[int]:
    return list(range(2, len(x.shape)))


def _power(op, x: ir.Value, p: int) -> ir.Value:
    return op.Mul(x, x) if p == 2 else op.Abs(x) if p == 1 else op.Pow(op.Abs(x), op.scalar(float(p), x))


def _root(op, y: ir.Value, p: int) -> ir.Value:
    return op.Sqrt(y) if p == 2 else y if p == 1 else op.Pow(y, op.scalar(1 / p, y))


def _sums(op, x: ir.Value, window: Window, ceil_mode: int) -> ir.Value:
    """The sum over each window; with `ceil_mode` over those, too, that hang over the end, but start before it."""
    room = [s - 1 if ceil_mode else 0 for s in window.strides]
    counts = [_windows(op, x, window, axis) for axis in range(len(room))] if ceil_mode else []
    x = padded(op, x, window.begin, [q + r for q, r in zip(window.end, room)])
    for axis, stride in reversed(list(enumerate(window.strides))):
        offsets = offsets_of(window, axis)
        if len(offsets) < MANY:
            taps = taps_along(op, x, 2 + axis, offsets, stride)
            x = op.Sum(*taps) if len(taps) > 1 else taps[0]
        else:
            x = op.ReduceSum(gathered_along(op, x, 2 + axis, offsets, stride), [2 + axis], keepdims=0)
        if ceil_mode:
            x = op.Slice(x, [0], counts[axis], [2 + axis])
    return x


def _windows(op, x: ir.Value, window: Window, axis: int) -> ir.Value | list[int]:
    """How many windows there are along an axis with `ceil_mode`."""
    stride, begin, end = window.strides[axis], window.begin[axis], window.end[axis]
    if isinstance(size := x.shape[2 + axis], int):
        count = -((window.extent[axis] - size - begin - end) // stride) + 1
        return ints([count - ((count - 1) * stride >= size + begin)])
    inside = op.Add(op.dim(x, 2 + axis), np.int64(begin))
    over = np.int64(end - window.extent[axis] + stride - 1)  # rounded up
    last = op.Div(op.Add(inside, over), np.int64(stride))  # of the windows, from 0 on
    beyond = op.GreaterOrEqual(op.Mul(last, np.int64(stride)), inside)
    return op.Sub(op.Add(last, np.int64(1)), op.Cast(beyond, to=int(ir.DataType.INT64)))


FORMS = {
    "AveragePool": average_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalLpPool": global_lp_pool,
    "GlobalMaxPool": global_max_pool,
    "LpPool": lp_pool,
    "MaxUnpool": max_unpool,
}
