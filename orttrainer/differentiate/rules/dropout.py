"""Dropout: the backward pass uses the mask that the forward pass drew."""

from __future__ import annotations

import numpy as np

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import constant, operand, output, refuse_gradient_by


@vjp("Dropout")
def dropout(op, node, dy, _=None):
    """Y = X * mask / (1 - ratio)  ->  dX = dY * mask / (1 - ratio); Y = X outside training mode."""
    refuse_gradient_by(op, node, 1, "ratio")
    x, ratio, training = node.inputs[0], operand(node, 1), operand(node, 2)
    mode = constant(training)
    if training is None or (mode is not None and not mode.any()):
        return dy
    rate = np.float64(0.5) if ratio is None else op.constant_value(ratio)
    if rate is not None:
        scale = op.scalar(0.0 if float(rate) >= 1.0 else 1.0 / (1.0 - float(rate)), x)
    else:
        kept = op.cast_as(op.Sub(op.scalar(1.0, ratio), ratio), x)
        nothing = op.Equal(kept, op.scalar(0.0, x))  # ratio 1: the mask is empty, and 0 * infinity must not come
        scale = op.Where(nothing, op.scalar(0.0, x), op.Reciprocal(op.Where(nothing, op.scalar(1.0, x), kept)))
    if mode is None:
        scale = op.Where(training, scale, op.scalar(1.0, x))
    return op.Mul(op.Mul(dy, op.cast_as(output(op, node, 1), x)), scale)
