"""Normalizations and means of ONNX models; torch's exporters write others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.rules.tools import attribute
from orttrainer.differentiate.rules.unfold import padded, taps_along
from orttrainer.differentiate.rules.windows import ints

__all__ = ["FORMS"]


def instance_normalization(op, node: ir.Node) -> ir.Value | None:
    """(x - mean) / sqrt(variance + epsilon) of each channel of each image, times a scale, and a bias."""
    x, *parameters = node.inputs
    if x.shape is None:
        return None
    spatial = list(range(2, len(x.shape)))
    scale, bias = (op.Reshape(value, ints([-1, *[1] * len(spatial)])) for value in parameters)
    centered = op.Sub(x, op.ReduceMean(x, spatial, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), spatial, keepdims=1)
    deviation = op.Sqrt(op.Add(variance, attribute(node, "epsilon", float(np.float32(1e-5)))))  # as attributes are
    return op.Add(op.Mul(op.Div(centered, deviation), scale), bias)


def lrn(op, node: ir.Node) -> ir.Value:
    """x / (bias + alpha / size * the sum of squares of neighbouring channels)^beta."""
    (x,) = node.inputs
    size = attribute(node, "size", None)
    before = (size - 1) // 2
    squares = padded(op, op.Mul(x, x), [before], [size - 1 - before], first=1)
    taps = taps_along(op, squares, 1, range(size), 1)
    total = op.Mul(op.Sum(*taps), attribute(node, "alpha", 1e-4) / size)
    base = op.Add(total, attribute(node, "bias", 1.0))
    return op.Div(x, op.Pow(base, op.scalar(attribute(node, "beta", 0.75), x)))


def mean(op, node: ir.Node) -> ir.Value:
    """The sum of all, divided by how many there are."""
    return op.Mul(op.Sum(*node.inputs), 1 / len(node.inputs))


FORMS = {"InstanceNormalization": instance_normalization, "LRN": lrn, "Mean": mean}
