"""Normalizations over many numbers, of which ONNX Runtime's kernels lose digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array
from orttrainer.graph.scopes import put_all_in_place
from orttrainer.graph.sizes import size_at_hand

MANY = 2**16  # numbers that a kernel may normalize at once: it is then off by 1e-6 to 4e-6

Values = tuple[ir.Value, ...]


class LongNormsPass(ir.passes.InPlacePass):
    """LayerNormalization(x) -> (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias, where it goes over many numbers.

    Likewise InstanceNormalization, GroupNormalization and MeanVarianceNormalization of float32. ONNX Runtime's kernels add the
    numbers up one by one: of a million the result was off by 6e-5, of 4 million by 5e-4 (1.31.1), where PyTorch is by 1e-6.
    Of means `LongSumsPass` takes care, and the gradient has the same ones. A GroupNormalization never stays: ONNX Runtime
    subtracts the square of its mean from the mean of the squares, of which little is left where the mean is large.

    Args:
        sizes: of symbolic dimensions, in the batch at hand; others may be large.
        at_once: how many numbers a kernel may normalize.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None, at_once: float = MANY):
        super().__init__()
        self._sizes, self._at_once = sizes or {}, at_once

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in _normalizations(model, _AXES) if self._is_long(node)]
        return put_all_in_place(
            model, "norm", nodes, lambda op, node: _FORMS[node.op_type](op, node, _AXES[node.op_type](node))
        )

    def _is_long(self, node: ir.Node) -> bool:
        sizes = [size_at_hand(node.inputs[0].shape[axis], self._sizes) for axis in _AXES[node.op_type](node)]
        return node.op_type == "GroupNormalization" or None in sizes or math.prod(sizes) > self._at_once


class LongBatchNormsPass(ir.passes.InPlacePass):
    """The same of a BatchNormalization that trains on large images: its kernel adds up the pixels of each one by one.

    To come behind what lets it work in blocks of channels.

    Args:
        sizes: of symbolic dimensions, in the batch at hand; others may be large, but for the number of images.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None):
        super().__init__()
        self._sizes = sizes or {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        trained = [
            n for n in _normalizations(model, ["BatchNormalization"]) if n.attributes.get_int("training_mode", 0)
        ]
        return put_all_in_place(
            model, "batch_norm", [node for node in trained if self._is_long(node)], _batch_normalization
        )

    def _is_long(self, node: ir.Node) -> bool:
        images, _, *pixels = (size_at_hand(size, self._sizes) for size in node.inputs[0].shape.dims)
        return None in pixels or max(images or 0, math.prod(pixels)) > MANY


def _normalizations(model: ir.Model, op_types: Iterable[str]) -> list[ir.Node]:
    """Of float32, of known rank; of GroupNormalization and the like ONNX has no kernels, but for this type."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type in op_types and not node.domain]
    return [n for n in nodes if n.inputs[0].dtype == ir.DataType.FLOAT and n.inputs[0].shape is not None]


# ---------------------------------------------------------------- what goes into one mean


def _last_axes(node: ir.Node) -> list[int]:
    rank = len(node.inputs[0].shape)
    return list(range(node.attributes.get_int("axis", -1) % rank, rank))


def _pixels(node: ir.Node) -> list[int]:
    return list(range(2, len(node.inputs[0].shape)))


def _given_axes(node: ir.Node) -> list[int]:
    return sorted(axis % len(node.inputs[0].shape) for axis in node.attributes.get_ints("axes", [0, 2, 3]))


_AXES: dict[str, Callable[[ir.Node], list[int]]] = {
    "GroupNormalization": _pixels,
    "InstanceNormalization": _pixels,
    "LayerNormalization": _last_axes,
    "MeanVarianceNormalization": _given_axes,
}

# ---------------------------------------------------------------- the forms, as the gradients have them


def _layer_normalization(op: Builder, node: ir.Node, axes: Sequence[int]) -> Values:
    x, scale, *bias = node.inputs
    mean, centered, rstd = _moments(op, node, x, axes)
    return _affine(op, op.Mul(centered, rstd), scale, *bias), mean, rstd


def _instance_normalization(op: Builder, node: ir.Node, axes: Sequence[int]) -> Values:
    x, scale, bias = node.inputs
    _, centered, rstd = _moments(op, node, x, axes)
    column = [-1] + [1] * len(axes)
    factor = rstd if _is_all(scale, 1.0) else op.Mul(op.Reshape(scale, column), rstd)  # of groups they have none
    scaled = op.Mul(centered, factor)
    return (scaled if _is_all(bias, 0.0) else op.Add(scaled, op.Reshape(bias, column)),)


def _group_normalization(op: Builder, node: ir.Node, axes: Sequence[int]) -> Values:
    x, scale, bias = node.inputs
    groups = op.Reshape(x, [0, node.attributes.get_int("num_groups"), -1])
    _, centered, rstd = _moments(op, node, groups, [2])
    normalized = op.Mul(centered, rstd)
    if op.opset < 21:  # a scale and a bias for each group
        return (op.reshape_as(_affine(op, normalized, *(op.Reshape(v, [-1, 1]) for v in (scale, bias))), x),)
    column = [-1] + [1] * len(axes)
    return (_affine(op, op.reshape_as(normalized, x), *(op.Reshape(v, column) for v in (scale, bias))),)


def _mean_variance_normalization(op: Builder, node: ir.Node, axes: Sequence[int]) -> Values:
    _, centered, variance = _mean_and_variance(op, node.inputs[0], axes)
    return (op.Div(centered, op.Add(op.Sqrt(variance), 1e-9)),)


def _batch_normalization(op: Builder, node: ir.Node) -> Values:
    x, scale, bias, *running = node.inputs
    axes = [0, *_pixels(node)]
    mean, centered, variance = _mean_and_variance(op, x, axes)
    rstd = _reciprocal_deviation(op, node, variance)
    column = [-1] + [1] * len(_pixels(node))
    y = _affine(op, centered, op.Mul(op.Reshape(scale, column), rstd), op.Reshape(bias, column))
    moments = [op.Squeeze(value, axes) for value in (mean, variance)]
    if momentum := node.attributes.get_float("momentum", 0.9):
        pairs = zip(running, moments)
        moments = [op.Add(op.Mul(old, momentum), op.Mul(op.cast_as(new, old), 1.0 - momentum)) for old, new in pairs]
    return y, *moments


_FORMS = {
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "MeanVarianceNormalization": _mean_variance_normalization,
}


def _moments(op: Builder, node: ir.Node, x: ir.Value, axes: Sequence[int]) -> Values:
    """The mean, x - mean, and 1 / the standard deviation."""
    mean, centered, variance = _mean_and_variance(op, x, axes)
    return mean, centered, _reciprocal_deviation(op, node, variance)


def _mean_and_variance(op: Builder, x: ir.Value, axes: Sequence[int]) -> Values:
    """The mean, x - mean, and the mean of its square."""
    mean = op.ReduceMean(x, list(axes), keepdims=1)
    centered = op.Sub(x, mean)
    return mean, centered, op.ReduceMean(op.Mul(centered, centered), list(axes), keepdims=1)


def _reciprocal_deviation(op: Builder, node: ir.Node, variance: ir.Value) -> ir.Value:
    return op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))


def _affine(op: Builder, x: ir.Value, scale: ir.Value, bias: ir.Value | None = None) -> ir.Value:
    scaled = op.Mul(x, scale)
    return scaled if bias is None else op.Add(scaled, bias)


def _is_all(value: ir.Value, number: float) -> bool:
    constant = constant_array(value)
    return constant is not None and bool(np.all(constant == number))
