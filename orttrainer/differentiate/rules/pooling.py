"""Pooling: MaxPool, AveragePool, LpPool, their global forms, MaxUnpool."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.convolution import sliding, transposed, unpadded
from orttrainer.differentiate.rules.tools import (
    attribute,
    operand,
    output,
    positions,
    rank,
    scatter_along,
    shaped,
    zeros,
)
from orttrainer.differentiate.rules.windows import Window, flattened, ranked, reshape, sizes

MOST_COMPARED = 16  # elements of a window: with more of them the Indices take less time than ten passes over all


@vjp("MaxPool")
def max_pool(op, node, dy, _=None):
    """dX[j] = sum over the windows whose maximum is at j of dY; the first maximum of a window, as in PyTorch."""
    (x,) = node.inputs
    window, padded, _ = sliding(op, node, x, attribute(node, "kernel_shape", None))
    dy = _counted(node, dy, x, window)
    few = np.prod(window.kernel) <= MOST_COMPARED
    if padded is x and x.dtype == ir.DataType.FLOAT and few and tiles(x, dy, window):
        spread_dy = enlarged(op, dy, x, window.kernel)
        return op.Mul(_first_maxima(op, x, node.outputs[0], window.kernel), spread_dy)
    at = _positions_of_maxima(op, node, x)
    flat = op.ScatterElements(
        zeros(op, _one_axis(op, x), x.dtype), op.Reshape(at, [-1]), op.Reshape(dy, [-1]), axis=0, reduction="add"
    )
    return op.reshape_as(flat, x)


@vjp("MaxUnpool")
def max_unpool(op, node, dy):
    """Y[indices] = X  ->  dX = dY[indices]."""
    x, indices = node.inputs[:2]
    if operand(node, 2) is None:
        return (shaped(op.Gather(op.Reshape(dy, [-1]), indices), x),)
    origin, count = origins(op, node), op.Reshape(op.size(x), [1])
    sums = scatter_along(
        op, op.Reshape(dy, [-1]), op.Reshape(origin, [-1]), 0, op.Add(count, np.int64(1)), unique=False, like=None
    )  # [1 + elements]
    return (op.reshape_as(op.Slice(sums, [1], [np.iinfo(np.int64).max], [0]), x),)


def origins(op, node) -> ir.Value:
    """For each element of what MaxUnpool gives, which one of X it is: 1 is the first, 0 where none was put.

    ONNX counts the indices in the shape that the kernel gives, ONNX Runtime in output_shape. So unpool numbers, in two
    digits, since a float32 counts to 2^24 only.
    """
    x = node.inputs[0]
    count, base = op.Reshape(op.size(x), [1]), np.int64(2048)
    numbers = op.reshape_as(op.Add(positions(op, count), np.int64(1)), x)
    kept = {name: attribute(node, name, None) for name in ("kernel_shape", "pads", "strides")}
    digits = []
    for digit in (op.Div(numbers, base), op.Mod(numbers, base)):
        unpooled = op.MaxUnpool(op.Cast(digit, to=int(ir.DataType.FLOAT)), *node.inputs[1:], **kept)
        digits.append(op.Cast(unpooled, to=int(ir.DataType.INT64)))
    return op.Add(op.Mul(digits[0], base), digits[1])


@vjp("AveragePool")
def average_pool(op, node, dy):
    """Each position of a window gets dY / (number of positions that its mean is over)."""
    (x,) = node.inputs
    window, padded, begin = sliding(op, node, x, attribute(node, "kernel_shape", None))
    dy = _counted(node, dy, x, window)
    for factor in reciprocal_counts(op, x, dy, window, begin, attribute(node, "count_include_pad", 0)):
        dy = op.Mul(dy, factor)
    return unpadded(op, spread(op, dy, padded, window), begin, x)


@vjp("LpPool")
def lp_pool(op, node, dy):
    """Y = (sum |X|^p)^(1/p)  ->  dX = |X|^(p-1) sign(X) * sum over windows of dY * Y^(1-p); 0 where Y == 0."""
    (x,) = node.inputs
    (y,) = node.outputs
    p = attribute(node, "p", 2)
    window, padded, begin = sliding(op, node, x, attribute(node, "kernel_shape", None))
    dy = _counted(node, dy, x, window)
    summed = unpadded(op, spread(op, _over_norm(op, dy, y, p), padded, window), begin, x)
    return op.Mul(summed, _signed_power(op, x, p))


@vjp("GlobalAveragePool")
def global_average_pool(op, node, dy):
    """dX = dY / (number of positions), everywhere."""
    (x,) = node.inputs
    count = op.Cast(op.size(x, range(2, rank(node, x))), to=int(x.dtype))
    return op.expand_as(op.Mul(dy, op.Reciprocal(count)), x)


@vjp("GlobalMaxPool")
def global_max_pool(op, node, dy):
    """dX = dY at the first maximum of a channel, as in PyTorch."""
    (x,) = node.inputs
    rank(node, x)  # an error if it is unknown
    flat = flattened(op, x, 2)
    at = op.ArgMax(flat, axis=2, keepdims=1)
    scattered = op.ScatterElements(op.zeros_like(flat), at, op.reshape_as(dy, at), axis=2)
    return op.reshape_as(scattered, x)


@vjp("GlobalLpPool")
def global_lp_pool(op, node, dy):
    """Y = (sum |X|^p)^(1/p)  ->  dX = |X|^(p-1) sign(X) * dY * Y^(1-p); 0 where Y == 0."""
    (x,) = node.inputs
    (y,) = node.outputs
    p = attribute(node, "p", 2)
    return op.Mul(_over_norm(op, dy, y, p), _signed_power(op, x, p))


# -- windows --------------------------------------------------------------------------------


def spread(op, dy: ir.Value, x: ir.Value, window: Window) -> ir.Value:
    """Each element of dy added to every position of x in its window."""
    dims, channels = len(window.strides), x.shape[1]
    if tiles(x, dy, window):
        return enlarged(op, dy, x, window.kernel)
    outside = [p for k, *ends in zip(window.kernel, window.begin, window.end) for p in (k - 1 - end for end in ends)]
    if all(s == d == 1 for s, d in zip(window.strides, window.dilations)) and min(outside) >= 0:
        mean = op.AveragePool(
            dy, kernel_shape=list(window.kernel), pads=[*outside[::2], *outside[1::2]], count_include_pad=1
        )
        return shaped(op.Mul(mean, op.scalar(float(np.prod(window.kernel)), x)), x)
    if isinstance(channels, int):
        return transposed(op, dy, op.const(np.ones((channels, 1, *window.kernel)), x.dtype), x, window, channels)
    images = reshape(op, x, -1, 1, *sizes(x, *range(2, dims + 2)))  # [batch * channels, 1, spatial...]
    ones = op.const(np.ones((1, 1, *window.kernel)), x.dtype)
    summed = transposed(op, reshape(op, dy, -1, 1, *sizes(dy, *range(2, dims + 2))), ones, images, window, 1)
    return op.reshape_as(summed, x)


def tiles(x: ir.Value, dy: ir.Value, window: Window) -> bool:
    """Whether each position of x is in exactly one window; False where that is not known."""
    unread = window.unread(x, dy)
    whole = window.kernel == window.strides and window.extent == window.kernel and not any(window.begin + window.end)
    return whole and all(isinstance(size, int) for size in x.shape.dims[2:]) and not any(unread)


def enlarged(op, y: ir.Value, x: ir.Value, repeats) -> ir.Value:
    """Each element repeated along each spatial axis, in the shape of x.

    Along the last axes Resize is 20 times as fast as Expand, but in three at once it takes 90 times as long as in two.
    """
    outer, inner = list(zip(x.shape.dims[2:], repeats))[:-2], list(zip(x.shape.dims[2:], repeats))[-2:]
    if outer:
        y = reshape(op, y, -1, 1, *(size // repeat for size, repeat in inner))
    scales = op.const(np.array([1, 1, *repeats[-2:]], np.float32))
    y = op.Resize(y, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    length = int(np.prod([size for size, _ in inner]))
    for size, repeat in reversed(outer):
        y = op.Expand(op.Reshape(y, [-1, size // repeat, 1, length]), [1, 1, repeat, 1])
        length *= size
    return op.reshape_as(y, x) if outer else shaped(y, x)


def _counted(node: ir.Node, dy: ir.Value, x: ir.Value, window: Window) -> ir.Value:
    """`dy` with the right number of windows: with ceil_mode ONNX may count one that starts beyond the input."""
    dy = ranked(node, dy, x)
    if attribute(node, "ceil_mode", 0):
        for axis, (s, e, p, q) in enumerate(zip(window.strides, window.extent, window.begin, window.end), start=2):
            if isinstance(size := x.shape[axis], int):
                windows = -(-(size + p + q - e) // s) + 1
                dy.shape[axis] = windows - ((windows - 1) * s >= size + p)
    return dy


def _first_maxima(op, x: ir.Value, y: ir.Value, kernel: tuple[int, ...]) -> ir.Value:
    """1 at the first maximum of each window, else 0, where windows tile x.

    Half the time of the Indices output, which makes ONNX Runtime's MaxPool ten times slower, and of the ScatterElements
    behind it, whose part grows with the number of windows.
    `mask` is 1 where its argument is 0, and 0 where it is at least 3.4e-39: every other float32
    but some denormals. A window of infinities alone gives NaN.
    """

    def mask(difference):
        return op.HardSigmoid(difference, alpha=-3e38, beta=1.0)

    maxima = mask(op.Sub(enlarged(op, y, x, kernel), x))
    repeats = [size // k for size, k in zip(x.shape.dims[2:], kernel)]
    order = np.tile(np.arange(np.prod(kernel), 0, -1).reshape(kernel), repeats)  # the first of a window is the largest
    ranked_maxima = op.Mul(maxima, op.const(order, x.dtype))
    best = op.MaxPool(ranked_maxima, kernel_shape=list(kernel), strides=list(kernel))
    return mask(op.Sub(enlarged(op, best, x, kernel), ranked_maxima))


def _positions_of_maxima(op, node: ir.Node, x: ir.Value) -> ir.Value:
    """The Indices output of a MaxPool, row-major."""
    if attribute(node, "storage_order", 0):
        attributes = {name: value for name, value in node.attributes.items() if name != "storage_order"}
        return op.MaxPool(x, outputs=2, **{name: attribute(node, name, None) for name in attributes})[1]
    return output(op, node, 1)


def _one_axis(op, x: ir.Value) -> ir.Value:
    return op.Reshape(op.size(x), [1])


# -- means and norms ------------------------------------------------------------------------


def reciprocal_counts(op, x, dy, window, begin, include_pad):
    """1 / (number of positions in the mean) of each window: a factor per axis where it varies, one for the others."""
    common, dims = 1, len(window.strides)
    unread = window.unread(x, dy)
    for axis, (k, p, q) in enumerate(zip(window.kernel, window.begin, window.end)):
        inside = unread is not None and unread[axis] >= 0  # no window hangs over the pads
        full = inside or begin is not None if include_pad else inside and begin is None and not p + q
        if full:
            common *= k
            continue
        count = _positions_in_windows(op, x, dy, window, begin, axis, include_pad)
        yield op.Reciprocal(op.Reshape(count, [-1] + [1] * (dims - 1 - axis)))
    if common != 1:
        yield op.scalar(1.0 / common, x)


def _positions_in_windows(op, x, dy, window, begin, axis, include_pad):
    """How many positions each window along one axis holds; pads count if `include_pad`."""
    taps = np.arange(window.kernel[axis]) * window.dilations[axis] - window.begin[axis]
    first = op.Mul(positions(op, op.dim(dy, axis + 2)), np.int64(window.strides[axis]))
    at = op.Add(op.Unsqueeze(first, [1]), taps.astype(np.int64))  # [windows, taps]
    if begin is not None:
        at = op.Sub(at, op.Gather(begin, np.int64(axis)))
    inside = op.Less(at, op.Add(op.dim(x, axis + 2), np.int64(window.end[axis] if include_pad else 0)))
    if not include_pad:
        inside = op.And(inside, op.GreaterOrEqual(at, np.int64(0)))
    return op.ReduceSum(op.Cast(inside, to=int(x.dtype)), [1], keepdims=0)


def _over_norm(op, dy, y, p):
    """dY * Y^(1-p), and 0 where Y == 0."""
    if p == 1:
        return dy
    zero = op.Equal(y, 0.0)
    safe = op.Where(zero, op.scalar(1.0, y), y)
    power = safe if p == 2 else op.Mul(safe, safe) if p == 3 else op.Pow(safe, op.scalar(p - 1.0, y))
    return op.Where(zero, op.scalar(0.0, y), op.Div(dy, power))


def _signed_power(op, x, p):
    """|X|^(p-1) sign(X)."""
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    magnitude = op.Abs(x)
    return op.Mul(x, magnitude if p == 3 else op.Pow(magnitude, op.scalar(p - 2.0, x)))
