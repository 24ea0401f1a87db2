"""Fourier transforms: linear in the signal, so that the gradient is the transposed transform."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition, gradient_through
from orttrainer.differentiate.registry import non_differentiable, vjp
from orttrainer.differentiate.rules.tools import (
    around_axis,
    attribute,
    constant,
    join,
    operand,
    positions,
    rank,
    shaped,
)

# Windows of an integer size; the corners of mel filters are whole bins of the spectrum, which do not move smoothly.
non_differentiable("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix")


@vjp("DFT")
def dft(op, node, dy):
    """Y = F X  ->  dX = F^H dY = N F^-1 dY;  Y = F^-1 X  ->  dX = F dY / N; both padded or cut where F sees X so.

    One-sided: Y = P F X keeps the first half, so dX = N F^-1 P^T dY. The inverse of half a spectrum reads all of it but
    its ends twice, so dX = c F dY / N, with c = 1 at the ends and 2 between.
    """
    x, axis = node.inputs[0], transformed_axis(op, node)
    if axis is None:
        return gradient_through(op, node, [dy], _along_the_second)
    inverse, onesided = attribute(node, "inverse", 0), attribute(node, "onesided", 0)
    given, size, length = operand(node, 1), op.dim(x, axis), points(op, node, x, axis)
    number, dy = op.cast_as(length, dy), _of_rank(dy, len(x.shape), 1 if inverse and onesided else 2)
    if inverse and onesided:
        spectrum = transform(op, dy, axis, onesided=1)
        k = positions(op, op.dim(spectrum, axis))
        ends = op.Or(op.Equal(k, np.int64(0)), op.Equal(op.Mul(k, np.int64(2)), length))
        weight = op.Div(op.Sub(op.scalar(2.0, dy), op.cast_as(ends, dy)), number)
        trailing = list(range(1, len(x.shape) - axis))
        dx = op.Mul(spectrum, op.Unsqueeze(weight, trailing))
        return shaped(_fitted(op, dx, axis, size), x)
    if onesided:
        dy = _fitted(op, dy, axis, length)
    dx = transform(op, dy, axis, inverse=1 - inverse)
    dx = op.Div(dx, number) if inverse else op.Mul(dx, number)
    if given is not None:
        dx = _fitted(op, dx, axis, size)
    return shaped(op.Slice(dx, [0], op.dim(x, -1), [-1]), x)  # a real signal has no imaginary part


def _along_the_second(op, node: ir.Node) -> ir.Value:
    kept = {name: attribute(node, name, None) for name in ("inverse", "onesided")}
    return along_the_second(op, node, lambda x: op.DFT(x, operand(node, 1), np.int64(1), **kept))


def along_the_second(op, node: ir.Node, transformed: Callable[[ir.Value], ir.Value]) -> ir.Value:
    """The transform along an axis that is known at run time only: `transformed` takes x as [before, axis, behind, 1 or 2]."""
    x, axis = node.inputs[0], op.Reshape(op.Cast(node.inputs[2], to=int(ir.DataType.INT64)), [1])
    parts = around_axis(op, x, axis, len(x.shape) - 1)
    flat = op.Reshape(x, op.Concat(*parts, op.dim(x, -1), axis=0), allowzero=1)
    flat.shape = ir.Shape([None, None, None, x.shape[-1]])
    y = transformed(flat)
    sizes = op.ScatterElements(op.shape(x), join(op, axis, -1), join(op, op.dim(y, 1), op.dim(y, 3)), axis=0)
    return _of_rank(op.Reshape(y, sizes, allowzero=1), len(x.shape), y.shape[3])


def transformed_axis(op, node: ir.Node) -> int | None:
    """The axis of the transform, counted from the front; None where it is known at run time only."""
    dims = rank(node, node.inputs[0])
    if op.opset < 20:
        return attribute(node, "axis", 1) % dims
    given = operand(node, 2)
    if given is None:
        return dims - 2
    known = constant(given)
    return None if known is None else int(known.item()) % dims


def points(op, node: ir.Node, x: ir.Value, axis: int) -> ir.Value:
    """How many points a DFT of `x` has, as a tensor of one number."""
    given, size = operand(node, 1), op.dim(x, axis)
    if given is not None:
        return op.Reshape(op.cast_as(given, size), [1])
    if attribute(node, "inverse", 0) and attribute(node, "onesided", 0):
        return _computed(op, lambda s: 2 * (s - 1), lambda s: op.Mul(op.Sub(s, [1]), [2]), size)
    return size


def transform(op, x: ir.Value, axis: int, length: ir.Value | None = None, **attributes) -> ir.Value:
    """The DFT of `x` along an axis, padded or cut to a length, where one is given."""
    if op.opset < 20:
        return op.DFT(x, length, axis=axis, **attributes)
    return op.DFT(x, length, np.int64(axis), **attributes)


def _fitted(op, x: ir.Value, axis: int, size: ir.Value) -> ir.Value:
    """`x` padded with zeros, or cut, to `size` along an axis."""
    missing = _computed(op, np.subtract, op.Sub, size, op.dim(x, axis))
    if (known := constant(missing)) is not None and not known.any():
        return x
    y = op.Pad(x, join(op, 0, missing), None, [axis])
    y.shape = ir.Shape([y.shape[a] if a == axis else dim for a, dim in enumerate(x.shape)])  # inference knows the rank
    return y


def _of_rank(x: ir.Value, rank: int, parts: int) -> ir.Value:
    """`x`, whose shape ONNX's inference has only where the number of points is known."""
    if x.shape is None:
        x.shape = ir.Shape([*[None] * (rank - 1), parts])
    return x


def _computed(op, now, later, *values: ir.Value) -> ir.Value:
    """`now` of what is known, else `later` in the graph."""
    known = [constant(value) for value in values]
    if all(k is not None for k in known):
        return op.const(np.asarray(now(*known), np.int64))
    return later(*values)


@definition("STFT")
def stft(op, node):
    """Y[t] = the DFT of window * X[t step : t step + length]."""
    x, step, window, length = (operand(node, index) for index in range(4))
    if rank(node, x) == 2:  # ONNX Runtime takes it for the [batch, length, 1] that ONNX asks for
        x = op.Unsqueeze(x, [2])
    size = op.dim(x, 1)
    if length is not None:
        length = op.Reshape(op.cast_as(length, size), [1])
    else:
        length = size if window is None else op.dim(window, 0)
    step = op.Reshape(op.cast_as(step, size), [1])
    frames = _computed(op, lambda s, n, k: (s - n) // k + 1, lambda s, n, k: op.Add(op.Div(op.Sub(s, n), k), [1]),
                       size, length, step)  # fmt: skip
    first, inside = positions(op, frames), positions(op, length)
    places = _computed(
        op, lambda t, k, j: (t * k)[:, None] + j, lambda t, k, j: op.Add(op.Unsqueeze(op.Mul(t, k), [1]), j),
        first, step, inside,
    )  # fmt: skip
    y = op.Gather(x, places, axis=1)  # [batch, frames, length, 1 or 2]
    if window is not None:
        y = op.Mul(y, op.Unsqueeze(window, [1]))
    return transform(op, y, 2, onesided=attribute(node, "onesided", 1))
