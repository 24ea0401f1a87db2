"""Resize, GridSample and Col2Im, by gathering."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.grid import grid_sample_by_definition, keys_kernel
from orttrainer.differentiate.rules.resize import (
    interpolation_matrix,
    places_at_run_time,
    region_of,
    resized_to,
    rounded,
    scale_of,
    stays,
)
from orttrainer.differentiate.rules.shape import pixels_of_col2im
from orttrainer.differentiate.rules.tools import along, attribute, constant, join, operand, positions, scatter_along
from orttrainer.differentiate.rules.unfold import padded
from orttrainer.differentiate.rules.windows import ints, reshape, sizes

__all__ = ["FORMS"]

_DOUBLE, _FLOAT, _INT64 = ir.DataType.DOUBLE, ir.DataType.FLOAT, int(ir.DataType.INT64)


def resize(op, node: ir.Node) -> ir.Value | None:
    """Y = M_1 ... M_n X, a matrix along each axis."""
    x = node.inputs[0]
    if x.shape is None:
        return None
    dims, mode = len(x.shape), attribute(node, "coordinate_transformation_mode", "half_pixel")
    axes = [axis % dims for axis in attribute(node, "axes", None) or range(dims)]
    if mode == "tf_crop_and_resize" and attribute(node, "extrapolation_value", 0.0):
        return None
    y = x
    for place, axis in enumerate(axes):
        scale, region = scale_of(op, node, place, axes), region_of(op, node, place, len(axes))
        size, resized = x.shape[axis], resized_to(node, x, axis, axes, scale)
        if stays(size, resized, scale) and mode != "tf_crop_and_resize":
            continue
        if isinstance(size, int) and isinstance(resized, int) and not isinstance(region, ir.Value):
            y = _interpolated(op, y, axis, interpolation_matrix(node, size, resized, scale or resized / size, region))
        elif attribute(node, "antialias", 0) != attribute(node, "exclude_outside", 0):
            return None
        else:
            y = _interpolated_at_run_time(op, node, y, axis, place, scale, region)
    return y


def _interpolated(op, y: ir.Value, axis: int, matrix: np.ndarray) -> ir.Value:
    """M Y along an axis; where its rows have one or two numbers, by gathering: 0 times infinity is none."""
    taps = int((matrix != 0).sum(1).max(initial=0))
    if taps > 2:
        return along(op, y, axis, op.const(matrix.T, y.dtype))
    at = np.argsort(matrix == 0, axis=1, kind="stable")[:, : max(taps, 1)].T  # where they are, first
    weights = np.take_along_axis(matrix.T, at, 0)
    read = [op.Gather(y, ints(row), axis=axis) for row in at]
    return _weighted(op, read, [op.const(row, y.dtype) if np.any(row != 1) else None for row in weights], axis)


def _weighted(op, read: list[ir.Value], weights: list[ir.Value | None], axis: int) -> ir.Value:
    """The sum of what is read, with weights along an axis."""
    behind = [1] * (len(read[0].shape) - axis - 1)
    terms = [v if w is None else op.Mul(v, op.Reshape(w, ints([-1, *behind]))) for v, w in zip(read, weights)]
    return op.Sum(*terms) if len(terms) > 1 else terms[0]


def _interpolated_at_run_time(op, node: ir.Node, y: ir.Value, axis: int, place: int, scale, region) -> ir.Value:
    kind = attribute(node, "mode", "nearest")
    length = op.dim(y, axis)
    dtype = _FLOAT if kind == "nearest" else _DOUBLE  # as ONNX Runtime: where a place is rounded, the last bit decides
    resized = _count(op, node, length, place, scale)
    at, last, outside = places_at_run_time(op, node, length, resized, scale, region, dtype)
    if attribute(node, "antialias", 0):
        ratio = op.Div(*(op.Cast(v, to=int(dtype)) for v in (resized, length))) if scale is None else scale
        return along(op, y, axis, _antialiased(op, node, at, length, ratio))
    if kind == "nearest":
        offsets, first, weights = [0], rounded(op, node, at), [None]
    else:
        first = op.Floor(at)
        t = op.Sub(at, first)
        if kind == "linear":
            offsets, weights = [0, 1], [op.Sub(op.scalar(1.0, t), t), t]
        else:
            offsets, weights = [-1, 0, 1, 2], _cubic_weights(op, t, attribute(node, "cubic_coeff_a", -0.75))
    if outside is not None:
        inside = op.Cast(op.Not(outside), to=int(_DOUBLE))
        weights = [inside if w is None else op.Mul(w, inside) for w in weights]
    taps = [op.Max(op.Min(op.Add(first, float(n)) if n else first, last), 0.0) for n in offsets]
    return _weighted(op, [op.Gather(y, op.Cast(tap, to=_INT64), axis=axis) for tap in taps], weights, axis)


def _antialiased(op, node: ir.Node, at: ir.Value, length: ir.Value, ratio: float | ir.Value) -> ir.Value:
    """What each number of the input has of each of the output: [size, resized]; where that is smaller kernels are wider."""
    ratio = op.cast_as(ratio, at) if isinstance(ratio, ir.Value) else op.scalar(ratio, at)
    distance = op.Abs(op.Sub(at, op.Unsqueeze(op.Cast(positions(op, length), to=int(at.dtype)), [1])))
    t = op.Mul(distance, op.Min(ratio, 1.0))
    if attribute(node, "mode", "nearest") == "linear":
        weights = op.Relu(op.Sub(op.scalar(1.0, t), t))
    else:
        a = attribute(node, "cubic_coeff_a", -0.75)
        near, far = (_polynomial(op, t, c) for c in ((a + 2, -a - 3, 0.0, 1.0), (a, -5 * a, 8 * a, -4 * a)))
        beyond = op.Where(op.Less(t, 2.0), far, op.scalar(0.0, t))
        weights = op.Where(op.LessOrEqual(t, op.scalar(1.0, t)), near, beyond)
    return op.Div(weights, op.ReduceSum(weights, [0], keepdims=1))


def _count(op, node: ir.Node, length: ir.Value, place: int, scale: float | ir.Value | None) -> ir.Value:
    """The size of an axis of the output, as ONNX Runtime counts it: [1]."""
    wanted = operand(node, 3)
    if scale is None:
        return op.Reshape(op.Gather(wanted, np.int64(place)), [1])
    size = op.Cast(length, to=int(_FLOAT))
    exact = op.Mul(size, scale if isinstance(scale, ir.Value) else op.scalar(scale, size))
    return op.Cast(op.Floor(exact if wanted is None else op.Add(exact, 0.5)), to=_INT64)


def _cubic_weights(op, t: ir.Value, a: float) -> list[ir.Value]:
    return [_polynomial(op, t, coefficients) for coefficients in keys_kernel(a).tolist()]


def _polynomial(op, t: ir.Value, coefficients) -> ir.Value:
    value = op.scalar(coefficients[0], t)
    for coefficient in coefficients[1:]:
        value = op.Add(op.Mul(value, t), coefficient)
    return value


def grid_sample(op, node: ir.Node) -> ir.Value | None:
    """What each point reads, times its weights."""
    return None if any(x.shape is None for x in node.inputs) else grid_sample_by_definition(op, node)


def col2im(op, node: ir.Node) -> ir.Value | None:
    """Each number of each block, added where it lies in the image."""
    x, image, block = node.inputs
    if x.shape is None or not isinstance(x.shape[1], int) or constant(block) is None:
        return None
    dims = len(constant(block))
    pads = attribute(node, "pads", [0] * 2 * dims)
    size = op.Add(image, ints(begin + end for begin, end in zip(pads[:dims], pads[dims:])))
    channels = x.shape[1] // int(np.prod(constant(block)))
    blocks, pixels = reshape(op, x, *sizes(x, 0), channels, -1), pixels_of_col2im(op, node, dims)
    y = scatter_along(op, blocks, pixels, 2, op.ReduceProd(size, keepdims=1), unique=False, like=None)
    y = op.Reshape(y, join(op, op.dim(x, 0), channels, size))
    return padded(op, y, [-n for n in pads[:dims]], [-n for n in pads[dims:]])


FORMS = {"Col2Im": col2im, "GridSample": grid_sample, "Resize": resize}
