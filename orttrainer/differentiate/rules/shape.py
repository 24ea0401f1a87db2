"""Operators that move, repeat, cut or pad: each is linear, and its rule is the transposed map."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import non_differentiable, vjp
from orttrainer.differentiate.rules.tools import (
    along,
    attribute,
    axis_of,
    constant,
    join,
    operand,
    positions,
    rank,
    scatter_along,
    shaped,
    widened,
)
from orttrainer.differentiate.rules.unfold import MANY, windows_of_images
from orttrainer.errors import GradientError

WIDEST_FRAME = 256  # what a padding repeats, and its copies; a wider one is no small product

non_differentiable("Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
non_differentiable("Shape", "Size", "ConstantOfShape", "EyeLike")


@vjp("Reshape", "Flatten")
def reshape(op, node, dy):
    """Y = X in another shape  ->  dX = dY in the shape of X."""
    return op.reshape_as(dy, node.inputs[0])


@vjp("Squeeze")
def squeeze(op, node, dy):
    """Y = X without axes of size 1  ->  dX = dY with them."""
    x, axes = node.inputs[0], operand(node, 1)
    return shaped(op.Unsqueeze(dy, axes), x) if axes is not None else op.reshape_as(dy, x)


@vjp("Unsqueeze")
def unsqueeze(op, node, dy):
    """Y = X with more axes of size 1  ->  dX = dY without them."""
    x, axes = node.inputs
    return shaped(op.Squeeze(dy, axes), x)


@vjp("Transpose")
def transpose(op, node, dy):
    """Y[i] = X[p(i)]  ->  dX[p(i)] = dY[i]; without perm the axes are reversed."""
    (x,) = node.inputs
    perm = attribute(node, "perm", None)
    return shaped(op.Transpose(dy, perm=None if perm is None else np.argsort(perm).tolist()), x)


@vjp("Expand")
def expand(op, node, dy):
    """Y = X broadcast  ->  dX = dY; the driver sums it."""
    return dy


@vjp("Tile")
def tile(op, node, dy):
    """Y = X repeated along each axis  ->  dX = the sum of dY over the repetitions."""
    x, repeats = node.inputs
    dims = op.shape(x)
    if (counts := constant(repeats)) is not None and (sizes := constant(dims)) is not None:
        blocks = op.const(np.stack([counts, sizes], axis=1).astype(np.int64).reshape(-1))
    else:
        blocks = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(dims, [1]), axis=1), [-1])
    blocked = op.Reshape(dy, blocks, allowzero=1)  # [repeats 0, size 0, repeats 1, size 1, ...]
    if x.shape is not None:
        axes = list(range(0, 2 * len(x.shape), 2))
        return shaped(op.ReduceSum(blocked, axes, keepdims=0) if axes else blocked, x)
    return op.ReduceSum(blocked, op.Range(np.int64(0), op.Size(blocks), np.int64(2)), keepdims=0)


@vjp("Concat")
def concat(op, node, dy):
    """Y = [X1 | X2 | ...]  ->  dX1, dX2, ... = the pieces of dY."""
    if len(node.inputs) == 1:
        return dy
    axis = axis_of(node, node.inputs[0], 0)
    sizes = join(op, *(op.dim(x, axis) for x in node.inputs))
    pieces = op.node("Split", dy, sizes, axis=axis, outputs=len(node.inputs))
    return [shaped(piece, x) for piece, x in zip(pieces, node.inputs)]


@vjp("Split")
def split(op, node, *dys):
    """Y1, Y2, ... = the pieces of X  ->  dX = [dY1 | dY2 | ...], zeros where nothing depends on a piece."""
    x = node.inputs[0]
    pieces = [op.zeros_like(y) if dy is None else dy for y, dy in zip(node.outputs, dys)]
    return shaped(op.Concat(*pieces, axis=axis_of(node, x, 0)), x)


@vjp("Slice")
def slice_(op, node, dy):
    """Y = X[start:end:step]  ->  dX = dY at these places of zeros: a Pad where every step is 1."""
    x, starts = node.inputs[:2]
    steps, axes = operand(node, 4), operand(node, 3)
    if axes is None and not isinstance(starts.shape[0], int):
        return _scatter_flat(op, node, dy)
    if steps is None or ((known := constant(steps)) is not None and np.all(known == 1)):
        return _pad_back(op, x, starts, axes, node.outputs[0], dy)
    return _scatter_back(op, node, dy)


def _pad_back(op, x: ir.Value, starts: ir.Value, axes: ir.Value | None, y: ir.Value, dy: ir.Value) -> ir.Value:
    axes = op.const(np.arange(starts.shape[0])) if axes is None else op.cast_as(axes, op.const(np.int64(0)))
    begin, places = constant(starts), constant(axes)
    if begin is not None and places is not None and _are_known(x, places) and _are_known(y, places):
        sizes, kept = (np.array([v.shape[k] for k in places], np.int64) for v in (x, y))
        before = np.clip(np.where(begin < 0, begin + sizes, begin), 0, sizes)
        return shaped(op.Pad(dy, np.concatenate([before, sizes - before - kept]), None, axes), x)
    sizes, kept = (op.Gather(op.Shape(v), axes) for v in (x, dy))
    if begin is not None and not begin.any():
        before = op.const(begin.astype(np.int64))
    else:
        starts = op.cast_as(starts, sizes)
        from_back = op.Where(op.Less(starts, np.int64(0)), op.Add(starts, sizes), starts)
        before = op.Min(op.Max(from_back, np.int64(0)), sizes)
    after = op.Sub(op.Sub(sizes, before), kept)
    return shaped(op.Pad(dy, op.Concat(before, after, axis=0), None, axes), x)


def _are_known(value: ir.Value, axes: np.ndarray) -> bool:
    """Whether the sizes along these axes are numbers."""
    return value.shape is not None and all(isinstance(value.shape[int(axis)], int) for axis in axes)


def _scatter_back(op, node: ir.Node, dy: ir.Value) -> ir.Value:
    """One axis at a time, the last one first: slice the positions 0, 1, ... as X was, and scatter to them."""
    x, starts, ends = node.inputs[:3]
    axes = operand(node, 3)
    count = starts.shape[0]
    places = list(range(count)) if axes is None else constant(axes)
    if places is None or not isinstance(count, int):
        return _scatter_flat(op, node, dy)
    dims = rank(node, x)
    for k in reversed(range(count)):
        axis = int(places[k]) % dims
        size = op.dim(x, axis)
        start, end, step = (op.cast_as(op.Slice(v, [k], [k + 1]), size) for v in (starts, ends, node.inputs[4]))
        picked = op.Slice(positions(op, size), start, end, [0], step)
        dy = scatter_along(op, dy, picked, axis, size, unique=True, like=x if count == 1 else None)
    return shaped(dy, x)


def _scatter_flat(op, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Axes known at run time only: slice the positions of all elements as X was, and scatter to them."""
    x = node.inputs[0]
    numbers = op.reshape_as(positions(op, op.Reshape(op.size(x), [1])), x)
    picked = op.Reshape(op.Slice(numbers, *node.inputs[1:]), [-1])
    flat = op.Reshape(op.zeros_like(x), [-1])
    return op.reshape_as(op.ScatterElements(flat, picked, op.Reshape(dy, [-1])), x)


@vjp("Pad")
def pad(op, node, dy):
    """Y = X with a frame  ->  dX = dY without it, plus what it repeats; d(constant) = the sum of dY over it."""
    x, pads = node.inputs[:2]
    axes = operand(node, 3)
    if attribute(node, "mode", "constant") != "constant":
        return _unpad_repeats(op, node, dy)
    widths = constant(pads)
    places = np.arange(len(widths) // 2) if widths is not None and axes is None else constant(axes)
    if widths is not None and places is not None and np.all(widths >= 0):
        before, after = np.split(widths, 2)
        ends = np.where(after > 0, -after, np.iinfo(np.int64).max)
        dx = dy if not widths.any() else op.Slice(dy, before, ends, places.astype(np.int64))
    else:
        dx = op.Pad(dy, op.Neg(pads) if widths is None else op.const(-widths), None, axes)
    if operand(node, 2) is None:
        return shaped(dx, x)
    frame = op.Pad(op.zeros_like(x), pads, op.scalar(1.0, x), axes)
    total = op.ReduceSum(op.Mul(dy, frame), keepdims=0)
    return shaped(dx, x), None, op.reshape_as(total, node.inputs[2])  # which may have the shape [1]


def _unpad_repeats(op, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Pad the positions 0, 1, ... of each axis in the same mode, and add every slice of dY to its origin."""
    x, pads = node.inputs[:2]
    mode, dims = attribute(node, "mode", None), rank(node, x)
    axes = operand(node, 3)
    places = list(range(dims)) if axes is None else constant(axes)
    if places is None:
        return _unpad_flat(op, node, dy)
    widths = constant(pads)
    for k in reversed(range(len(places))):
        axis = int(places[k]) % dims
        size = op.dim(x, axis)
        if widths is not None and not widths[[k, k + len(places)]].any():
            continue
        if widths is not None and (known := constant(size)) is not None:
            before, after = (int(width) for width in widths[[k, k + len(places)]])
            dy = _fold(op, dy, _padded(np.arange(int(known[0])), before, after, mode), before, axis, int(known[0]))
        else:  # CUDA pads floats only
            numbers = op.Cast(positions(op, size), to=int(ir.DataType.DOUBLE))
            padded = op.Pad(numbers, op.Gather(pads, np.array([k, k + len(places)])), mode=mode)
            origin = op.Cast(padded, to=int(ir.DataType.INT64))
            dy = scatter_along(op, dy, origin, axis, size, unique=False, like=x if len(places) == 1 else None)
    return shaped(dy, x)


def _fold(op, dy: ir.Value, origin: np.ndarray, before: int, axis: int, size: int) -> ir.Value:
    """Add slice i of `dy` to slice origin[i] of zeros with `size` slices along `axis`.

    The slices that were not repeated lie side by side, and are copied; a matrix adds up the others. ScatterElements
    takes each element by itself, in one thread: 3.3 ms, and this 0.5 (a frame of 1 around 4 x 32 x 64 x 64).
    """
    alone = (origin == np.arange(len(origin)) - before) & (np.bincount(origin, minlength=size)[origin] == 1)
    runs = np.flatnonzero(np.diff(alone, prepend=False, append=False)).reshape(-1, 2)
    begin, end = max(runs.tolist(), key=lambda run: run[1] - run[0], default=(0, 0))
    frame = np.delete(origin, slice(begin, end))
    if begin == end or not 0 < len(frame) <= WIDEST_FRAME:
        return scatter_along(op, dy, op.const(origin), axis, op.const(np.array([size])), unique=False, like=None)
    first, kept = begin - before, end - begin
    matrix = np.zeros((len(frame), size - kept))
    matrix[np.arange(len(frame)), np.where(frame < first, frame, frame - kept)] = 1
    (wide,) = widened(op, dy)
    head, middle, tail = op.node("Split", wide, join(op, begin, kept, len(origin) - end), axis=axis, outputs=3)
    sums = along(op, op.Concat(head, tail, axis=axis), axis, op.const(matrix, wide.dtype))
    head, tail = op.node("Split", sums, join(op, first, size - kept - first), axis=axis, outputs=2)
    return op.cast_as(op.Concat(head, middle, tail, axis=axis), dy)


def _unpad_flat(op, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Axes known at run time only: pad the positions of all elements, and add to each its copies."""
    x, pads, _, axes = node.inputs
    numbers = op.reshape_as(positions(op, op.Reshape(op.size(x), [1])), x)
    padded = op.Pad(op.Cast(numbers, to=int(ir.DataType.DOUBLE)), pads, None, axes, mode=attribute(node, "mode", None))
    origin = op.Reshape(op.Cast(padded, to=int(ir.DataType.INT64)), [-1])
    size = op.Reshape(op.size(x), [1])
    return op.reshape_as(scatter_along(op, op.Reshape(dy, [-1]), origin, 0, size, unique=False, like=None), x)


def _padded(numbers: np.ndarray, before: int, after: int, mode: str) -> np.ndarray:
    """ONNX's Pad in one dimension: negative widths cut first."""
    numbers = numbers[max(-before, 0) : len(numbers) - max(-after, 0)]
    if not len(numbers) and max(before, after) > 0:
        raise GradientError(f"Pad cannot pad by {mode!r} an axis of which its negative widths leave nothing")
    return np.pad(numbers, (max(before, 0), max(after, 0)), mode=mode).astype(np.int64)


@vjp("DepthToSpace")
def depth_to_space(op, node, dy):
    """Blocks of channels become squares of pixels  ->  the squares of dY become channels again."""
    (x,) = node.inputs
    block = attribute(node, "blocksize", None)
    squares = op.SpaceToDepth(dy, blocksize=block)
    if attribute(node, "mode", "DCR") == "DCR":
        return shaped(squares, x)
    sizes = join(op, op.dim(dy, 0), block * block, op.dim(dy, 1), op.dim(x, 2), op.dim(x, 3))
    apart = op.Reshape(squares, sizes, allowzero=1)  # of whole images: the other way each pixel would move by itself
    return op.reshape_as(op.Transpose(apart, perm=[0, 2, 1, 3, 4]), x)


@vjp("SpaceToDepth")
def space_to_depth(op, node, dy):
    """Squares of pixels become channels  ->  the channels of dY become squares again."""
    (x,) = node.inputs
    return shaped(op.DepthToSpace(dy, blocksize=attribute(node, "blocksize", None)), x)


@vjp("Col2Im")
def col2im(op, node, dy):
    """Y = overlapping blocks added up to an image  ->  dX = the blocks of dY."""
    dims = rank(node, dy) - 2
    pads = np.array(attribute(node, "pads", [0] * 2 * dims))
    padded = op.Pad(dy, pads.astype(np.int64), None, np.arange(2, 2 + dims)) if pads.any() else dy
    block = constant(node.inputs[2])
    if block is not None and block.max() < MANY:
        dilations, strides = (attribute(node, name, [1] * dims) for name in ("dilations", "strides"))
        offsets = [[k * dilation for k in range(extent)] for extent, dilation in zip(block.tolist(), dilations)]
        return op.reshape_as(windows_of_images(op, padded, offsets, strides), node.inputs[0])
    pixels = pixels_of_col2im(op, node, dims)
    return op.reshape_as(op.Gather(op.Reshape(padded, [0, 0, -1]), pixels, axis=2), node.inputs[0])


def pixels_of_col2im(op, node: ir.Node, dims: int) -> ir.Value:
    """Where in the flat padded image each element of each block lies, all elements, then all blocks."""
    image, block = node.inputs[1:]
    dilations, strides = (attribute(node, name, [1] * dims) for name in ("dilations", "strides"))
    pads = np.array(attribute(node, "pads", [0] * 2 * dims))
    known = constant(image), constant(block)
    if known[0] is not None and known[1] is not None:
        return op.const(_pixels_of_blocks(*known, dilations, strides, pads))
    return _pixels_at_run_time(op, image, block, dilations, strides, pads)


def _pixels_of_blocks(sizes, extents, dilations, strides, pads) -> np.ndarray:
    """`pixels_of_col2im` of known sizes."""
    dims = len(sizes)
    padded_sizes = sizes + pads[:dims] + pads[dims:]
    places = [  # along each axis, where element b of block number n lies: [elements, blocks]
        np.arange(extent)[:, None] * dilation + np.arange(0, size - dilation * (extent - 1), stride)
        for size, extent, dilation, stride in zip(padded_sizes, extents, dilations, strides)
    ]
    grid = np.ix_(*(place.reshape(-1) for place in places))
    flat = np.ravel_multi_index(grid, padded_sizes).reshape([count for place in places for count in place.shape])
    order = [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]
    return flat.transpose(order).reshape(-1).astype(np.int64)


def _pixels_at_run_time(op, image: ir.Value, block: ir.Value, dilations, strides, pads) -> ir.Value:
    """The same of sizes that are known at run time only."""
    dims, flat = len(dilations), None
    for k, (dilation, stride) in enumerate(zip(dilations, strides)):
        size, extent = (op.Gather(v, np.array([k])) for v in (image, block))
        size = op.Add(size, np.int64(pads[k] + pads[k + dims]))
        reach = op.Mul(op.Sub(extent, np.int64(1)), np.int64(dilation))
        blocks = op.Div(op.Sub(op.Add(size, np.int64(stride - 1)), reach), np.int64(stride))
        elements = op.Unsqueeze(op.Mul(positions(op, extent), np.int64(dilation)), [1])
        place = op.Add(elements, op.Mul(positions(op, blocks), np.int64(stride)))  # [elements, blocks]
        others = [axis for axis in range(2 * dims) if axis not in (k, dims + k)]
        place = op.Unsqueeze(place, others) if others else place
        flat = place if flat is None else op.Add(op.Mul(flat, size), place)
    return op.Reshape(flat, [-1])


@vjp("Trilu")
def trilu(op, node, dy):
    """Y = a triangle of X, else 0  ->  dX = the same triangle of dY."""
    x = node.inputs[0]
    return shaped(op.Trilu(dy, *node.inputs[1:], upper=attribute(node, "upper", None)), x)


@vjp("ReverseSequence")
def reverse_sequence(op, node, dy):
    """Y = X with the head of each sequence reversed  ->  dX = dY reversed once more."""
    x, lengths = node.inputs
    axes = {name: attribute(node, name, None) for name in ("batch_axis", "time_axis")}
    return shaped(op.ReverseSequence(dy, lengths, **axes), x)


@vjp("Range")
def range_(op, node, dy):
    """Y[i] = start + i * delta  ->  d start = sum(dY),  d delta = sum(i * dY); the number of steps has no gradient."""
    numbers = op.cast_as(op.Range(np.int64(0), op.Size(dy), np.int64(1)), dy)
    return op.ReduceSum(dy, keepdims=0), op.zeros_like(node.inputs[1]), op.ReduceSum(op.Mul(dy, numbers), keepdims=0)
