"""Running products."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.tools import around_axis, attribute, constant, positions, rank, shaped


@definition("CumProd")
def cumulative_product(op, node):
    """Y[i] = the product of X[j] over j <= i: exact with zeros, and so by a square of all products."""
    x, axis = node.inputs
    dims = rank(node, x)
    if (known := constant(axis)) is not None:
        return shaped(_products(op, node, x, int(known.item()) % dims, dims), x)
    flat = op.Reshape(x, op.Concat(*around_axis(op, x, axis, dims), axis=0), allowzero=1)
    flat.shape = ir.Shape([None] * 3)
    return op.reshape_as(_products(op, node, flat, 1, 3), x)


def _products(op, node: ir.Node, x: ir.Value, axis: int, dims: int) -> ir.Value:
    place = positions(op, op.dim(x, axis))
    i, j = op.Unsqueeze(place, [1]), place
    if attribute(node, "reverse", 0):
        i, j = j, i
    taken = op.Less(j, i) if attribute(node, "exclusive", 0) else op.LessOrEqual(j, i)
    taken = op.Unsqueeze(taken, list(range(2, dims - axis + 1)))  # [i, j, the axes behind]
    factors = op.Where(taken, op.Unsqueeze(x, [axis]), op.scalar(1.0, x))
    return op.ReduceProd(factors, [axis + 1], keepdims=0)
