"""Reductions over axes.

`axes` is an input, perhaps one that is only known at run time: it is handed on as it is.
It may be left out, so the rules return the cotangent of the data alone.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import non_differentiable, vjp
from orttrainer.differentiate.rules.elementwise import mask
from orttrainer.differentiate.rules.tools import HALVES, constant, operand, widened
from orttrainer.graph.builder import static_dims

non_differentiable("ArgMax", "ArgMin")


def axes_of(node: ir.Node) -> ir.Value | None:
    """The input `axes`; None where it is left out or surely empty."""
    axes = operand(node, 1)
    return None if axes is not None and axes.shape is not None and axes.shape.dims == (0,) else axes


def sum_kept(op, node: ir.Node, x: ir.Value) -> ir.Value:
    """The sum of `x` over the axes that `node` reduces, each kept with size 1."""
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    return op.ReduceSum(x, axes_of(node), keepdims=1, noop_with_empty_axes=noop)


def restored(op, node: ir.Node, value: ir.Value) -> ir.Value:
    """A `value` of the shape of the output of `node`, so that it broadcasts against the input."""
    axes = axes_of(node)
    if axes is None or node.attributes.get_int("keepdims", 1):
        return value
    return op.Unsqueeze(value, axes)


@vjp("ReduceSum")
def reduce_sum(op, node, dy):
    """Y = sum(X)  ->  dX = dY, repeated."""
    return op.expand_as(restored(op, node, dy), node.inputs[0])


@vjp("ReduceMean")
def reduce_mean(op, node, dy):
    """Y = sum(X) / n  ->  dX = dY / n, repeated."""
    return op.expand_as(restored(op, node, _over_count(op, node, dy)), node.inputs[0])


def _over_count(op, node: ir.Node, dy: ir.Value) -> ir.Value:
    """dY / n, where n elements are averaged into one."""
    x, axes = node.inputs[0], axes_of(node)
    if axes is None:
        count = _elements(op, x)
    elif (known := constant(axes)) is not None:
        count = op.size(x, known.tolist())
    else:  # perhaps empty
        count = op.Div(_elements(op, x), op.Max(_elements(op, node.outputs[0]), np.int64(1)))
    if (known := constant(count)) is not None:
        return op.Mul(dy, 1 / max(int(known), 1))
    wide = ir.DataType.DOUBLE if dy.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT  # float16 ends at 65504
    return op.Mul(dy, op.cast_as(op.Reciprocal(op.Cast(count, to=int(wide))), dy))


def _elements(op, x: ir.Value) -> ir.Value:
    """The number of elements of `x`; not by Size, for which CUDA has no kernel at opset 20."""
    return op.size(x) if static_dims(x) is not None else op.ReduceProd(op.Shape(x), keepdims=0)


@vjp("ReduceMax", "ReduceMin")
def reduce_max(op, node, dy):
    """Y = max(X)  ->  dX = dY where X == Y, shared equally by the elements that tie, as in torch.amax."""
    x, y = node.inputs[0], restored(op, node, node.outputs[0])
    if x.dtype in HALVES:  # else ONNX Runtime may compare X in float32 with a rounded Y
        (x,) = widened(op, x)
        noop = node.attributes.get_int("noop_with_empty_axes", 0)
        y = op.node(node.op_type, x, axes_of(node), keepdims=1, noop_with_empty_axes=noop)
    wins = mask(op, "Equal", x, y)
    share = op.Div(restored(op, node, op.cast_as(dy, wins)), sum_kept(op, node, wins))
    return op.cast_as(op.Mul(wins, share), dy)


@vjp("ReduceProd")
def reduce_prod(op, node, dy):
    """Y = prod(X)  ->  dX_i = dY * prod of X_j over j != i, which is 0 if one of these X_j is 0.

    If just one of them is, that factor is X_j itself rather than 0, so that the gradient of the gradient is right too.
    """
    x = node.inputs[0]
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    zero = mask(op, "Equal", x, 0.0)
    ones_for_zeros = op.Add(x, zero)
    product = op.ReduceProd(ones_for_zeros, axes_of(node), keepdims=1, noop_with_empty_axes=noop)
    zeros_elsewhere = op.Sub(sum_kept(op, node, zero), zero)
    value = op.Mul(x, zero)  # 0, but X_j to whoever differentiates it
    value_elsewhere = op.Mul(op.Sub(sum_kept(op, node, value), value), mask(op, "Equal", zeros_elsewhere, 1.0))
    factor = op.Add(mask(op, "Equal", zeros_elsewhere, 0.0), value_elsewhere)
    return op.Mul(restored(op, node, dy), op.Mul(op.Div(product, ones_for_zeros), factor))


@vjp("ReduceL1")
def reduce_l1(op, node, dy):
    """Y = sum(|X|)  ->  dX = dY * sign(X)."""
    return op.Mul(op.Sign(node.inputs[0]), restored(op, node, dy))


@vjp("ReduceL2")
def reduce_l2(op, node, dy):
    """Y = sqrt(sum(X^2))  ->  dX = dY * X / Y; 0 where Y == 0."""
    x, (y,) = node.inputs[0], node.outputs
    scale = op.Div(dy, op.Add(y, mask(op, "Equal", y, 0.0)))
    return op.Mul(x, restored(op, node, scale))


@vjp("ReduceSumSquare")
def reduce_sum_square(op, node, dy):
    """Y = sum(X^2)  ->  dX = 2 dY X."""
    return op.Mul(node.inputs[0], restored(op, node, op.Mul(dy, 2.0)))


@vjp("ReduceLogSum")
def reduce_log_sum(op, node, dy):
    """Y = log(sum(X))  ->  dX = dY / sum(X), repeated."""
    x = node.inputs[0]
    return op.expand_as(op.Div(restored(op, node, dy), sum_kept(op, node, x)), x)


@vjp("ReduceLogSumExp")
def reduce_log_sum_exp(op, node, dy):
    """Y = log(sum(exp(X)))  ->  dX = dY * exp(X - Y); 0 where all X are -inf."""
    x, (y,) = node.inputs[0], node.outputs
    finite = op.Max(y, float(y.dtype.min))  # X - Y would be -inf + inf
    return op.Mul(restored(op, node, dy), op.Exp(op.Sub(x, restored(op, node, finite))))
