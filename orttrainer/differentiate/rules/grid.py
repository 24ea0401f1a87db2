"""Resampling: AffineGrid and GridSample."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import add_to_zeros, attribute, positions, rank, scatter_along, shaped
from orttrainer.differentiate.rules.windows import flattened, reshape, sizes

# Channels of a pixel, from which on they are read and added in one go; alone, 4 times 16 images: 11.1 -> 1.3 ms.
LEAST_ROW = 8


@vjp("AffineGrid")
def affine_grid(op, node, dy):
    """Y[n,p] = theta[n] @ (p, 1)  ->  dtheta[n] = sum over p of dY[n,p] (p, 1)^T."""
    theta, size = node.inputs
    spatial = rank(node, dy) - 2
    identity = op.const(np.eye(spatial, spatial + 1)[None], theta.dtype)
    one_image = op.Concat([1], op.Slice(size, [1], [spatial + 2]), axis=0)
    points = op.AffineGrid(identity, one_image, align_corners=attribute(node, "align_corners", 0))
    points = op.Reshape(points, [-1, spatial])
    points = op.Concat(points, op.full_like(op.Slice(points, [0], [1], [1]), 1.0), axis=1)  # [points, spatial + 1]
    flat = reshape(op, dy, *sizes(theta, 0), -1, spatial)
    return shaped(op.MatMul(op.Transpose(flat, perm=[0, 2, 1]), points), theta), None


@vjp("GridSample")
def grid_sample(op, node, dy):
    """Y[p] = sum_k w_k(grid[p]) X[i_k]  ->  dX[i_k] += w_k dY[p],  dgrid[p] = sum_k w_k' dY[p] X[i_k]."""
    x, grid = node.inputs
    spatial = rank(node, x) - 2
    images, flat_dy = flattened(op, x, 2), flattened(op, dy, 2)  # [batch, channels, positions], and points
    index, weights, slopes, inside = reads(op, node)
    weight = _flat(op, _product(op, weights + inside))
    channels = x.shape[1]
    by_rows = isinstance(channels, int) and channels >= LEAST_ROW
    form = functools.partial(_by_rows, channels) if by_rows else _by_elements
    dx, products = form(op, images, flat_dy, index, weight)
    dx = op.reshape_as(dx, x)
    if slopes[0] is None:
        return dx, op.zeros_like(grid)  # nearest: Y is piecewise constant in the grid
    products, partials = products(), []
    for axis in reversed(range(spatial)):
        others = [w for k, w in enumerate(weights) if k != axis]
        slope = _flat(op, _product(op, [slopes[axis], *others, *inside]))
        partials.append(op.Unsqueeze(op.ReduceSum(op.Mul(products, slope), [1], keepdims=0), [2]))
    return dx, op.reshape_as(op.Concat(*partials, axis=2), grid)


def _by_elements(op, images: ir.Value, dy: ir.Value, index: ir.Value, weight: ir.Value):
    """The gradient of the images, and a function of which come the products of `dy` and what each tap reads."""
    index, dy = _of_channels(op, index, images), op.Unsqueeze(dy, [2])  # [batch, channels, 1, points]
    spread = op.Mul(dy, op.Unsqueeze(weight, [1]))  # [batch, channels, taps, points]
    dx = add_to_zeros(
        op, images, flattened(op, spread, 2),
        lambda zeros, dy: op.ScatterElements(zeros, index, dy, axis=2, reduction="add"),
    )  # fmt: skip

    def products() -> ir.Value:
        read = op.Reshape(op.GatherElements(images, index, axis=2), op.Shape(spread))
        return op.ReduceSum(op.Mul(read, dy), [1], keepdims=0)  # [batch, taps, points]

    return dx, products


def _by_rows(channels: int, op, images: ir.Value, dy: ir.Value, index: ir.Value, weight: ir.Value):
    """The same with the channels of a pixel as a row, which is read, and added, as one."""
    pixels, dy = (op.Transpose(x, perm=[0, 2, 1]) for x in (images, dy))
    table = op.Reshape(pixels, [-1, channels])
    first = op.Mul(positions(op, op.dim(images, 0)), op.dim(images, 2))  # row of each image
    rows = op.Reshape(shaped(op.Add(index, op.Unsqueeze(first, [1])), index), [-1])
    dy = op.Unsqueeze(dy, [1])  # [batch, 1, points, channels]
    spread = op.Mul(dy, op.Unsqueeze(weight, [3]))  # [batch, taps, points, channels]
    added = op.Reshape(spread, [-1, channels])
    dx = scatter_along(op, added, rows, 0, op.dim(table, 0), unique=False, like=table)
    dx = op.Transpose(op.reshape_as(dx, pixels), perm=[0, 2, 1])

    def products() -> ir.Value:
        return op.ReduceSum(op.Mul(op.reshape_as(op.Gather(table, rows), spread), dy), [3], keepdims=0)

    return dx, products


def grid_sample_by_definition(op, node: ir.Node) -> ir.Value:
    """Y[p] = sum_k w_k(grid[p]) X[i_k], by GatherElements."""
    x, grid = node.inputs
    index, weights, _, inside = reads(op, node)
    weight = op.Unsqueeze(_flat(op, _product(op, weights + inside)), [1])  # [batch, 1, taps, points]
    images = flattened(op, x, 2)
    read = op.GatherElements(images, _of_channels(op, index, images), axis=2)
    read = reshape(op, read, *sizes(x, 0, 1), *sizes(weight, 2, 3))
    y = op.ReduceSum(op.Mul(read, weight), [2], keepdims=0)
    return reshape(op, y, *sizes(x, 0, 1), *sizes(grid, *range(1, len(grid.shape) - 1)))


def reads(op, node: ir.Node):
    """What a GridSample reads: flat indices [batch, taps * points], and along each axis the weights, their
    slopes by the grid, and (with zeros around) whether there is such a pixel, each [batch, taps..., points]."""
    x, grid = node.inputs
    spatial = len(x.shape) - 2
    lengths = [op.dim(x, axis + 2) for axis in range(spatial)]
    at, weights, slopes, inside = [], [], [], []
    for axis, length in enumerate(lengths):
        where, slope = _in_pixels(op, node, op.Gather(grid, np.int64(spatial - 1 - axis), axis=spatial + 1), length)
        where = flattened(op, where, 1)  # [batch, points]
        for part, value in zip((at, weights, slopes, inside), _taps(op, node, where, length)):
            part.append(_combine_axis(op, value, axis, spatial))
        slopes[-1] = op.Mul(slopes[-1], slope) if slopes[-1] is not None else None
    index = at[0]
    for length, part in zip(lengths[1:], at[1:]):
        index = op.Add(op.Mul(index, length), part)
    return flattened(op, index, 1), weights, slopes, [mask for mask in inside if mask is not None]


def _of_channels(op, index: ir.Value, images: ir.Value) -> ir.Value:
    """[batch, taps * points] -> [batch, channels, taps * points]."""
    return op.Expand(op.Unsqueeze(index, [1]), op.Concat(op.dim(images, 0), op.dim(images, 1), [1], axis=0))


def _in_pixels(op, node: ir.Node, g: ir.Value, length: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A coordinate in [-1, 1] as a position in pixels, and the derivative of that."""
    length = op.cast_as(length, g)
    if attribute(node, "align_corners", 0):
        slope = op.Mul(op.Sub(length, 1.0), 0.5)
        return op.Mul(op.Add(g, 1.0), slope), slope
    slope = op.Mul(length, 0.5)
    # PyTorch multiplies and adds in one instruction, which rounds once: a bit decides on which side of a pixel the slope is.
    wide = [op.Cast(x, to=int(ir.DataType.DOUBLE)) for x in (op.Add(g, 1.0), slope)]
    return op.cast_as(op.Sub(op.Mul(*wide), 0.5), g), slope


def _taps(op, node: ir.Node, at: ir.Value, length: ir.Value):
    """The pixels that a position is read from, their weights, the slopes of these, and (zeros) whether they exist.

    Each [batch, taps, points]: the points, of which there are many, lie next to each other.
    """
    mode, zeros = attribute(node, "mode", "linear"), attribute(node, "padding_mode", "zeros") == "zeros"
    at = op.Unsqueeze(at, [1])  # [batch, 1, points]
    if mode in ("linear", "bilinear"):
        at, turn = (at, op.full_like(at, 1.0)) if zeros else _within(op, node, at, length)
        pixel = op.Floor(at)
        t = op.Sub(at, pixel)
        weights = op.Concat(op.Sub(1.0, t), t, axis=1)
        slopes = op.Concat(op.Neg(turn), turn, axis=1)
        pixel = op.Add(pixel, op.const([[0.0], [1.0]], at.dtype))
    else:  # not the position is brought into the image, but each pixel that it is read from
        if mode == "nearest":
            pixel = op.Round(at)
            weights, slopes = op.full_like(at, 1.0), None
        else:
            first = op.Floor(at)
            t, cubic = op.Sub(at, first), keys_kernel(-0.75)
            weights = _polynomial(op, t, cubic)
            slopes = _polynomial(op, t, cubic[:, :3] * [3, 2, 1])
            pixel = op.Add(first, op.const([[-1.0], [0.0], [1.0], [2.0]], at.dtype))
        pixel = pixel if zeros else _within(op, node, pixel, length)[0]
    pixel, last = op.Cast(pixel, to=int(ir.DataType.INT64)), op.Sub(length, np.int64(1))
    inside = None
    if zeros:
        inside = op.And(op.GreaterOrEqual(pixel, np.int64(0)), op.LessOrEqual(pixel, last))
        inside = op.Cast(inside, to=int(at.dtype))
    pixel = op.Max(op.Min(pixel, last), np.int64(0))
    return pixel, weights, slopes, inside


def _within(op, node: ir.Node, at: ir.Value, length: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A position of which the padding has made one in the image, and the slope of that: 0 on the rim, as in PyTorch."""
    length = op.cast_as(length, at)
    last, slope = op.Sub(length, 1.0), op.scalar(1.0, at)
    if attribute(node, "padding_mode", "zeros") == "reflection":
        # About the centers of the first and the last pixel, or about their outer edges: there and back again.
        low, span = (0.0, last) if attribute(node, "align_corners", 0) else (-0.5, length)
        period = op.Max(op.Mul(span, 2.0), 1.0)
        beyond = op.Sub(at, low)
        there = op.Abs(beyond)
        there = op.Sub(there, op.Mul(op.Floor(op.Div(there, period)), period))
        back = op.Sub(period, there)
        turned = op.Xor(op.Less(beyond, 0.0), op.Greater(there, back))
        at, slope = op.Add(op.Min(there, back), low), op.Where(turned, op.scalar(-1.0, at), slope)
    between = op.And(op.Greater(at, 0.0), op.Less(at, last))
    return op.Max(op.Min(at, last), 0.0), op.Where(between, slope, op.scalar(0.0, at))


def keys_kernel(a: float) -> np.ndarray:
    """The weights of the four pixels around a place, t behind the second: coefficients of t^3, t^2, t and 1 for each."""
    return np.array([[a, -2 * a, a, 0], [a + 2, -a - 3, 0, 1], [-a - 2, 2 * a + 3, -a, 0], [-a, a, 0, 0]])


def _polynomial(op, t: ir.Value, coefficients: np.ndarray) -> ir.Value:
    """Horner's scheme, for all taps at once."""
    columns = [op.const(c[:, None], t.dtype) for c in coefficients.T]
    value = columns[0]
    for column in columns[1:]:
        value = op.Add(op.Mul(t, value), column)
    return value


def _combine_axis(op, value, axis: int, spatial: int):
    """[batch, taps, points] with its taps on an axis of their own, so that all combinations broadcast."""
    if value is None:
        return None
    extra = [1 + k for k in range(spatial) if k != axis]
    return op.Unsqueeze(value, extra) if extra else value


def _product(op, values):
    return list(itertools.accumulate(values, op.Mul))[-1]


def _flat(op, value):
    """[batch, taps..., points] -> [batch, all taps, points]."""
    return reshape(
        op, value, *sizes(value, 0), int(np.prod(value.shape.dims[1:-1])), *sizes(value, len(value.shape) - 1)
    )
