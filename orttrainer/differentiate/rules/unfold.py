"""What the taps of a kernel read, written out, so that products of matrices are convolutions.

ONNX Runtime convolves float32 only. Along one axis after the other, taps are moved beside the channels: of three by three
taps there are six slices, not nine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.tools import positions, shaped
from orttrainer.differentiate.rules.windows import TO_THE_END, Window, channel_sum, ints, reshape, sizes, times

MANY = 32  # taps along an axis, from which on one node gathers them: slower, but the graph stays small


def taps_along(op, x: ir.Value, axis: int, offsets: Sequence[int], stride: int) -> list[ir.Value]:
    """For each of the offsets, which go from 0 up or down to 0, what a tap there reads in all windows."""
    if len(offsets) == 1 and stride == 1:
        return [x]
    last = max(offsets)
    ends = [at - last if at < last else TO_THE_END for at in offsets]
    return [op.Slice(x, [at], [end], [axis], [stride]) for at, end in zip(offsets, ends)]


def all_taps(op, x: ir.Value, offsets: Sequence[Sequence[int]], strides: Sequence[int]) -> Iterator[ir.Value]:
    """What each tap of the kernel reads along the last axes, which are images or more, one tap after the other."""
    if not offsets:
        yield x
        return
    for tap in taps_along(op, x, len(x.shape) - len(offsets), offsets[0], strides[0]):
        yield from all_taps(op, tap, offsets[1:], strides[1:])


def is_depthwise(w: ir.Value, group: int) -> bool:
    """Whether each channel has a small kernel of its own."""
    out, channels, *kernel = w.shape.dims
    return out == group and channels == 1 and math.prod(kernel) <= 2 * MANY


def gathered_along(op, x: ir.Value, axis: int, offsets: Sequence[int], stride: int) -> ir.Value:
    """The same as one value, the taps on an axis of their own before the windows."""
    room = max(offsets) + 1
    if isinstance(size := x.shape[axis], int):
        return op.Gather(x, ints(offsets)[:, None] + ints(range(0, size - room + 1, stride)), axis=axis)
    count = op.Add(op.Div(op.Sub(op.dim(x, axis), np.int64(room)), np.int64(stride)), np.int64(1))
    first = op.Mul(positions(op, count), np.int64(stride))
    return op.Gather(x, op.Add(op.Unsqueeze(first, [0]), ints(offsets)[:, None]), axis=axis)


def unfolded(op, x: ir.Value, axis: int, offsets: Sequence[int], stride: int, channels: int) -> ir.Value:
    """[.., channels, .., length, ..] -> [.., taps * channels, .., windows, ..], tap by tap."""
    if len(offsets) < MANY:
        taps = taps_along(op, x, axis, offsets, stride)
        return taps[0] if len(taps) == 1 else op.Concat(*taps, axis=channels)
    taps = gathered_along(op, x, axis, offsets, stride)
    axes = [i for i in range(len(taps.shape)) if i != axis]
    axes.insert(channels, axis)
    taps = op.Transpose(taps, perm=axes)
    before, behind = range(channels), range(channels + 2, len(axes))
    merged = times(*sizes(taps, channels + 1), len(offsets))
    return reshape(op, taps, *sizes(taps, *before), merged, *sizes(taps, *behind))


def windows_of_images(op, x: ir.Value, offsets: Sequence[Sequence[int]], strides: Sequence[int]) -> ir.Value:
    """[batch, channels, sizes...] -> [batch, channels, taps along each axis..., windows along each axis...]."""
    for each, stride in reversed([*zip(offsets, strides)]):  # with each axis of taps the next one of sizes comes there
        taps = [op.Unsqueeze(tap, [2]) for tap in taps_along(op, x, 1 + len(offsets), each, stride)]
        x = taps[0] if len(taps) == 1 else op.Concat(*taps, axis=2)
    return x


def padded(op, x: ir.Value, begin: Sequence[int], end: Sequence[int], first: int = 2) -> ir.Value:
    """`x` with zeros around as many axes, from `first` on, as there are numbers; cut where one is negative."""
    if any(n < 0 for n in (*begin, *end)):
        ends = [n if n < 0 else TO_THE_END for n in end]
        x = op.Slice(x, ints(max(0, -n) for n in begin), ints(ends), ints(range(first, first + len(begin))))
    if not any(n > 0 for n in (*begin, *end)):
        return x
    front, rest = [0] * first, [0] * (len(x.shape) - first - len(begin))
    return op.Pad(x, ints(n for pads in (begin, end) for n in (*front, *(max(0, m) for m in pads), *rest)))


def offsets_of(window: Window, axis: int) -> list[int]:
    """Where along an axis the taps of a window lie."""
    return [k * window.dilations[axis] for k in range(window.kernel[axis])]


def taps_weight_gradient(op, x: ir.Value, dy: ir.Value, w: ir.Value, window: Window, group: int) -> ir.Value:
    """dW[:, :, k] = dY X_k^T over all images and windows, where X_k is what tap k reads; of a w of known sizes.

    There is a product for each tap along the first axis, and of these one is written out after the other: that takes as
    long as one product for all, and a third of its memory.
    """
    front, dims = int(group > 1), len(window.strides)
    offsets = [offsets_of(window, axis) for axis in range(dims)]
    unread = window.unread(x, dy) or [0] * dims  # of a stride or more, and there would be another window
    end = [q - n // s * s for q, n, s in zip(window.end, unread, window.strides)]
    if is_depthwise(w, group):
        taps = all_taps(op, padded(op, x, window.begin, end), offsets, window.strides)
        sums = [op.Unsqueeze(channel_sum(op, op.Mul(tap, dy)), [1]) for tap in taps]
        return op.reshape_as(op.Concat(*sums, axis=1), w)
    out, channels = w.shape[0] // group, w.shape[1]
    x = padded(op, op.Transpose(x, perm=[1, 0, *range(2, 2 + dims)]), window.begin, end)
    rows = reshape(op, op.Transpose(dy, perm=[1, 0, *range(2, 2 + dims)]), *([group] * front), out, -1)
    if front:  # [group, channels, batch, spatial...]
        x = reshape(op, x, group, channels, *sizes(x, *range(1, 2 + dims)))
    at_once = window.kernel[0] >= MANY
    for axis in reversed(range(0 if at_once else 1, dims)):
        x = unfolded(op, x, front + 2 + axis, offsets[axis], window.strides[axis], front)
    taps = [x] if at_once else taps_along(op, x, front + 2, offsets[0], window.strides[0])
    products = [op.Unsqueeze(_product(op, rows, tap, front), [front + 1]) for tap in taps]
    dw = products[0] if len(products) == 1 else op.Concat(*products, axis=front + 1)
    dw = op.Reshape(dw, ints([group * out, *window.kernel, channels]))
    return shaped(op.Transpose(dw, perm=[0, dims + 1, *range(1, dims + 1)]), w)


def _product(op, rows: ir.Value, tap: ir.Value, front: int) -> ir.Value:
    """rows tap^T: [group, out, taps * channels]."""
    columns = reshape(op, tap, *sizes(tap, *range(front + 1)), -1)
    if not front:
        return op.Gemm(rows, columns, transB=1)
    return op.MatMul(rows, op.Transpose(columns, perm=[0, 2, 1]))
