"""The gradient of a convolution for its weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.tools import join, shaped
from orttrainer.differentiate.rules.unfold import taps_weight_gradient
from orttrainer.differentiate.rules.windows import (
    TO_THE_END,
    Window,
    cropped,
    ints,
    reshape,
    sizes,
    spatial_axes,
    times,
)
from orttrainer.graph.builder import static_dims
from orttrainer.graph.sizes import given_sizes, may_be_zero

LARGE = 8 << 20  # bytes of an intermediate that is no longer worth its speed
FEW_PIXELS = 16  # of an image, up to which they are moved to one product of all images in less time than is saved
FEWER = 4  # times less to unfold, from which on the weight gradient with exchanged roles is faster


def weight_gradient(op, x: ir.Value, dy: ir.Value, w: ir.Value, window: Window, group: int) -> ir.Value:
    """dW[o,c,k] = sum over n and i of dY[n,o,i] X[n,c,s*i+d*k-p], in the shape of w.

    Where there may be no images at all, as of those that forward chooses, both get one more, of zeros: without any, the
    forms below do not hold, and ONNX Runtime never ends a convolution of no channels with dilations (seen in 1.31.1).
    """
    if may_be_zero(x.shape[0], given_sizes(op.graph)):
        x, dy = (op.Pad(v, ints([0] * len(v.shape) + [1] + [0] * (len(v.shape) - 1))) for v in (x, dy))
    if in_products(w):
        return taps_weight_gradient(op, x, dy, w, window, group)
    channels = w.shape[1] if isinstance(w.shape[1], int) else None
    unread = window.unread(x, dy)
    if window.pointwise and group == 1:
        if _are_small(dy):
            return _product_of_all_images(op, _every(op, x, window.strides), dy, w)
        if _fits(dy, w):
            return _pointwise_weight_gradient(op, _every(op, x, window.strides), dy, w)
    depthwise = group > 1 and channels == 1
    known = channels is not None and unread is not None and None not in window.kernel
    if known and not depthwise and not _reads_pads_alone(x, window, unread):
        if group == 1 and _pays_exchanged(x, dy, w, window):
            return shaped(_exchanged_weight_gradient(op, x, dy, w, window), w)
        return shaped(_interleaved_weight_gradient(op, x, dy, w, window, group, channels, unread), w)
    return _plain_weight_gradient(op, x, dy, w, window, group)


def in_products(w: ir.Value) -> bool:
    """Whether ONNX Runtime cannot convolve with what the forms below take for a kernel: it has no kernels of float64."""
    return w.dtype == ir.DataType.DOUBLE and static_dims(w) is not None


def _reads_pads_alone(x, window, unread) -> bool:
    """Whether all windows along some axis lie in the pads before x."""
    sizes_of_x = x.shape.dims[2:]
    return any(isinstance(n, int) and r - q >= n for n, r, q in zip(sizes_of_x, unread, window.end))


def _pointwise_weight_gradient(op, x, dy, w):
    """A 1x1 kernel is a matrix: dW = sum over n of dY[n] @ X[n]^T."""
    flat_x, flat_dy = reshape(op, x, *sizes(x, 0, 1), -1), reshape(op, dy, *sizes(dy, 0, 1), -1)
    products = op.MatMul(flat_dy, op.Transpose(flat_x, perm=[0, 2, 1]))  # [batch, out, in]
    if w.dtype == ir.DataType.FLOAT:  # a sum over the first axis has one thread
        ones = op.ConstantOfShape(join(op, 1, op.dim(dy, 0)), value=ir.tensor(np.ones(1, np.float32)))
        return op.reshape_as(op.MatMul(ones, reshape(op, products, *sizes(dy, 0), -1)), w)
    return op.reshape_as(op.ReduceSum(products, [0], keepdims=0), w)


def _product_of_all_images(op, x, dy, w):
    """The same where images are small: the product of each would be as long as the sum over all of them."""
    spatial = range(2, len(dy.shape))
    rows = reshape(op, op.Transpose(dy, perm=[1, 0, *spatial]), *sizes(dy, 1), -1)
    columns = reshape(op, op.Transpose(x, perm=[0, *spatial, 1]), -1, *sizes(x, 1))
    return op.reshape_as(op.MatMul(rows, columns), w)


def _every(op, x: ir.Value, strides: tuple[int, ...]) -> ir.Value:
    """Every so many-th pixel of x, from the first one on."""
    dims = len(strides)
    if all(s == 1 for s in strides):
        return x
    if x.dtype == ir.DataType.FLOAT and dims <= 3:  # half the time of a Slice with steps
        return op.AveragePool(x, kernel_shape=[1] * dims, strides=list(strides))
    return op.Slice(x, ints([0] * dims), ints([TO_THE_END] * dims), spatial_axes(x), ints(strides))


def _interleaved_weight_gradient(op, x, dy, w, window, group, channels, unread):
    """A convolution of x with dY as its kernel, where the channels of x lie in its last spatial axis.

    A dilation of (stride * channels) makes the taps step over the channels, so one pass gives
    all of dW and nothing of the size of the unfolded input is ever written. The batch is the
    channel of this convolution; it is cut into `parts` groups, whose results are summed.

    Taps that lie apart are a stride of that convolution, which would skip channels too: these have an axis of
    their own there, and wherever x has but one.
    """
    dims = len(window.strides)
    end = [q - r for q, r in zip(window.end, unread)]
    if min(end) < 0:  # positions that no window reads
        x = op.Slice(x, ints([0] * dims), ints([q if q < 0 else TO_THE_END for q in end]), spatial_axes(x))
        end = [max(0, q) for q in end]
    own_axis = dims == 1 or (dims == 2 and window.dilations[-1] > 1)  # there is no convolution with four
    inner_extent = window.kernel[-1] if own_axis else window.extent[-1]
    parts = _parts(dy, w, inner_extent) if group == 1 else 1
    if group == 1:
        last = op.Transpose(x, perm=[0, *range(2, dims + 2), 1])  # [batch, spatial..., channels]
    else:
        # Two transposes, of whole images of a group and then within them: as one it takes five times as long.
        split = reshape(op, x, *sizes(x, 0), group, -1)
        images = reshape(op, op.Transpose(split, perm=[1, 0, 2]), -1, channels, *sizes(x, *range(2, dims + 2)))
        last = op.Transpose(images, perm=[0, *range(2, dims + 2), 1])  # [group * batch, spatial..., channels]
    kernel, (batch, *spatial) = _batch_as_channels(op, dy, parts), sizes(x, 0, *range(2, dims + 2))
    strides, dilations, begin = list(window.dilations), list(window.strides), list(window.begin)
    if own_axis:
        kernel, spatial = op.Unsqueeze(kernel, ints([dims + 2])), [*spatial, channels]
        strides, dilations, begin, end = [*strides, 1], [*dilations, 1], [*begin, 0], [*end, 0]
    else:
        spatial[-1], strides[-1] = times(spatial[-1], channels), 1
        for inner in (dilations, begin, end):
            inner[-1] *= channels
    rows = reshape(op, last, 1, times(batch, group), *spatial)
    taps = op.Conv(rows, kernel, group=group * parts, strides=strides, dilations=dilations, pads=[*begin, *end])
    if parts > 1:
        taps = op.MatMul(np.ones((1, parts), dy.dtype.numpy()), op.Reshape(taps, [parts, -1]))
    taps = reshape(op, taps, -1, *window.kernel[:-1], inner_extent, channels)
    if inner_extent > window.kernel[-1]:
        taps = op.Slice(taps, [0], ints([TO_THE_END]), [dims], ints([window.dilations[-1]]))
    return op.Transpose(taps, perm=[0, dims + 1, *range(1, dims + 1)])


def _pays_exchanged(x, dy, w, window) -> bool:
    """Whether the roles of x and dY can be exchanged, and dY has so few channels that it pays.

    The product then is as long as x has positions, not dY, and most of what it adds are pads where x has many more:
    with a kernel as large as x, half the speed.
    """
    (outputs, channels), positions = w.shape[:2], [v.shape.dims[2:] for v in (x, dy)]
    new_pads = [e - 1 - p for pads in (window.begin, window.end) for e, p in zip(window.extent, pads)]
    if not isinstance(outputs, int) or any(s > 1 for s in window.strides) or min(new_pads) < 0:
        return False
    known = all(isinstance(size, int) for size in (*positions[0], *positions[1]))
    of_x, of_dy = (int(np.prod(dims)) if known else 1 for dims in positions)
    return FEWER * outputs * of_x**2 <= channels * of_dy**2


def _exchanged_weight_gradient(op, x, dy, w, window):
    """The same with the roles exchanged: dY, with as many pads as x leaves of the extent, and x as its kernel.

    dW[o,c,k] = sum over n and j of dY[n,o,j+p-d*k] X[n,c,j]: the taps come out in reverse. The runtime unfolds what
    stands in the place of x, for one row of a product per channel of the kernel. Where dY has few channels, as at the
    end of a network that makes images, that is less to unfold and for more rows: 64 -> 3, 7 x 7: 13 to 20 -> 2.1 ms.
    """
    dims = len(window.strides)
    begin, end = (tuple(e - 1 - p for e, p in zip(window.extent, pads)) for pads in (window.begin, window.end))
    exchanged = replace(window, begin=begin, end=end)
    taps = _interleaved_weight_gradient(op, dy, x, w, exchanged, 1, w.shape[0], (0,) * dims)
    taps = op.Transpose(taps, perm=[1, 0, *range(2, dims + 2)])
    several = ints([axis for axis, size in enumerate(window.kernel, 2) if size > 1])
    back = np.full(len(several), -1)
    return op.Slice(taps, back, back * TO_THE_END, several, back) if len(several) else taps


def _batch_as_channels(op, dy, parts):
    """dY as a kernel: [parts * out, batch / parts, spatial...]."""
    dims = len(dy.shape) - 2
    if parts == 1:
        return op.Transpose(dy, perm=[1, 0, *range(2, dims + 2)])
    batch, out, *spatial = static_dims(dy)
    split = op.Reshape(dy, [parts, batch // parts, out, -1])
    swapped = split if parts == batch else op.Transpose(split, perm=[0, 2, 1, 3])
    return op.Reshape(swapped, [parts * out, batch // parts, *spatial])


def _parts(dy: ir.Value, w: ir.Value, inner_extent: int) -> int:
    """The largest divisor of the batch whose partial gradients stay small."""
    dims, weights = static_dims(dy), static_dims(w)
    if dims is None or weights is None:
        return 1
    size = int(np.prod(weights[:-1])) * inner_extent * dy.dtype.itemsize
    return next((n for n in range(dims[0], 1, -1) if dims[0] % n == 0 and n * size <= LARGE), 1)


def _are_small(images: ir.Value) -> bool:
    """Whether images have few pixels, as far as is known."""
    pixels = images.shape.dims[2:]
    return all(isinstance(size, int) for size in pixels) and 0 < int(np.prod(pixels)) <= FEW_PIXELS


def _fits(dy: ir.Value, w: ir.Value) -> bool:
    batch = dy.shape[0] if isinstance(dy.shape[0], int) else 32
    weights = static_dims(w)
    return weights is None or batch * int(np.prod(weights)) * dy.dtype.itemsize <= LARGE


def _plain_weight_gradient(op, x, dy, w, window, group):
    """Conv with batch and channels of both operands exchanged; dilations and strides swap. For sizes not known."""
    dims = len(window.strides)
    if group > 1:
        split = reshape(op, x, *sizes(x, 0), group, -1, *sizes(x, *range(2, dims + 2)))
        swapped = op.Transpose(split, perm=[2, 1, 0, *range(3, dims + 3)])  # [channels, group, batch, spatial...]
        x = reshape(op, swapped, -1, times(sizes(x, 0)[0], group), *sizes(x, *range(2, dims + 2)))
    else:
        x = op.Transpose(x, perm=[1, 0, *range(2, dims + 2)])
    taps = op.Conv(
        x, op.Transpose(dy, perm=[1, 0, *range(2, dims + 2)]), group=group, strides=list(window.dilations),
        dilations=list(window.strides), pads=[*window.begin, *window.end],
    )  # fmt: skip
    dw = op.Transpose(taps, perm=[1, 0, *range(2, dims + 2)])
    return cropped(op, dw, [0] * dims, w)  # what a stride left unread makes it longer than the kernel


# -- shapes ---------------------------------------------------------------------------------
