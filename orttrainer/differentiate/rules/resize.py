"""Resampling: Resize."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import (
    along,
    attribute,
    constant,
    operand,
    positions,
    rank,
    refuse_gradient_by,
    shaped,
)
from orttrainer.differentiate.rules.windows import reshape, sizes
from orttrainer.errors import GradientError
from orttrainer.graph.builder import same_dim

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


@vjp("Resize")
def resize(op, node, dy):
    """Y = M_1 ... M_n X, a matrix along each axis  ->  dX = M_1^T ... M_n^T dY."""
    refuse_gradient_by(op, node, 1, "roi")
    refuse_gradient_by(op, node, 2, "scales")
    x = node.inputs[0]
    dims = rank(node, x)
    axes = [axis % dims for axis in attribute(node, "axes", None) or range(dims)]
    dx, blocks = dy, {}
    for place, axis in enumerate(axes):
        scale, region = scale_of(op, node, place, axes), region_of(op, node, place, len(axes))
        size, resized = x.shape[axis], resized_to(node, x, axis, axes, scale)
        if stays(size, resized, scale) and not _crops_what_stays(node):
            continue
        if isinstance(size, int) and isinstance(resized, int) and not isinstance(region, ir.Value):
            matrix = interpolation_matrix(node, size, resized, scale or resized / size, region)
            if resized % size == 0 and np.array_equal(matrix, np.repeat(np.eye(size), resized // size, axis=0)):
                blocks[axis] = resized // size
                continue
            if _asks_runtime(node) and _hangs_on_rounding(node, size, resized, scale or resized / size, region):
                matrix = _resized_identity(op, node, x, axis, place, scale, region)
            else:
                matrix = op.const(matrix, x.dtype)
            dx = along(op, dx, axis, matrix)
        else:
            dx = along(op, dx, axis, _matrix_at_run_time(op, node, x, axis, place, scale, region))
    if blocks:
        dx = _sum_blocks(op, dx, x, blocks)
    return (shaped(dx, x), *[None] * (len(node.inputs) - 1))


def stays(size, resized, scale: float | ir.Value | None) -> bool:
    """Whether an axis is as long as before, so that nothing but a crop happens along it."""
    return scale == 1 or (scale is None and resized is not None and same_dim(size, resized))


def _crops_what_stays(node: ir.Node) -> bool:
    """Whether a region is cut out along an axis that is as long as before, as ONNX says.

    ONNX Runtime leaves such an axis as it is. For float64 it has no kernel, and ours do as ONNX says.
    """
    crops = attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    return crops and node.inputs[0].dtype == DOUBLE


def scale_of(op, node: ir.Node, place: int, axes: list[int]) -> float | ir.Value | None:
    """The scale along an axis, a value where it is known at run time only; None where it follows from the sizes."""
    scales = operand(node, 2)
    if scales is None or (scales.shape is not None and scales.shape.dims == (0,)):
        policy = attribute(node, "keep_aspect_ratio_policy", "stretch")
        if policy == "stretch":
            return None
        wanted, given = constant(operand(node, 3)), [node.inputs[0].shape[axis] for axis in axes]
        if wanted is not None and all(isinstance(d, int) for d in given):
            ratios = [int(w) / d for w, d in zip(wanted, given)]
            return min(ratios) if policy == "not_larger" else max(ratios)
        given = op.Gather(op.shape(node.inputs[0]), np.array(axes, np.int64))
        sizes_as, given = (op.Cast(v, to=int(FLOAT)) for v in (operand(node, 3), given))
        return (op.ReduceMin if policy == "not_larger" else op.ReduceMax)(op.Div(sizes_as, given), keepdims=0)
    known = constant(scales)
    return op.Gather(scales, np.int64(place)) if known is None else float(known[place])


def resized_to(node: ir.Node, x: ir.Value, axis: int, axes: list[int], scale: float | ir.Value | None):
    """The size of an axis of the output, by ONNX's formula, or its name; None where it is only known at run time."""
    if scale is None:
        if (wanted := constant(operand(node, 3))) is not None:
            return int(wanted[axes.index(axis)])
        return None if node.outputs[0].shape is None else node.outputs[0].shape[axis]
    if not isinstance(x.shape[axis], int) or isinstance(scale, ir.Value):
        return None
    exact = x.shape[axis] * scale
    return int(np.floor(exact)) if operand(node, 3) is None else int(exact + 0.5)


def region_of(op, node: ir.Node, place: int, count: int) -> tuple[float, float] | ir.Value:
    """The part of an axis that tf_crop_and_resize takes: begin and end, a value where they are known at run time only."""
    if attribute(node, "coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return 0.0, 1.0
    roi = constant(operand(node, 1))
    if roi is None:
        return op.Gather(operand(node, 1), np.array([place, place + count]))
    return float(roi[place]), float(roi[place + count])


def interpolation_matrix(node: ir.Node, size: int, resized: int, scale: float, region) -> np.ndarray:
    """M with Y = M X along an axis of `size`: [resized, size]."""
    mode = attribute(node, "mode", "nearest")
    # ONNX Runtime computes coordinates in float32; where a coordinate is rounded, the last bit decides.
    x = _coordinates(node, size, resized, scale, region, np.float32 if mode == "nearest" else np.float64)
    outside = (x < 0) | (x > size - 1)
    matrix = np.zeros((resized, size))
    rows = np.arange(resized)[:, None]
    if mode == "nearest":
        at, weights = _round(x, attribute(node, "nearest_mode", "round_prefer_floor"))[:, None], np.ones((resized, 1))
    else:
        kernel, reach = (_hat, 1) if mode == "linear" else (_cubic(attribute(node, "cubic_coeff_a", -0.75)), 2)
        shrink = min(scale, 1.0) if attribute(node, "antialias", 0) else 1.0
        reach = int(np.ceil(reach / shrink))
        at = np.floor(x).astype(int)[:, None] + np.arange(1 - reach, 1 + reach)
        weights = kernel((x[:, None] - at) * shrink)
        if attribute(node, "exclude_outside", 0):
            weights = np.where((at >= 0) & (at < size), weights, 0)
        weights = weights / weights.sum(1, keepdims=True)
    np.add.at(matrix, (rows, np.clip(at, 0, size - 1).astype(int)), weights)
    if attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        matrix[outside] = 0  # there Y is the constant extrapolation_value
    return matrix


def _coordinates(node, size, resized, scale, region, dtype) -> np.ndarray:
    """Where in the input each position of the output is read."""
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    x, scale = np.arange(resized, dtype=dtype), dtype(scale)
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * dtype(size - 1) / dtype(resized - 1) if resized > 1 else 0 * x
    if mode == "tf_crop_and_resize":
        begin, end = (dtype(r) for r in region)
        if resized == 1:
            return 0 * x + dtype(0.5) * (begin + end) * dtype(size - 1)
        return begin * dtype(size - 1) + x * (end - begin) * dtype(size - 1) / dtype(resized - 1)
    if mode == "tf_half_pixel_for_nn":
        return (x + dtype(0.5)) / scale
    if mode == "pytorch_half_pixel" and resized == 1:
        return 0 * x
    centers = (x + dtype(0.5)) / scale - dtype(0.5)
    if mode == "half_pixel_symmetric":
        return centers + dtype(size / 2) * (1 - dtype(resized) / (scale * dtype(size)))
    return centers


def _asks_runtime(node: ir.Node) -> bool:
    """Whether a Resize of a matrix of these settings can take the place of M: the runtime has a kernel, and it gets the same ratio."""
    stretches = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    return node.inputs[0].dtype == FLOAT and stretches


def _hangs_on_rounding(node: ir.Node, size: int, resized: int, scale: float, region) -> bool:
    """Whether the last bits of a coordinate decide which pixel is the nearest: runtimes differ in the order of the same steps."""
    if attribute(node, "mode", "nearest") != "nearest":
        return False
    x = _coordinates(node, size, resized, scale, region, np.float64)
    rounding, margin = attribute(node, "nearest_mode", "round_prefer_floor"), 1e-5 * np.maximum(np.abs(x), 1)
    before, after = (np.clip(_round(at, rounding), 0, size - 1) for at in (x - margin, x + margin))
    return not np.array_equal(before, after)


def _round(x: np.ndarray, mode: str) -> np.ndarray:
    down, up = np.ceil(x - x.dtype.type(0.5)), np.floor(x + x.dtype.type(0.5))
    return {"round_prefer_floor": down, "round_prefer_ceil": up, "floor": np.floor(x), "ceil": np.ceil(x)}[mode]


def _hat(t: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(t))


def _cubic(a: float):
    def kernel(t: np.ndarray) -> np.ndarray:
        t = np.abs(t)
        near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
        return np.where(t <= 1, near, np.where(t < 2, far, 0))

    return kernel


def _matrix_at_run_time(
    op, node: ir.Node, x: ir.Value, axis: int, place: int, scale: float | ir.Value | None, region
) -> ir.Value:
    """M of one axis whose sizes, scale or region are only known at run time: [resized, size]."""
    kind = attribute(node, "mode", "nearest")
    stretches = attribute(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
    if stretches if kind != "nearest" else _asks_runtime(node):
        return _resized_identity(op, node, x, axis, place, scale, region)
    if kind == "cubic" or attribute(node, "antialias", 0):
        raise GradientError(
            f"the gradient of Resize node {node.name!r} is not implemented for keep_aspect_ratio_policy with mode "
            "'cubic' or antialias=1 and sizes that are known at run time only; give it constant sizes and inputs of known size"
        )
    dtype = DOUBLE if x.dtype == DOUBLE and kind == "linear" else FLOAT
    length, resized = (op.dim(v, axis) for v in (x, node.outputs[0]))
    at, last, outside = places_at_run_time(op, node, length, resized, scale, region, dtype)
    if kind == "nearest":
        at = rounded(op, node, at)
    at = op.Unsqueeze(op.Max(op.Min(at, last), 0.0), [1])  # [resized, 1]
    distance = op.Abs(op.Sub(at, op.Cast(positions(op, length), to=int(dtype))))  # [resized, size]
    matrix = op.Relu(op.Sub(1.0, distance))
    if outside is not None:  # there Y is the constant extrapolation_value
        matrix = op.Where(op.Unsqueeze(outside, [1]), op.scalar(0.0, matrix), matrix)
    return op.cast_as(matrix, x)


def places_at_run_time(
    op, node: ir.Node, length: ir.Value, resized: ir.Value, scale: float | ir.Value | None, region, dtype
):
    """`_coordinates` along one axis, the last one of the input there is, and which of them tf_crop_and_resize has outside.

    Args:
        length, resized: sizes of the axis, 1-element int64.
        dtype: to compute in.
    """
    mode = attribute(node, "coordinate_transformation_mode", "half_pixel")
    size, count = (op.Cast(d, to=int(dtype)) for d in (length, resized))
    row = op.Cast(positions(op, resized), to=int(dtype))
    if isinstance(scale, ir.Value):
        ratio = op.cast_as(scale, row)
    else:
        ratio = op.Div(count, size) if scale is None else op.scalar(scale, row)
    last, single = op.Sub(size, 1.0), op.Equal(resized, np.int64(1))
    steps = op.Max(op.Sub(count, 1.0), 1.0)
    centers = op.Sub(op.Div(op.Add(row, 0.5), ratio), 0.5)
    if mode == "asymmetric":
        at = op.Div(row, ratio)
    elif mode == "align_corners":
        at = op.Div(op.Mul(row, last), steps)
    elif mode == "tf_crop_and_resize":
        begin, end = _ends(op, region, row)
        spread = op.Add(op.Mul(begin, last), op.Div(op.Mul(op.Mul(row, op.Sub(end, begin)), last), steps))
        at = op.Where(single, op.Mul(op.Mul(op.Add(begin, end), 0.5), last), spread)
    elif mode == "tf_half_pixel_for_nn":
        at = op.Div(op.Add(row, 0.5), ratio)
    elif mode == "half_pixel_symmetric":
        shift = op.Sub(1.0, op.Div(count, op.Mul(ratio, size)))
        at = op.Add(centers, op.Mul(op.Mul(size, 0.5), shift))
    else:
        at = op.Where(single, op.scalar(0.0, row), centers) if mode == "pytorch_half_pixel" else centers
    if mode != "tf_crop_and_resize":
        return at, last, None
    if not _crops_what_stays(node):
        at = op.Where(op.Equal(ratio, op.scalar(1.0, ratio)), row, at)
    return at, last, op.Or(op.Less(at, 0.0), op.Greater(at, last))


def rounded(op, node: ir.Node, at: ir.Value) -> ir.Value:
    """Coordinates as nearest_mode rounds them."""
    rounding = attribute(node, "nearest_mode", "round_prefer_floor")
    half = {"round_prefer_floor": -0.5, "round_prefer_ceil": 0.5}.get(rounding, 0.0)
    return (op.Ceil if rounding in ("round_prefer_floor", "ceil") else op.Floor)(op.Add(at, half) if half else at)


def _resized_identity(op, node, x: ir.Value, axis: int, place: int, scale, region) -> ir.Value:
    """M = M I: the identity matrix, resized along its columns as x was along the axis."""
    length = op.dim(x, axis)
    at = positions(op, length)
    identity = op.Cast(op.Equal(op.Unsqueeze(at, [1]), op.Unsqueeze(at, [0])), to=int(x.dtype))
    scales = wanted = roi = None
    if scale is None:
        wanted = op.Concat(op.dim(node.outputs[0], axis), length, axis=0)
    else:
        scales = scale if isinstance(scale, ir.Value) else op.const(np.float32(scale))
        scales = op.Concat(op.Unsqueeze(scales, [0]), op.const(np.ones(1, np.float32)), axis=0)
    if attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        begin, end = _ends(op, region, operand(node, 1))
        ends = [op.Unsqueeze(v, [0]) for v in (begin, op.scalar(0.0, begin), end, op.scalar(1.0, begin))]
        roi = op.Concat(*ends, axis=0)
    kept = (
        "antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "mode", "nearest_mode",
    )  # fmt: skip
    return op.Resize(identity, roi, scales, wanted, **{name: attribute(node, name, None) for name in kept})


def _ends(op, region: tuple[float, float] | ir.Value, like: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Begin and end of a region, 0-d, in the dtype of `like`."""
    if isinstance(region, ir.Value):
        return tuple(op.cast_as(op.Gather(region, np.int64(k)), like) for k in (0, 1))
    return tuple(op.scalar(end, like) for end in region)


def _sum_blocks(op, dy: ir.Value, x: ir.Value, blocks: dict[int, int]) -> ir.Value:
    """Each element of x was repeated `blocks[axis]` times.

    The blocks of images are summed by a convolution, in two thirds of the time of a ReduceSum, and by its two threads.
    """
    channels = x.shape[1] if len(x.shape) == 4 and min(blocks) > 1 else None
    if isinstance(channels, int) and x.dtype == FLOAT:
        strides = [blocks.get(axis, 1) for axis in (2, 3)]
        return op.Conv(dy, np.ones((channels, 1, *strides), np.float32), group=channels, strides=strides)
    dims, summed = [], []
    for axis in range(len(x.shape)):
        dims += sizes(x, axis)
        if axis in blocks:
            summed.append(len(dims))
            dims.append(blocks[axis])
    return op.ReduceSum(reshape(op, dy, *dims), summed, keepdims=0)
