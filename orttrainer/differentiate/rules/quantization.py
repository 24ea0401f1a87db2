"""What turns quantised tensors, or bits, into floats. What quantises has integer outputs, and no gradient."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import attribute, axis_of, join, operand, rank
from orttrainer.errors import GradientError


@definition("DequantizeLinear")
def dequantize_linear(op, node):
    """Y = (X - zero) scale  ->  dscale = the sum of dY (X - zero) over what shares it; X and zero are integers."""
    x, scale, zero = (operand(node, index) for index in range(3))
    axis, block = axis_of(node, x, 1) if rank(node, x) else 0, attribute(node, "block_size", 0)
    y = op.cast_as(x, scale)
    if zero is not None:
        y = op.Sub(y, _spread(op, node, op.cast_as(zero, scale), axis, block))
    y = op.Mul(y, _spread(op, node, scale, axis, block))
    if dtype := attribute(node, "output_dtype", 0):
        y = op.Cast(y, to=dtype)
    return y


def _spread(op, node: ir.Node, value: ir.Value, axis: int, block: int) -> ir.Value:
    """One value for all, or one for each place along an axis, or one for each block of places, as X has them."""
    x = node.inputs[0]
    dims = rank(node, x)
    if block:
        repeated = op.Expand(op.Unsqueeze(value, [axis + 1]), [block if k == axis + 1 else 1 for k in range(dims + 1)])
        whole = op.Reshape(repeated, join(op, *(-1 if k == axis else op.dim(value, k) for k in range(dims))))
        return op.Slice(whole, [0], op.dim(x, axis), [axis])
    if rank(node, value) != 1 or dims == 0:
        return value
    if value.shape[0] == 1:
        return op.Reshape(value, [])
    return op.Unsqueeze(value, [k for k in range(dims) if k != axis]) if dims > 1 else value


@vjp("BitCast")
def bit_cast(op, node, dy):
    """Y = the bits of X in another dtype  ->  dX = dY where that is the dtype of X; there is no other derivative."""
    (x,), (y,) = node.inputs, node.outputs
    if x.dtype != y.dtype:
        raise GradientError(
            f"BitCast node {node.name!r} reads the bits of a {x.dtype} as {y.dtype}: that has no gradient"
        )
    return dy
