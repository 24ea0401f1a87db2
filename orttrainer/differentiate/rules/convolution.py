"""Convolutions: Conv, ConvTranspose, and the sliding window that pooling shares with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import attribute, join, rank, shaped
from orttrainer.errors import GradientError
from orttrainer.graph.builder import static_dims

LARGE = 8 << 20  # bytes of an intermediate that is no longer worth its speed
SMALLEST_PLANE = 16  # positions
FEWER = 4  # times less to unfold, from which on the weight gradient with exchanged roles is faster
TO_THE_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Window:
    """How a kernel slides over an input; one entry per spatial axis.

    `kernel` holds None where the size is only known at run time; `begin` and `end` are the pads.
    """

    kernel: tuple[int | None, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def extent(self) -> tuple[int | None, ...]:
        """Size of the dilated kernel: (k - 1) * d + 1."""
        return tuple(None if k is None else (k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations))

    def __getitem__(self, axes: slice) -> Window:
        """The window along some of its axes."""
        return Window(*(getattr(self, field.name)[axes] for field in fields(self)))

    @property
    def pointwise(self) -> bool:
        """Whether the kernel is a matrix, without pads; strides there may be."""
        return all(k == 1 for k in self.kernel) and not any(self.begin + self.end)

    def unread(self, x: ir.Value, y: ir.Value) -> tuple[int, ...] | None:
        """How many of the last positions of the padded input no window reaches; None if not known.

        Negative where the last window hangs over the end (ceil_mode).
        """
        left = []
        for axis, (s, e, p, q) in enumerate(zip(self.strides, self.extent, self.begin, self.end), start=2):
            size, windows = x.shape[axis], y.shape[axis]
            if isinstance(size, int) and isinstance(windows, int) and e is not None:
                left.append(size + p + q - e - s * (windows - 1))
            elif s == 1:
                left.append(0)
            else:
                return None
        return tuple(left)


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
    window = _transposed_window(op, node, x, w)
    dx = op.Conv(
        dy, w, group=group, strides=list(window.strides), dilations=list(window.dilations),
        pads=[*window.begin, *window.end],
    )  # fmt: skip
    dx = _cropped(op, dx, [0] * len(window.strides), x)  # an output_padding of a stride or more makes it longer
    dw = weight_gradient(op, dy, x, w, window, group)
    return (dx, dw, channel_sum(op, dy))[: len(node.inputs)]


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
    _refuse_negative_pads(node, window, x)
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
    return dx if begin is None else _cropped(op, dx, begin, x)


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


def _refuse_negative_pads(node: ir.Node, window: Window, x: ir.Value) -> None:
    """SAME_* of a stride two or more above the kernel: ONNX clips its negative pads at 0, ONNX Runtime does not."""
    for size, s, e in zip(x.shape.dims[2:], window.strides, window.extent):
        if e is not None and e < s - 1 and not (isinstance(size, int) and (-(-size // s) - 1) * s + e - size >= -1):
            raise GradientError(
                f"node {node.name!r}: auto_pad={attribute(node, 'auto_pad', None)!r} with a kernel of {e} and a "
                f"stride of {s} would need negative pads, which runtimes read differently; give explicit pads"
            )


def _transposed_window(op, node: ir.Node, x: ir.Value, w: ir.Value) -> Window:
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
        return _cropped(op, full, window.begin, x)
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
    return op.Slice(full, _ints(window.begin), _ints(ends), _spatial(dy))


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
    taps = reshape(op, taps, *sizes(dy, 0, 2), channels * group, depth, -1)  # [batch, depth, in, tap, height * width]
    reach, begin, end = window.extent[0] - 1, window.begin[0], window.end[0]
    before, behind = max(0, reach - begin), max(0, reach - end)
    if before or behind:
        taps = op.Pad(taps, _ints([0, before, 0, 0, 0, 0, behind, 0, 0, 0]))
    moved = []
    for tap in range(depth):
        offset = tap * window.dilations[0]
        unused = behind + end - (reach - offset)
        ends = [-unused if unused else TO_THE_END, tap + 1]
        moved.append(op.Slice(taps, _ints([before + begin - offset, tap]), _ints(ends), _ints([1, 3])))
    return op.Transpose(op.Sum(*moved), perm=[0, 2, 1, 3, 4])  # [batch, in, depth, 1, height * width]


def _attributes(window: Window, group: int) -> dict:
    return dict(group=group, strides=list(window.strides), dilations=list(window.dilations))


def weight_gradient(op, x: ir.Value, dy: ir.Value, w: ir.Value, window: Window, group: int) -> ir.Value:
    """dW[o,c,k] = sum over n and i of dY[n,o,i] X[n,c,s*i+d*k-p], in the shape of w."""
    channels = w.shape[1] if isinstance(w.shape[1], int) else None
    unread = window.unread(x, dy)
    if window.pointwise and group == 1 and _fits(dy, w):
        return _pointwise_weight_gradient(op, _every(op, x, window.strides), dy, w)
    depthwise = group > 1 and channels == 1
    known = channels is not None and unread is not None and None not in window.kernel
    if known and not depthwise and not _reads_pads_alone(x, window, unread):
        if group == 1 and _pays_exchanged(x, dy, w, window):
            return shaped(_exchanged_weight_gradient(op, x, dy, w, window), w)
        return shaped(_interleaved_weight_gradient(op, x, dy, w, window, group, channels, unread), w)
    return _plain_weight_gradient(op, x, dy, w, window, group)


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


def _every(op, x: ir.Value, strides: tuple[int, ...]) -> ir.Value:
    """Every so many-th pixel of x, from the first one on."""
    dims = len(strides)
    if all(s == 1 for s in strides):
        return x
    if x.dtype == ir.DataType.FLOAT and dims <= 3:  # half the time of a Slice with steps
        return op.AveragePool(x, kernel_shape=[1] * dims, strides=list(strides))
    return op.Slice(x, _ints([0] * dims), _ints([TO_THE_END] * dims), _spatial(x), _ints(strides))


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
        x = op.Slice(x, _ints([0] * dims), _ints([q if q < 0 else TO_THE_END for q in end]), _spatial(x))
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
        kernel, spatial = op.Unsqueeze(kernel, _ints([dims + 2])), [*spatial, channels]
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
        taps = op.Slice(taps, [0], _ints([TO_THE_END]), [dims], _ints([window.dilations[-1]]))
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
    return op.Slice(taps, _ints([-1] * dims), _ints([-TO_THE_END] * dims), _spatial(taps), _ints([-1] * dims))


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
    return _cropped(op, dw, [0] * dims, w)  # what a stride left unread makes it longer than the kernel


# -- shapes ---------------------------------------------------------------------------------


def channel_sum(op, dy: ir.Value) -> ir.Value:
    """The sum over every axis but the channels."""
    return op.ReduceSum(dy, [0, *range(2, len(dy.shape))], keepdims=0)


def ranked(node: ir.Node, dy: ir.Value, x: ir.Value) -> ir.Value:
    """`dy`, now known to have as many axes as x: ONNX infers no rank where the kernel's size is symbolic."""
    if dy.shape is None:
        dy.shape = ir.Shape([None] * rank(node, x))
    return dy


def sizes(x: ir.Value, *axes: int) -> list:
    """Sizes of axes of x for `reshape`: numbers where they are known, else (value, axis, factor)."""
    return [x.shape[axis] if isinstance(x.shape[axis], int) else (x, axis, 1) for axis in axes]


def times(size, factor: int):
    """A size of `sizes`, multiplied."""
    return size * factor if isinstance(size, int) else (size[0], size[1], size[2] * factor)


def reshape(op, x: ir.Value, *dims) -> ir.Value:
    """Reshape to known sizes, at most one -1, and sizes of `sizes`; Shape nodes only where they are needed."""
    unknown = [i for i, d in enumerate(dims) if not isinstance(d, int)]
    if not unknown or (len(unknown) == 1 and -1 not in dims):
        return op.Reshape(x, _ints(-1 if i in unknown else d for i, d in enumerate(dims)))
    parts = [op.const(_ints([d])) if isinstance(d, int) else _run_time_size(op, *d) for d in dims]
    return op.Reshape(x, op.Concat(*parts, axis=0))


def _run_time_size(op, value, axis, factor):
    size = op.dim(value, axis)
    return size if factor == 1 else op.Mul(size, _ints([factor]))


def _cropped(op, value: ir.Value, begin, like: ir.Value) -> ir.Value:
    """The part of `value` from `begin` on that has the spatial size of `like`."""
    dims = len(like.shape) - 2
    static = not isinstance(begin, ir.Value)
    if static and not any(begin) and static_dims(like) is not None and static_dims(value) == static_dims(like):
        return value
    if static and all(isinstance(d, int) for d in like.shape.dims[2:]):
        ends = _ints([b + d for b, d in zip(begin, like.shape.dims[2:])])
    else:
        size = op.Shape(like, start=2)
        ends = size if static and not any(begin) else op.Add(size, _ints(begin) if static else begin)
    starts = _ints(begin) if static else begin
    return shaped(op.Slice(value, starts, ends, _ints(range(2, dims + 2))), like)


def _spatial(x: ir.Value) -> np.ndarray:
    return _ints(range(2, len(x.shape)))


def _ints(values) -> np.ndarray:
    return np.array(list(values), np.int64)
