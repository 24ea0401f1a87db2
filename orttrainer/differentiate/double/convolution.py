"""Conv and ConvTranspose as products of matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.convolution import kernel_of, sliding, transposed_window
from orttrainer.differentiate.rules.tools import attribute, operand
from orttrainer.differentiate.rules.unfold import all_taps, is_depthwise, offsets_of, padded, unfolded
from orttrainer.differentiate.rules.windows import Window, ints, reshape, sizes, times
from orttrainer.errors import GradientError
from orttrainer.graph.builder import static_dims
from orttrainer.graph.sizes import given_sizes, may_be_zero

__all__ = ["FORMS"]


def conv(op, node: ir.Node) -> ir.Value | None:
    """Y[n] = W X_n + B, where X_n has a row for each tap of each channel, and a column for each window."""
    x, w = node.inputs[:2]
    if x.shape is None or static_dims(w) is None:
        return None
    window, x, _ = sliding(op, node, x, kernel_of(node, w))
    group, (out, channels, *kernel) = attribute(node, "group", 1), static_dims(w)
    images = padded(op, x, window.begin, window.end)
    offsets = [offsets_of(window, axis) for axis in range(len(kernel))]
    if is_depthwise(w, group):
        return _biased(op, _of_each_channel(op, images, w, offsets, window.strides), operand(node, 2))
    spatial = range(2, 2 + len(kernel))
    rows = op.Reshape(op.Transpose(w, perm=[0, *spatial, 1]), ints([*_groups(group), out // group, -1]))
    taps = _unfolded(op, images, channels, group, offsets, window.strides)
    y = reshape(op, _product(op, rows, taps, x, group), *sizes(x, 0), out, *sizes(taps, *spatial))
    return _biased(op, y, operand(node, 2))


def conv_transpose(op, node: ir.Node) -> ir.Value | None:
    """A convolution without strides for each place of a stride; what they give lies next to each other."""
    x, w = node.inputs[:2]
    if x.shape is None or static_dims(w) is None:
        return None
    try:
        window = transposed_window(op, node, x, w)
    except GradientError:  # of sizes that are known at run time only
        return None
    group, dims = attribute(node, "group", 1), len(window.strides)
    axes = [_axis(window[axis : axis + 1], extra) for axis, extra in enumerate(_output_padding(node, window, x))]
    spatial, channels, out = range(2, 2 + dims), w.shape[0] // group, w.shape[1]
    images = padded(op, x, [axis.before for axis in axes], [axis.behind for axis in axes])
    offsets = [axis.offsets for axis in axes]
    if is_depthwise(w, group) and math.prod(window.strides) == 1:
        return _biased(op, _of_each_channel(op, images, w, offsets, window.strides), operand(node, 2))
    taps = _unfolded(op, images, channels, group, offsets, [1] * dims)
    y = _product(op, _kernels_of_places(op, w, axes, window.kernel, group), taps, x, group)
    if math.prod(window.strides) > 1:
        y = reshape(op, y, -1, *window.strides, out, *sizes(taps, *spatial))
        pairs = [place for axis in range(dims) for place in (2 + dims + axis, 1 + axis)]
        y = op.Transpose(y, perm=[0, 1 + dims, *pairs])  # [batch * group, out, windows, places, ...]
    lengths = [times(size, stride) for size, stride in zip(sizes(taps, *spatial), window.strides)]
    y = reshape(op, y, *sizes(x, 0), out * group, *lengths)
    y = padded(op, y, [-axis.first for axis in axes], [-axis.last for axis in axes])
    return _biased(op, y, operand(node, 2))


# -- products -------------------------------------------------------------------------------


def _groups(group: int) -> list[int]:
    return [group] if group > 1 else []


def _unfolded(op, x: ir.Value, channels: int, group: int, offsets: Sequence[Sequence[int]], strides: Sequence[int]):
    """What all taps read: [batch * group, taps * channels, windows...]."""
    if group > 1:
        x = reshape(op, x, -1, channels, *sizes(x, *range(2, 2 + len(strides))))
    for axis in reversed(range(len(strides))):
        x = unfolded(op, x, 2 + axis, offsets[axis], strides[axis], 1)
    return x


def _product(op, rows: ir.Value, taps: ir.Value, x: ir.Value, group: int) -> ir.Value:
    """The kernels, as rows, times the taps of each image of x: [batch, group, kernels, windows]."""
    windows = taps.shape.dims[2:]
    count = math.prod(windows) if all(isinstance(size, int) for size in windows) else -1
    return op.MatMul(rows, reshape(op, taps, *sizes(x, 0), *_groups(group), *sizes(taps, 1), count))


def _of_each_channel(
    op, x: ir.Value, w: ir.Value, offsets: Sequence[Sequence[int]], strides: Sequence[int]
) -> ir.Value:
    """The sum of what the taps read, each times its weight of the channel: products of matrices of one row are slow."""
    dims = len(strides)
    weights = op.Reshape(op.Transpose(w, perm=[*range(2, 2 + dims), 0, 1]), ints([-1, w.shape[0], *[1] * dims]))
    taps = all_taps(op, x, offsets, strides)
    return functools.reduce(op.Add, (op.Mul(tap, op.Gather(weights, np.int64(k))) for k, tap in enumerate(taps)))


def _biased(op, y: ir.Value, bias: ir.Value | None) -> ir.Value:
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, list(range(1, len(y.shape) - 1))))


# -- strides of a ConvTranspose -------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """One axis of a ConvTranspose, whose output has `stride` places for each number of the input.

    Args:
        taps: for each place, and each shift of the input, the tap of the kernel that is read there, or -1.
        offsets: of the shifts, in the padded input.
        before, behind: pads of the input; negative where it is cut.
        first, last: how many numbers the result has too many at its ends.
    """

    taps: np.ndarray
    offsets: list[int]
    before: int
    behind: int
    first: int
    last: int


def _axis(window: Window, extra: int) -> _Axis:
    """y[stride * (i + shift) + place] += w[tap] x[i], where stride * shift + place = dilation * tap."""
    ((kernel, stride, dilation, begin, end),) = zip(
        window.kernel, window.strides, window.dilations, window.begin, window.end
    )
    shift, place = np.divmod(np.arange(kernel) * dilation, stride)
    shifts, reach = sorted(set(shift.tolist())), int(shift[-1])
    taps = np.full((stride, len(shifts)), -1)
    taps[place, np.searchsorted(shifts, shift)] = np.arange(kernel)
    length = (kernel - 1) * dilation + 1 + extra  # what the last number of the input reaches
    rows = max(reach, -(-length // stride) - 1)
    last = stride * (rows + 1) - length + end
    before, behind = reach - begin // stride, rows - last // stride
    return _Axis(taps, [reach - n for n in shifts], before, behind, begin % stride, last % stride)


def _output_padding(node: ir.Node, window: Window, x: ir.Value) -> list[int]:
    """How many numbers there are behind what the last one of the input reaches, along each axis."""
    dims = len(window.strides)
    output = attribute(node, "output_shape", None)
    if not output:
        return attribute(node, "output_padding", None) or [0] * dims
    whole = [s * (n - 1) + e for s, n, e in zip(window.strides, x.shape.dims[2:], window.extent)]
    pads = map(sum, zip(window.begin, window.end))
    return [size + pad - all_of_it for size, pad, all_of_it in zip(output[-dims:], pads, whole)]


def _kernels_of_places(op, w: ir.Value, axes: Sequence[_Axis], kernel: Sequence[int], group: int) -> ir.Value:
    """[group, places * out, shifts * channels] of w [channels, out, kernel...], 0 where there is no tap."""
    dims, total, out = len(axes), math.prod(kernel), w.shape[1]
    index, missing = np.zeros([n for axis in axes for n in axis.taps.shape], np.int64), False
    for number, (axis, count) in enumerate(zip(axes, kernel)):
        tap = axis.taps.reshape([n if at == number else 1 for at in range(dims) for n in axis.taps.shape])
        index, missing = index * count + tap, missing | (tap < 0)
    index = np.where(missing, total, index).transpose([*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)])
    places, shifts = math.prod(index.shape[:dims]), math.prod(index.shape[dims:])
    flat = op.Reshape(w, ints([group, w.shape[0] // group, out, total]))
    if np.any(missing):
        flat = op.Pad(flat, ints([0] * 7 + [1]))
    if not np.array_equal(index.reshape(-1), np.arange(total)):
        flat = op.Gather(flat, index.reshape(-1), axis=3)
    flat = op.Transpose(op.Reshape(flat, ints([group, 0, out, places, shifts])), perm=[0, 3, 2, 4, 1])
    return op.Reshape(flat, ints([*_groups(group), places * out, -1]))


def _with_an_image(form):
    """The same; where there may be no images it works on one more, of zeros: products of a kernel with none there are not."""

    def written(op, node: ir.Node) -> ir.Value | None:
        x = node.inputs[0]
        if x.shape is None or not may_be_zero(x.shape[0], given_sizes(op.graph)):
            return form(op, node)
        node.replace_input_with(0, op.Pad(x, ints([0] * len(x.shape) + [1] + [0] * (len(x.shape) - 1))))
        if (y := form(op, node)) is None:
            node.replace_input_with(0, x)
        return y and op.Slice(y, [0], [-1], [0])

    return written


FORMS = {"Conv": _with_an_image(conv), "ConvTranspose": _with_an_image(conv_transpose)}
