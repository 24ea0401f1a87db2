"""Convolutions: Conv, ConvTranspose, and the sliding window that pooling shares with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.convolution_weights import weight_gradient
from orttrainer.differentiate.rules.tools import attribute, rank, shaped
from orttrainer.differentiate.rules.windows import (
    TO_THE_END,
    Window,
    channel_sum,
    cropped,
    ints,
    ranked,
    reshape,
    sizes,
    spatial_axes,
)
from orttrainer.errors import GradientError
from orttrainer.graph.builder import static_dims
from orttrainer.graph.passes.pool_sizes import pads_without_dilations

SMALLEST_PLANE = 16  # positions


@vjp("Conv")
def conv(op, node, dy):
    """Y = X * W + B  ->  dX = dY *^T W,  dW[o,c,k] = sum_{n,i} dY[n,o,i] X[n,c,s*i+d*k-p],  dB = sum dY."""
    x, w = node.inputs[:2]
    dy, group = ranked(node, dy, x), attribute(node, "group", 1)
    window, padded, begin = sliding(op, node, x, kernel_of(node, w))
    dx = unpadded(op, transposed(op, dy, w, padded, window, group), begin, x)
    dw = weight_gradient(op, padded, dy, w, window, group)
    return (dx, dw, channel_sum(op, dy))[: len(node.inputs)]


@vjp("ConvTranspose")
def conv_transpose(op, node, dy):
    """Y = X *^T W + B  ->  dX = dY * W,  dW as in Conv, with X in the place of dY and dY of X,  dB = sum dY."""
    x, w = node.inputs[:2]
    dy, group = ranked(node, dy, x), attribute(node, "group", 1)
    window, read = transposed_window(op, node, x, w), dy
    extra = attribute(node, "output_padding", None) or []
    if any(more >= stride for more, stride in zip(extra, window.strides)):  # there would be windows beyond those of x
        window, read = _without_padding(op, window, dy, extra)
    dx = op.Conv(
        read, w, group=group, strides=list(window.strides), dilations=list(window.dilations),
        pads=[*window.begin, *window.end],
    )  # fmt: skip
    beyond = attribute(node, "output_shape", None)  # which may have more windows, too
    dx = cropped(op, dx, [0] * len(window.strides), x) if beyond else shaped(dx, x)
    dw = weight_gradient(op, read, x, w, window, group)
    return (dx, dw, channel_sum(op, dy))[: len(node.inputs)]


def _without_padding(op, window: Window, dy: ir.Value, extra: Sequence[int]) -> tuple[Window, ir.Value]:
    """The window without what an output_padding adds behind the pixels that x has reached, and the gradient of these."""
    ends = [min(q - more, 0) or TO_THE_END for q, more in zip(window.end, extra)]
    window = replace(window, end=tuple(max(q - more, 0) for q, more in zip(window.end, extra)))
    return window, op.Slice(dy, ints([0] * len(ends)), ints(ends), spatial_axes(dy))


# -- the window -----------------------------------------------------------------------------


def kernel_of(node: ir.Node, w: ir.Value) -> tuple[int | None, ...]:
    """Spatial sizes of the kernel of a Conv or ConvTranspose."""
    rank(node, w)  # an error if it is unknown
    given = attribute(node, "kernel_shape", None)
    return tuple(given) if given else tuple(k if isinstance(k, int) else None for k in w.shape.dims[2:])


def sliding(op, node: ir.Node, x: ir.Value, kernel: Sequence[int | None]):
    """The window of a Conv or pooling node, with `auto_pad` made explicit.

    Returns:
        The window; the input that it slides over; and None. Where `auto_pad` depends on a size
        that is only known at run time: the window without pads, `x` padded with zeros, and
        the pads before each spatial axis as a value, for `unpadded`.
    """
    dims = rank(node, x) - 2
    strides = tuple(attribute(node, "strides", None) or [1] * dims)
    dilations = tuple(attribute(node, "dilations", None) or [1] * dims)
    window = Window(tuple(kernel), strides, dilations, (0,) * dims, (0,) * dims)
    mode = attribute(node, "auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = attribute(node, "pads", None) or [0] * 2 * dims
        return replace(window, begin=tuple(pads[:dims]), end=tuple(pads[dims:])), x, None
    if mode == "VALID":
        return window, x, None
    _refuse_open_pads(node, window, x)
    totals = _same_pads(window, x)
    if totals is not None:
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        begin, end = (small, large) if mode == "SAME_UPPER" else (large, small)
        return replace(window, begin=begin, end=end), x, None
    begin, end = _same_pads_at_run_time(op, node, window, x, upper=mode == "SAME_UPPER")
    padded = op.Pad(x, op.Concat([0, 0], begin, [0, 0], end, axis=0))
    return window, padded, begin


def unpadded(op, dx: ir.Value, begin: ir.Value | None, x: ir.Value) -> ir.Value:
    """Undo the run-time padding of `sliding`."""
    return dx if begin is None else cropped(op, dx, begin, x)


def _same_pads(window: Window, x: ir.Value) -> list[int] | None:
    """Sum of the pads of an axis for SAME_*: as many windows as strides fit into the input."""
    totals = []
    for size, s, e in zip(x.shape.dims[2:], window.strides, window.extent):
        if e is not None and s == 1:
            totals.append(e - 1)
        elif e is not None and isinstance(size, int):
            totals.append(max(0, (-(-size // s) - 1) * s + e - size))
        else:
            return None
    return totals


def _same_pads_at_run_time(op, node: ir.Node, window: Window, x: ir.Value, upper: bool):
    size, s = op.Shape(x, start=2), np.array(window.strides, np.int64)
    if None in window.extent:
        kernel = op.Shape(node.inputs[1], start=2)
        extent = op.Add(op.Mul(op.Sub(kernel, 1), np.array(window.dilations, np.int64)), 1)
    else:
        extent = op.const(np.array(window.extent, np.int64))
    windows = op.Div(op.Add(size, s - 1), s)
    total = op.Max(op.Sub(op.Add(op.Mul(op.Sub(windows, 1), s), extent), size), np.zeros(1, np.int64))
    small = op.Div(total, 2)
    large = op.Sub(total, small)
    return (small, large) if upper else (large, small)


def _refuse_open_pads(node: ir.Node, window: Window, x: ir.Value) -> None:
    """SAME_* of a stride two or more above the kernel: ONNX clips its negative pads at 0, ONNX Runtime does not.

    And where a pool has dilations, which ONNX Runtime does not count; MaxPool itself says where its maxima are.
    """
    if pads_without_dilations(node) and node.op_type != "MaxPool":
        raise GradientError(
            f"node {node.name!r}: auto_pad={attribute(node, 'auto_pad', None)!r} with dilations {list(window.dilations)} and "
            f"strides {list(window.strides)} is read differently by runtimes; give explicit pads"
        )
    for size, s, e in zip(x.shape.dims[2:], window.strides, window.extent):
        if e is not None and e < s - 1 and not (isinstance(size, int) and (-(-size // s) - 1) * s + e - size >= -1):
            raise GradientError(
                f"node {node.name!r}: auto_pad={attribute(node, 'auto_pad', None)!r} with a kernel of {e} and a "
                f"stride of {s} would need negative pads, which runtimes read differently; give explicit pads"
            )


def transposed_window(op, node: ir.Node, x: ir.Value, w: ir.Value) -> Window:
    """The window of a ConvTranspose: of the Conv that its output would go through to give its input."""
    dims = rank(node, x) - 2
    strides = tuple(attribute(node, "strides", None) or [1] * dims)
    dilations = tuple(attribute(node, "dilations", None) or [1] * dims)
    window = Window(kernel_of(node, w), strides, dilations, (0,) * dims, (0,) * dims)
    mode = attribute(node, "auto_pad", "NOTSET")
    output = attribute(node, "output_shape", None)
    extra = attribute(node, "output_padding", None) or [0] * dims
    if not output and mode in ("NOTSET", "VALID"):
        pads = (mode == "NOTSET" and attribute(node, "pads", None)) or [0] * 2 * dims
        return replace(window, begin=tuple(pads[:dims]), end=tuple(pads[dims:]))
    begin, end = [], []
    for axis, (s, e, extra_size) in enumerate(zip(strides, window.extent, extra)):
        size = x.shape[axis + 2]
        if e is None or (output and not isinstance(size, int)):
            raise GradientError(
                f"the gradient of ConvTranspose node {node.name!r} with output_shape or auto_pad needs the sizes of "
                f"its input and kernel while the graph is built; they are {x.shape} and {w.shape}"
            )
        total = s * (size - 1) + extra_size + e - output[-dims:][axis] if output else extra_size + e - s
        total = max(0, total)
        begin.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        end.append(total - begin[-1])
    return replace(window, begin=tuple(begin), end=tuple(end))


# -- gradients ------------------------------------------------------------------------------


def transposed(op, dy: ir.Value, w: ir.Value, x: ir.Value, window: Window, group: int) -> ir.Value:
    """The gradient of Conv(x, w) for x: a ConvTranspose cut to the size of x.

    Pads that differ between begin and end become a Slice, because CUDA has no such ConvTranspose.
    """
    unread = window.unread(x, dy)
    if unread is None:  # room for what a stride may have left unread, then cut at run time
        room = [s - 1 for s in window.strides]
        full = op.ConvTranspose(dy, w, output_padding=room, **_attributes(window, group))
        return cropped(op, full, window.begin, x)
    if len(window.strides) == 3 and not window.pointwise and static_dims(w) is not None:
        if window[1:].pointwise and window.strides[1:] == (1, 1):
            return op.reshape_as(_transposed_along_depth(op, dy, w, window, unread, group), x)
        if window.strides[0] == 1 and _has_large_planes(dy):
            return op.reshape_as(_transposed_in_planes(op, dy, w, window, unread, group), x)
    return shaped(_transposed(op, dy, w, window, unread, group), x)


def _has_large_planes(dy: ir.Value) -> bool:
    """Whether the planes of volumes, where that is known, are large enough for products of each to be fast."""
    height, width = dy.shape.dims[3:]
    return not isinstance(height, int) or not isinstance(width, int) or height * width >= SMALLEST_PLANE


def _transposed(op, dy, w, window, unread, group):
    """`transposed`, where it is known how many positions no window reads."""
    if window.pointwise and group == 1 and all(s == 1 for s in window.strides):
        return op.Conv(dy, op.Transpose(w, perm=[1, 0, *range(2, len(w.shape))]))  # half the time
    attributes = _attributes(window, group)
    if window.begin == window.end and min(unread) >= 0:
        padding = list(unread) if any(unread) else None
        return op.ConvTranspose(dy, w, pads=[*window.begin, *window.end], output_padding=padding, **attributes)
    beyond = [max(0, r - q) for r, q in zip(unread, window.end)]
    full = op.ConvTranspose(dy, w, output_padding=beyond if any(beyond) else None, **attributes)
    ends = [r - q if q > r else TO_THE_END for r, q in zip(unread, window.end)]
    return op.Slice(full, ints(window.begin), ints(ends), spatial_axes(dy))


def _transposed_along_depth(op, dy, w, window, unread, group):
    """`transposed` of volumes as images, with a plane in each row."""
    rows = reshape(op, dy, *sizes(dy, 0, 1, 2), -1)  # [batch, out, depth, height * width]
    return _transposed(op, rows, op.Reshape(w, [*static_dims(w)[:3], 1]), window[:2], unread[:2], group)


def _transposed_in_planes(op, dy, w, window, unread, group):
    """`transposed` of volumes as batches of planes, with the taps in depth as channels, moved to their depth and summed.

    ONNX Runtime's ConvTranspose adds planes up by rows, volumes number by number; and planes can be in blocks.
    """
    out, channels, depth, *kernel = static_dims(w)
    planes = reshape(op, op.Transpose(dy, perm=[0, 2, 1, 3, 4]), -1, *sizes(dy, 1, 3, 4))  # [batch * depth, out, ...]
    flat_w = op.Reshape(w, [out, channels * depth, *kernel])
    taps = _transposed(op, planes, flat_w, window[1:], unread[1:], group)
    known = all(isinstance(size, int) for size in taps.shape.dims[2:])  # of nothing there is no telling what -1 is
    pixels = math.prod(taps.shape.dims[2:]) if known else -1
    # [batch, depth, in, tap, height * width]
    taps = reshape(op, taps, *sizes(dy, 0, 2), channels * group, depth, pixels)
    reach, begin, end = window.extent[0] - 1, window.begin[0], window.end[0]
    before, behind = max(0, reach - begin), max(0, reach - end)
    if before or behind:
        taps = op.Pad(taps, ints([0, before, 0, 0, 0, 0, behind, 0, 0, 0]))
    moved = []
    for tap in range(depth):
        offset = tap * window.dilations[0]
        unused = behind + end - (reach - offset)
        ends = [-unused if unused else TO_THE_END, tap + 1]
        moved.append(op.Slice(taps, ints([before + begin - offset, tap]), ints(ends), ints([1, 3])))
    return op.Transpose(op.Sum(*moved), perm=[0, 2, 1, 3, 4])  # [batch, in, depth, 1, height * width]


def _attributes(window: Window, group: int) -> dict:
    return dict(group=group, strides=list(window.strides), dilations=list(window.dilations))
