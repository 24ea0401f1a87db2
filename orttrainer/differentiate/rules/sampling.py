"""Operators that read an image at computed places: DeformConv, RoiAlign, MaxRoiPool, by their definitions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.grid import grid_sample_by_definition
from orttrainer.differentiate.rules.tools import attribute, join, operand, positions, rank
from orttrainer.errors import GradientError

INT64 = int(ir.DataType.INT64)


@definition("DeformConv")
def deform_conv(op, node):
    """Y = W * (mask X at the places of the kernel plus their offsets) + B; zeros outside of X."""
    x, w, offset, b, mask = (operand(node, index) for index in range(5))
    if rank(node, x) != 4:
        raise GradientError(f"no gradient for DeformConv node {node.name!r} of an X that has not two spatial axes")
    kernel = attribute(node, "kernel_shape", None) or w.shape.dims[2:]
    if not all(isinstance(size, int) for size in kernel):
        raise GradientError(f"the gradient of DeformConv node {node.name!r} needs kernel_shape, or W of known size")
    taps, groups, shifts = math.prod(kernel), attribute(node, "group", 1), attribute(node, "offset_group", 1)
    strides, dilations = (attribute(node, name, [1, 1]) for name in ("strides", "dilations"))
    pads = attribute(node, "pads", [0] * 4)
    batch, height, width = op.dim(x, 0), op.dim(offset, 2), op.dim(offset, 3)
    # [batch * offset groups, taps, 2, rows, columns]
    offsets = op.Reshape(offset, join(op, -1, taps, 2, height, width))
    grid = []
    for axis in (1, 0):  # GridSample has x before y
        steps = op.Add(op.Mul(positions(op, op.dim(offset, 2 + axis)), np.int64(strides[axis])), np.int64(-pads[axis]))
        place = op.Unsqueeze(steps, [1 - axis]) if axis else op.Unsqueeze(steps, [1])
        tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis]
        at = op.Add(op.Cast(op.Add(place, op.const(tap.astype(np.int64))), to=int(x.dtype)), _part(op, offsets, axis))
        size = op.cast_as(op.dim(x, 2 + axis), x)
        grid.append(op.Sub(op.Div(op.Add(op.Mul(at, 2.0), 1.0), size), 1.0))  # the pixels are -1 + (2 at + 1) / size
    grid = op.Concat(*(op.Reshape(g, join(op, 0, taps, -1, 1)) for g in grid), axis=3)  # [.., taps, points, 2]
    images = op.Reshape(x, join(op, op.Mul(batch, np.array([shifts])), -1, op.dim(x, 2), op.dim(x, 3)))
    read = op.GridSample(images, grid, mode="linear" if op.opset >= 20 else "bilinear")
    if x.dtype == ir.DataType.DOUBLE:  # for which ONNX Runtime has the DeformConv alone
        read = grid_sample_by_definition(op, read.producer())
    if mask is not None:
        read = op.Mul(read, op.Reshape(mask, join(op, op.Mul(batch, np.array([shifts])), 1, taps, -1)))
    columns = op.Reshape(read, join(op, batch, groups, -1, op.Mul(height, width)))  # channels * taps of a group
    rows = op.Reshape(w, join(op, groups, -1, op.Mul(op.dim(w, 1), np.array([taps]))))
    y = op.Reshape(op.MatMul(rows, columns), join(op, batch, op.dim(w, 0), height, width))
    return y if b is None else op.Add(y, op.Unsqueeze(b, [1, 2]))


def _part(op, offsets: ir.Value, axis: int) -> ir.Value:
    return op.Squeeze(op.Slice(offsets, [axis], [axis + 1], [2]), [2])


@definition("RoiAlign")
def roi_align(op, node):
    """Y = the mean (or maximum) of X over a grid of points in each bin of each region, between the pixels."""
    x, rois, image = node.inputs
    half_pixel = attribute(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    bins = [attribute(node, f"output_{side}", 1) for side in ("height", "width")]
    ratio = attribute(node, "sampling_ratio", 0)
    scaled = op.Sub(op.Mul(rois, attribute(node, "spatial_scale", 1.0)), 0.5 if half_pixel else 0.0)
    x1, y1, x2, y2 = op.Split(scaled, axis=1, num_outputs=4, outputs=4)  # [regions, 1]
    low, high, weights_low, weights_high, counted, counts = [], [], [], [], [], []
    for axis, (start, end) in enumerate(((y1, y2), (x1, x2))):
        length = op.Sub(end, start)
        if not half_pixel:
            length = op.Max(length, 1.0)  # malformed ones are 1 x 1
        bin_size = op.Div(length, float(bins[axis]))
        # Without a ratio each region has its own number of points: all have the largest, and some do not count.
        count = op.full_like(bin_size, float(ratio)) if ratio > 0 else op.Ceil(bin_size)  # [regions, 1]
        most = op.Cast(op.ReduceMax(count, keepdims=0), to=INT64) if ratio == 0 else None
        numbers = op.const(np.arange(ratio)) if most is None else positions(op, op.Reshape(most, [1]))
        points = op.Cast(numbers, to=int(x.dtype))
        fraction = op.Div(op.Add(points, 0.5), op.Max(count, 1.0))  # [regions, points]; 0 of one without length
        number = op.const(np.arange(bins[axis])[:, None], x.dtype)
        place = op.Mul(op.Add(op.Unsqueeze(fraction, [1]), number), op.Unsqueeze(bin_size, [2]))
        at = op.Add(place, op.Unsqueeze(start, [2]))  # [regions, bins, points]
        size = op.dim(x, 2 + axis)
        last = op.Sub(op.cast_as(size, x), 1.0)
        inside = op.And(op.GreaterOrEqual(at, op.scalar(-1.0, x)), op.LessOrEqual(at, op.cast_as(size, x)))
        at = op.Min(op.Max(at, 0.0), last)
        floor = op.Floor(at)
        t, mask = op.Sub(at, floor), op.cast_as(inside, x)
        low.append(op.Cast(floor, to=INT64))
        high.append(op.Min(op.Add(low[-1], np.int64(1)), op.Sub(size, np.int64(1))))
        weights_low.append(op.Mul(op.Sub(1.0, t), mask))
        weights_high.append(op.Mul(t, mask))
        counted.append(op.Unsqueeze(op.Less(points, count), [1]))  # [regions, 1, points]
        counts.append(count)

    def grid(op, rows, columns, combine):
        """[regions, bins, bins, points, points] of a value of each row and one of each column."""
        return combine(op.Unsqueeze(rows, [2, 4]), op.Unsqueeze(columns, [1, 3]))

    pixels = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), join(op, -1, op.dim(x, 1)))
    first = op.Mul(op.Unsqueeze(op.Cast(image, to=INT64), [1, 2, 3, 4]), op.Mul(op.dim(x, 2), op.dim(x, 3)))
    taps = []
    for row, weight_row in ((low[0], weights_low[0]), (high[0], weights_high[0])):
        for column, weight_column in ((low[1], weights_low[1]), (high[1], weights_high[1])):
            index = op.Add(first, grid(op, op.Mul(row, op.dim(x, 3)), column, op.Add))
            weight = grid(op, weight_row, weight_column, op.Mul)
            taps.append(op.Mul(op.Gather(pixels, index, axis=0), op.Unsqueeze(weight, [5])))
    counts_here = op.Unsqueeze(grid(op, *counted, op.And), [5])
    if attribute(node, "mode", "avg") == "max":  # of the four weighted pixels around each point
        y = op.Where(counts_here, op.Max(*taps), op.scalar(-math.inf, x))
        y = op.ReduceMax(y, [3, 4], keepdims=0)
        y = op.Where(op.Equal(y, op.scalar(-math.inf, x)), op.scalar(0.0, x), y)  # a region without points
    else:
        total = op.Add(op.Add(taps[0], taps[1]), op.Add(taps[2], taps[3]))
        total = op.ReduceSum(op.Where(counts_here, total, op.scalar(0.0, x)), [3, 4], keepdims=0)
        y = op.Div(total, op.Unsqueeze(op.Max(op.Mul(*counts), 1.0), [2, 3]))
    return op.Transpose(y, perm=[0, 3, 1, 2])


@definition("MaxRoiPool")
def max_roi_pool(op, node):
    """Y = the maximum of X over each bin of each region, of whole pixels; 0 where there are none. Ties share dY."""
    x, rois = node.inputs
    scale = attribute(node, "spatial_scale", 1.0)
    image, x1, y1, x2, y2 = op.Split(rois, axis=1, num_outputs=5, outputs=5)  # [regions, 1]
    y = op.Gather(x, op.Cast(op.Squeeze(image, [1]), to=INT64), axis=0)  # [regions, channels, height, width]
    lowest = op.scalar(-math.inf, x)
    for axis, (start, end) in enumerate(((y1, y2), (x1, x2))):
        bins = attribute(node, "pooled_shape", None)[axis]
        start, end = (op.Floor(op.Add(op.Mul(v, scale), 0.5)) for v in (start, end))
        size = op.Div(op.Max(op.Add(op.Sub(end, start), 1.0), 1.0), float(bins))
        number = op.const(np.arange(bins)[None], x.dtype)
        first = op.Add(op.Floor(op.Mul(number, size)), start)
        last = op.Add(op.Ceil(op.Mul(op.Add(number, 1.0), size)), start)
        pixel = op.Cast(positions(op, op.dim(x, 2 + axis)), to=int(x.dtype))
        inside = op.And(
            op.GreaterOrEqual(pixel, op.Unsqueeze(first, [2])), op.Less(pixel, op.Unsqueeze(last, [2]))
        )  # [regions, bins, pixels]
        # height: [regions, channels, bins, height, width]; width: [regions, channels, bins of height, bins, width]
        where = op.Unsqueeze(inside, [1, 4] if axis == 0 else [1, 2])
        y = op.Where(where, op.Unsqueeze(y, [2 + axis]), lowest)
        y = op.ReduceMax(y, [3 if axis == 0 else 4], keepdims=0)
    return op.Where(op.Equal(y, lowest), op.scalar(0.0, x), y)
