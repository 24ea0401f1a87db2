"""Inverse Fourier transforms: ONNX Runtime (1.31.1) divides their float64 by the number of points as float32 has it.

And 1.22 takes none of half a spectrum, which the export therefore writes so in float32, too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.signal import along_the_second, points, transform, transformed_axis
from orttrainer.differentiate.rules.tools import attribute, constant, operand, positions

__all__ = ["EXACT", "FORMS", "inverse_transform"]

_CONJUGATE = np.array([1.0, -1.0])


def is_exact(node: ir.Node) -> bool:
    return not attribute(node, "inverse", 0)


def inverse_transform(op, node: ir.Node) -> ir.Value | None:
    """F^-1 X = conj(F conj(X)) / N.

    Of half a spectrum it is Re(F conj(c X)) / N, where c says how often a frequency is read.
    """
    x = node.inputs[0]
    if x.shape is None or not isinstance(x.shape[-1], int):
        return None
    if (axis := transformed_axis(op, node)) is None:
        return along_the_second(op, node, lambda flat: _inverse(op, node, flat, 1))
    return _inverse(op, node, x, axis)


def _inverse(op, node: ir.Node, x: ir.Value, axis: int) -> ir.Value:
    parts, length, onesided = x.shape[-1], points(op, node, x, axis), attribute(node, "onesided", 0)
    conjugate = op.const(_CONJUGATE, x.dtype)
    if parts == 2:
        x = op.Mul(x, conjugate)
    if onesided:
        times = op.cast_as(_times_read(op, op.dim(x, axis), length), x)
        x = op.Mul(x, op.Unsqueeze(times, list(range(1, len(x.shape) - axis))))
    given = operand(node, 1)
    y = transform(op, x, axis, _number(op, length) if given is None and onesided else given)
    if onesided:
        return op.Div(op.Slice(y, [0], [1], [-1]), op.cast_as(length, y))
    return op.Div(y, op.Mul(op.cast_as(length, y), conjugate))


def _number(op, x: ir.Value) -> ir.Value:
    known = constant(x)
    return op.Reshape(x, np.array([], np.int64)) if known is None else op.const(known.reshape(()))


def _times_read(op, size: ir.Value, length: ir.Value) -> ir.Value:
    """For each frequency 1, that of its mirror image besides, or 0 where the whole spectrum has others."""
    k = positions(op, size)
    twice = op.Mul(k, np.int64(2))
    itself, mirrored = op.LessOrEqual(twice, length), op.And(op.Greater(k, np.int64(0)), op.Less(twice, length))
    return op.Add(*(op.Cast(read, to=ir.DataType.INT64) for read in (itself, mirrored)))


FORMS = {"DFT": inverse_transform}
EXACT = {"DFT": is_exact}
