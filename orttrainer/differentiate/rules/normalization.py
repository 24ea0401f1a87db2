"""Normalizations. Sums over large axes are taken in float32 where the tensors are half precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.registry import vjp
from orttrainer.differentiate.rules.tools import (
    HALVES,
    attribute,
    axis_of,
    constant,
    join,
    operand,
    output,
    rank,
    shaped,
    widened,
)
from orttrainer.graph.passes.batch_norm import exact_attribute

FLOAT = ir.DataType.FLOAT


@vjp("LayerNormalization")
def layer_normalization(op, node, dy, dmean=None, drstd=None):
    """Y = S * Z + B, Z = (X - mean) * rstd  ->  dS = dY * Z,  dB = dY,  dX as in `_centered`, with G = dY * S.

    Also mean and rstd have cotangents, where a gradient is differentiated once more.
    """
    x, scale = node.inputs[:2]
    axes = _last_axes(node, x)
    wide_x, wide_scale, wide_dy = widened(op, x, scale, dy)
    if x.dtype in (FLOAT, *HALVES) and attribute(node, "stash_type", 1) == 1:
        mean, rstd = output(op, node, 1), output(op, node, 2)
    else:  # the operator's own are of lower precision
        mean, rstd = _moments(op, wide_x, axes, _epsilon(node))
        dmean, drstd = (d if d is None else op.cast_as(d, wide_x) for d in (dmean, drstd))
    normalized = op.Mul(op.Sub(wide_x, mean), rstd)
    dx = dscale = None
    if dy is not None:
        dx = _centered(op, op.Mul(wide_dy, wide_scale), normalized, rstd, axes)
        dscale = op.cast_as(op.Mul(wide_dy, normalized), scale)
    count = op.cast_as(op.size(x, axes), wide_x)
    if dmean is not None:
        share = op.Div(dmean, count)
        dx = op.expand_as(share, wide_x) if dx is None else op.Add(dx, share)
    if drstd is not None:
        dx = _plus(op, dx, op.Mul(normalized, op.Div(op.Mul(op.Neg(drstd), op.Mul(rstd, rstd)), count)))
    dbias = [dy] if operand(node, 2) is not None else []
    return [_result(op, dx, x), dscale, *dbias]


@vjp("RMSNormalization")
def rms_normalization(op, node, dy):
    """Y = S * Z, Z = X * r, r = 1 / rms(X)  ->  dS = dY * Z,  dX = r * (G - Z * mean(G * Z)), G = dY * S."""
    x, scale = node.inputs
    axes = _last_axes(node, x)
    wide_x, wide_scale, wide_dy = widened(op, x, scale, dy)
    r = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide_x, wide_x), axes, keepdims=1), _epsilon(node))))
    normalized, g = op.Mul(wide_x, r), op.Mul(wide_dy, wide_scale)
    projection = op.ReduceMean(op.Mul(g, normalized), axes, keepdims=1)
    dx = op.Mul(op.Sub(g, op.Mul(normalized, projection)), r)
    return _result(op, dx, x), op.cast_as(op.Mul(wide_dy, normalized), scale)


def _last_axes(node: ir.Node, x: ir.Value) -> list[int]:
    """The axes from attribute `axis` on; counted from the back where the rank is not known."""
    axis = attribute(node, "axis", -1)
    return list(range(axis, 0)) if x.shape is None and axis < 0 else list(range(axis_of(node, x, -1), rank(node, x)))


@vjp("InstanceNormalization")
def instance_normalization(op, node, dy):
    """LayerNormalization over the pixels of each sample and channel; one scale and bias a channel."""
    x, scale, bias = node.inputs
    dims = rank(node, x)
    axes = list(range(2, dims))
    wide_x, wide_scale, wide_dy = widened(op, x, scale, dy)
    mean, rstd = _moments(op, wide_x, axes, _epsilon(node))
    dx, dscale, dbias = _per_channel(op, wide_x, wide_dy, _as_channels(op, wide_scale, dims), mean, rstd, axes)
    return _result(op, dx, x), _sum_channels(op, dscale, scale), _sum_channels(op, dbias, bias)


@vjp("GroupNormalization")
def group_normalization(op, node, dy):
    """LayerNormalization over groups of channels; one scale and bias for a group (opset 18) or a channel (21)."""
    x, scale, bias = node.inputs
    dims, groups = rank(node, x), attribute(node, "num_groups", None)
    wide_x, wide_scale, wide_dy = widened(op, x, scale, shaped(dy, x))  # ONNX infers no shape of Y
    blocks = join(op, op.dim(x, 0), groups, -1)  # [batch, groups, the rest]
    grouped_x = op.Reshape(wide_x, blocks)
    mean, rstd = _moments(op, grouped_x, [2], _epsilon(node))
    if op.opset < 21:
        grouped_dy, grouped_scale = op.Reshape(wide_dy, blocks), _as_channels(op, wide_scale, 3)
        dx, dscale, dbias = _per_channel(op, grouped_x, grouped_dy, grouped_scale, mean, rstd, [2])
    else:
        normalized = op.Mul(op.Sub(grouped_x, mean), rstd)
        g = op.Reshape(op.Mul(wide_dy, _as_channels(op, wide_scale, dims)), blocks)
        dx = _centered(op, g, normalized, rstd, [2])
        dscale, dbias = op.Mul(wide_dy, op.reshape_as(normalized, x)), wide_dy
    return op.cast_as(op.reshape_as(dx, x), x), _sum_channels(op, dscale, scale), _sum_channels(op, dbias, bias)


@vjp("BatchNormalization")
def batch_normalization(op, node, dy, dmean=None, dvar=None):
    """Y = S * (X - mean) * rstd + B; the moments are inputs, or in training mode those of the batch.

    In training mode outputs 1 and 2 are momentum * input + (1 - momentum) * batch moment, so with
    momentum 0 they are the batch moments themselves, and are not computed again.
    """
    x, scale, bias, input_mean, input_var = node.inputs
    dims = rank(node, x)
    axes = [0, *range(2, dims)]
    wide_x, wide_scale, wide_dy, wide_mean, wide_var = widened(op, x, scale, dy, input_mean, input_var)
    training, momentum = attribute(node, "training_mode", 0), attribute(node, "momentum", 0.9)
    epsilon = exact_attribute(node, "epsilon", 1e-5)
    if not training:
        mean, var = wide_mean, wide_var
    elif momentum == 0.0:
        mean, var = widened(op, output(op, node, 1), output(op, node, 2))
    else:
        mean = var = None
    if mean is None:
        mean, rstd = _moments(op, wide_x, axes, epsilon)
    else:
        mean, rstd = (_as_channels(op, v, dims) for v in (mean, _rstd(op, var, epsilon)))
        mean, rstd = op.cast_as(mean, wide_x), op.cast_as(rstd, wide_x)
    channel_scale = op.cast_as(_as_channels(op, wide_scale, dims), wide_x)
    if dy is None:
        dx = dscale = dbias = None
    elif training:
        dx, dscale, dbias = _per_channel(op, wide_x, wide_dy, channel_scale, mean, rstd, axes)
    else:
        slope = op.Mul(channel_scale, rstd)
        dbias = op.ReduceSum(wide_dy, axes, keepdims=1)
        dscale = op.Mul(op.ReduceSum(op.Mul(wide_dy, op.Sub(wide_x, mean)), axes, keepdims=1), rstd)
        dx = op.Mul(wide_dy, slope)
        variance_slope = op.Mul(op.Mul(dscale, channel_scale), op.Mul(op.Mul(rstd, rstd), -0.5))
        dinput_mean, dinput_var = op.Neg(op.Mul(dbias, slope)), variance_slope
        moments = [_sum_channels(op, d, v) for d, v in ((dinput_mean, input_mean), (dinput_var, input_var))]
    if training:
        moments = [d if d is None else op.Mul(d, momentum) for d in (dmean, dvar)]
        moments = [op.zeros_like(v) if d is None else d for d, v in zip(moments, (input_mean, input_var))]
        count = op.cast_as(op.size(x, axes), wide_x)
        if dmean is not None:
            share = op.Div(op.Mul(op.cast_as(dmean, wide_x), 1.0 - momentum), count)
            share = _as_channels(op, share, dims)
            dx = op.expand_as(share, wide_x) if dx is None else op.Add(dx, share)
        if dvar is not None:
            share = op.Div(op.Mul(op.cast_as(dvar, wide_x), 2.0 * (1.0 - momentum)), count)
            dx = _plus(op, dx, op.Mul(op.Sub(wide_x, mean), _as_channels(op, share, dims)))
    parameters = [d if d is None else _sum_channels(op, d, v) for d, v in ((dscale, scale), (dbias, bias))]
    return [_result(op, dx, x), *parameters, *moments]


@vjp("MeanVarianceNormalization")
def mean_variance_normalization(op, node, dy):
    """Y = (X - mean) / (s + e), e = 1e-9  ->  dX = (dY - mean(dY) - (X - mean) / s * mean(dY * Y)) / (s + e).

    s is the standard deviation; where it is 0, X - mean is too, and 0 / 0 counts as 0.
    """
    (x,), (y,) = node.inputs, node.outputs
    axes = list(attribute(node, "axes", [0, 2, 3]))
    wide_x, wide_y, wide_dy = widened(op, x, y, dy)
    centered = op.Sub(wide_x, op.ReduceMean(wide_x, axes, keepdims=1))
    deviation = op.Sqrt(op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1))
    guarded = op.Where(op.Equal(deviation, op.scalar(0.0, deviation)), op.scalar(1.0, deviation), deviation)
    pull = op.Mul(op.Div(centered, guarded), op.ReduceMean(op.Mul(wide_dy, wide_y), axes, keepdims=1))
    flat = op.Sub(wide_dy, op.ReduceMean(wide_dy, axes, keepdims=1))
    return _result(op, op.Div(op.Sub(flat, pull), op.Add(deviation, 1e-9)), x)


@vjp("LpNormalization")
def lp_normalization(op, node, dy):
    """Y = X / |X|_p  ->  dX = (dY - d|X|_p * sum(dY * Y)) / |X|_p with d|X|_2 = Y, d|X|_1 = sign(X); 0 where X is 0."""
    (x,), (y,) = node.inputs, node.outputs
    axis = [axis_of(node, x, -1)]
    wide_x, wide_y, wide_dy = widened(op, x, y, dy)
    euclidean = attribute(node, "p", 2) == 2
    norm = (op.ReduceL2 if euclidean else op.ReduceL1)(wide_x, axis, keepdims=1)
    projection = op.ReduceSum(op.Mul(wide_dy, wide_y), axis, keepdims=1)
    slope = wide_y if euclidean else op.Sign(wide_x)
    vanishes = op.Equal(norm, op.scalar(0.0, norm))
    inverse = op.Where(vanishes, op.scalar(0.0, norm), op.Reciprocal(op.Where(vanishes, op.scalar(1.0, norm), norm)))
    return _result(op, op.Mul(op.Sub(wide_dy, op.Mul(slope, projection)), inverse), x)


@vjp("LRN")
def lrn(op, node, dy):
    """Y = X * s^-b, s = bias + k * sum(X^2 near)  ->  dX = dY * s^-b - 2 k b * X * sum(dY * Y / s near).

    k is alpha / size, b is beta; near are the `size` channels around one.
    """
    (x,), (y,) = node.inputs, node.outputs
    size, alpha, beta, bias = (
        attribute(node, name, default)
        for name, default in (("size", None), ("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    before, after = (size - 1) // 2, size // 2
    s = op.Add(op.Mul(_sum_near(op, op.Mul(x, x), before, after, x), alpha / size), bias)
    pull = _sum_near(op, op.Div(op.Mul(dy, y), s), after, before, x)
    return op.Sub(op.Mul(dy, op.Pow(s, op.scalar(-beta, x))), op.Mul(op.Mul(x, pull), 2 * alpha * beta / size))


# -- inside ---------------------------------------------------------------------------------


def _epsilon(node: ir.Node) -> float:
    return attribute(node, "epsilon", 1e-5)


def _rstd(op, var: ir.Value, epsilon: float) -> ir.Value:
    return op.Reciprocal(op.Sqrt(op.Add(var, epsilon)))


def _moments(op, x: ir.Value, axes: Sequence[int], epsilon: float) -> tuple[ir.Value, ir.Value]:
    """Mean and 1 / standard deviation along `axes`, which keep size 1."""
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    return mean, _rstd(op, op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1), epsilon)


def _centered(op, g: ir.Value, normalized: ir.Value, rstd: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Z = (X - mean) * rstd with cotangent G  ->  dX = rstd * (G - mean(G) - Z * mean(G * Z))."""
    projection = op.ReduceMean(op.Mul(g, normalized), axes, keepdims=1)
    centered = op.Sub(g, op.ReduceMean(g, axes, keepdims=1))
    return op.Mul(op.Sub(centered, op.Mul(normalized, projection)), rstd)


def _per_channel(op, x, dy, scale, mean, rstd, axes: Sequence[int]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """dX, dS and dB where the scale is one number for all that is normalized together.

    dX = S * rstd * (dY - mean(dY) - Z * mean(dY * Z)), with all that does not vary along `axes`
    in small tensors: dX = (dY * (S * rstd) - offset) - (X - mean) * slope.
    """
    centered = op.Sub(x, mean)
    dbias = op.ReduceSum(dy, axes, keepdims=1)
    dscale = op.Mul(op.ReduceSum(op.Mul(dy, centered), axes, keepdims=1), rstd)
    factor = op.Mul(scale, rstd)
    share = op.Div(factor, op.cast_as(op.size(x, axes), x))
    slope, offset = op.Mul(share, op.Mul(dscale, rstd)), op.Mul(share, dbias)
    dx = op.Sub(op.Sub(op.Mul(dy, factor), offset), op.Mul(centered, slope))
    return dx, dscale, dbias


def _as_channels(op, v: ir.Value, dims: int) -> ir.Value:
    """[channels] -> [channels, 1, 1, ...], to broadcast along axis 1 of `dims` axes."""
    return v if dims <= 2 else op.Unsqueeze(v, list(range(1, dims - 1)))


def _sum_channels(op, d: ir.Value, v: ir.Value) -> ir.Value:
    """Summed to [channels] = the shape of `v`."""
    axes = [k for k in range(len(d.shape)) if k != 1 or len(d.shape) == 1]
    if len(d.shape) > 1 and all(d.shape[k] == 1 for k in axes):
        return shaped(op.cast_as(op.Reshape(d, [-1]), v), v)
    return shaped(op.cast_as(op.ReduceSum(d, axes, keepdims=0), v), v)


def _sum_near(op, x: ir.Value, before: int, after: int, like: ir.Value) -> ir.Value:
    """For each channel the sum over those from `before` in front of it to `after` behind it."""
    padded = op.Pad(x, [before, after], None, [1])
    size = op.dim(like, 1)
    total = None
    for start in range(before + after + 1):
        end = op.Add(size, np.int64(start)) if constant(size) is None else constant(size) + start
        window = op.Slice(padded, [start], end, [1])
        total = window if total is None else op.Add(total, window)
    return shaped(total, like)


def _plus(op, total: ir.Value | None, more: ir.Value) -> ir.Value:
    return more if total is None else op.Add(total, more)


def _result(op, dx: ir.Value | None, x: ir.Value) -> ir.Value:
    return op.zeros_like(x) if dx is None else shaped(op.cast_as(dx, x), x)
