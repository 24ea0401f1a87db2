"""What chooses among numbers, or finds some: by what is the same in a type that there are kernels for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.tools import attribute, positions

__all__ = ["FORMS"]


def hardmax(op, node: ir.Node) -> ir.Value | None:
    """1 at the first of the largest numbers."""
    (x,) = node.inputs
    if x.shape is None:
        return None
    axis = attribute(node, "axis", -1)
    largest, places = op.ArgMax(x, axis=axis, keepdims=1), positions(op, op.dim(x, axis))
    behind = len(x.shape) - 1 - axis % len(x.shape)
    chosen = op.Equal(largest, op.Unsqueeze(places, list(range(1, behind + 1))) if behind else places)
    return op.cast_as(chosen, x)


def non_zero(op, node: ir.Node) -> ir.Value:
    """The places of what differs from 0, as NaN does."""
    (x,) = node.inputs
    return op.NonZero(op.Not(op.Equal(x, 0.0)))


def one_hot(op, node: ir.Node) -> ir.Value:
    """The second of two numbers in the place of each index, the first one elsewhere."""
    indices, depth, values = node.inputs
    whole = [x if x.dtype == ir.DataType.INT64 else op.Cast(x, to=ir.DataType.INT64) for x in (indices, depth)]
    chosen = op.OneHot(*whole, np.array([0, 1]), axis=attribute(node, "axis", -1))
    off, on = (op.Gather(values, np.int64(place)) for place in range(2))
    return op.Where(op.Cast(chosen, to=ir.DataType.BOOL), on, off)


FORMS = {"Hardmax": hardmax, "NonZero": non_zero, "OneHot": one_hot}
