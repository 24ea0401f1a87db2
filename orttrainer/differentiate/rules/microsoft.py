"""Operators of com.microsoft, which ONNX Runtime's own optimizer writes, and one that it writes into ai.onnx."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.named_activation import activated
from orttrainer.differentiate.rules.tools import attribute, axis_of, join, operand, rank, shaped, widened
from orttrainer.errors import GradientError

MICROSOFT = "com.microsoft"

# -- matrix products and convolutions ---------------------------------------------------------


@definition("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(op, node):
    """Y = alpha * A' @ B', where a prime is a transposition of the last two axes, and one of the first axes."""
    operands = [_transposed(op, node, node.inputs[k], side) for k, side in enumerate("AB")]
    y, alpha = op.MatMul(*operands), attribute(node, "alpha", 1.0)
    return y if alpha == 1.0 else op.Mul(y, alpha)


def _transposed(op, node: ir.Node, x: ir.Value, side: str) -> ir.Value:
    dims = rank(node, x)
    perm = list(range(dims))
    if dims > 2 and attribute(node, f"transBatch{side}", 0):
        perm = [*perm[1:-1], 0, perm[-1]]
    if dims > 1 and attribute(node, f"trans{side}", 0):  # a vector stays what it is
        perm[-2:] = perm[:-3:-1]
    return x if perm == list(range(dims)) else op.Transpose(x, perm=perm)


@definition("FusedGemm", domain=MICROSOFT)
def fused_gemm(op, node):
    """Y = f(alpha * A' @ B' + beta * C)."""
    attributes = {name: attribute(node, name, None) for name in ("alpha", "beta", "transA", "transB")}
    y = op.Gemm(*node.inputs, **attributes)
    parameters = [attribute(node, f"activation_{name}", None) for name in ("alpha", "beta")]
    if attribute(node, "activation", "").lower() == "selu":
        parameters[1] = attribute(node, "activation_gamma", None)
    return activated(op, node, y, attribute(node, "activation", ""), parameters)


@definition("FusedConv", domain=MICROSOFT)
def fused_conv(op, node):
    """Y = f(X * W + B + Z)."""
    x, w, b, z = (operand(node, index) for index in range(4))
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = op.Conv(x, w, *([] if b is None else [b]), **{name: attribute(node, name, None) for name in names})
    if z is not None:
        y = shaped(op.Add(y, z), y)
    if not (name := attribute(node, "activation", "")):
        return y
    return activated(op, node, y, name, attribute(node, "activation_params", ()))


@definition("CDist", domain=MICROSOFT)
def distances(op, node):
    """Y[i, j] = sum_k (A[i, k] - B[j, k])^2, or its root."""
    a, b = node.inputs
    difference = op.Sub(op.Unsqueeze(a, [1]), op.Unsqueeze(b, [0]))
    if (metric := attribute(node, "metric", "sqeuclidean")) == "sqeuclidean":
        return op.ReduceSumSquare(difference, [2], keepdims=0)
    if metric != "euclidean":
        raise GradientError(f"no gradient for the metric {metric!r} of CDist node {node.name!r}")
    return op.ReduceL2(difference, [2], keepdims=0)  # 0 at equal points


# -- normalizations ---------------------------------------------------------------------------


@definition("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(op, node):
    """Y = LayerNormalization(S), S = X + skip + bias; mean and rstd of S, and S, are outputs too."""
    x, skip, scale, shift, bias = (operand(node, index) for index in range(5))
    total = _sum(op, x, skip, bias)
    return *_layer_normalization(op, node, total, scale, shift), total


@definition("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(op, node):
    """Y = scale * S / rms(S), S = X + skip + bias, which is an output too."""
    x, skip, scale, bias = (operand(node, index) for index in range(4))
    total = _sum(op, x, skip, bias)
    y, _ = _rms_normalization(op, total, scale, [rank(node, x) - 1], attribute(node, "epsilon", 1e-12))
    return y, None, None, total


@definition("SimplifiedLayerNormalization")
def simplified_layer_normalization(op, node):
    """Y = scale * X r,  r = 1 / sqrt(mean(X^2) + epsilon), which is an output too."""
    x, scale = node.inputs
    axes = list(range(axis_of(node, x, -1), rank(node, x)))
    return _rms_normalization(op, x, scale, axes, attribute(node, "epsilon", 1e-5))


@definition("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(op, node):
    """Y = LayerNormalization(S), S = words[ids] + positions[their ids] + segments[their ids], which is an output too."""
    ids, segment_ids, words, places, segments, scale, shift, _, place_ids = (operand(node, k) for k in range(9))
    if place_ids is None:
        place = op.Slice(places, [0], op.dim(ids, 1), [0])  # [time, features]
    else:
        place = op.Gather(places, place_ids, axis=0)
    total = op.Add(op.Gather(words, ids, axis=0), place)
    if segments is not None:
        total = op.Add(total, op.Gather(segments, segment_ids, axis=0))
    y, _, _ = _layer_normalization(op, node, total, scale, shift)
    # The number of words that the mask leaves is an integer without a gradient; what counts here is its type.
    index = op.ReduceSum(op.Cast(ids, to=int(ir.DataType.INT32)), [1], keepdims=0)
    return y, index, total


def _sum(op, x: ir.Value, skip: ir.Value, bias: ir.Value | None) -> ir.Value:
    total = op.Add(x, skip) if bias is None else op.Add(op.Add(x, bias), skip)
    return shaped(total, x)


def _layer_normalization(op, node: ir.Node, x: ir.Value, scale: ir.Value, shift: ir.Value | None):
    """Y, mean and rstd."""
    operands = [x, scale] if shift is None else [x, scale, shift]
    return op.LayerNormalization(*operands, axis=-1, epsilon=attribute(node, "epsilon", 1e-12), outputs=3)


def _rms_normalization(op, x: ir.Value, scale: ir.Value, axes: list[int], epsilon: float):
    """Y and the reciprocal root mean square, in float32 for half precision."""
    wide, wide_scale = widened(op, x, scale)
    r = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes, keepdims=1), epsilon)))
    return shaped(op.cast_as(op.Mul(op.Mul(wide, r), wide_scale), scale), x), r


@definition("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_normalization(op, node):
    """Y = scale * X / rms(X) * a(gate), over each group of as many elements as the scale has; a is silu or sigmoid."""
    x, scale, gate = node.inputs
    dims = rank(node, x)
    grouped = op.Reshape(x, join(op, [0] * (dims - 1), -1, op.dim(scale, 0)))
    y, _ = _rms_normalization(op, grouped, scale, [dims], attribute(node, "epsilon", 1e-5))
    (wide,) = widened(op, gate)
    a = op.Sigmoid(wide)
    if attribute(node, "activation", "silu") != "sigmoid":  # swish is silu
        a = op.Mul(wide, a)
    return op.Mul(op.reshape_as(y, x), op.cast_as(a, x))


@definition("GatedAdd", domain=MICROSOFT)
def gated_add(op, node):
    """Z = X + Y gate."""
    x, y, gate = node.inputs
    return shaped(op.Add(x, op.Mul(y, gate)), x)


@definition("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(op, node):
    """Y = Z sigmoid(Z), Z = scale X; the scale is an input, or else alpha."""
    x, scale = operand(node, 0), operand(node, 1)
    if scale is None:
        z = op.Mul(x, attribute(node, "alpha", 1.0))
    else:
        z = op.Mul(x, op.Reshape(op.cast_as(scale, x), np.empty(0, np.int64)))
    return op.Mul(z, op.Sigmoid(z))


@definition("LinearAttentionGate", domain=MICROSOFT)
def linear_attention_gate(op, node):
    """decay = scale softplus(A + bias),  beta = sigmoid(B)."""
    a, bias, scale, b = (operand(node, index) for index in range(4))
    decay = op.Mul(scale, op.Softplus(op.Add(op.cast_as(a, bias), bias)))
    return op.cast_as(decay, a), None if b is None else op.Sigmoid(b)


# -- old names of what ai.onnx has by now -----------------------------------------------------


@definition("Trilu", domain=MICROSOFT)
def trilu(op, node):
    """Y = a triangle of X, else 0."""
    return op.Trilu(*node.inputs, upper=attribute(node, "upper", 1))


@definition("Pad", domain=MICROSOFT)
def pad(op, node):
    """Y = X with a frame."""
    x, pads, value = (operand(node, index) for index in range(3))
    if value is not None:
        value = op.Reshape(value, np.empty(0, np.int64))
    return op.Pad(x, op.Reshape(pads, [-1]), value, mode=attribute(node, "mode", "constant"))


@definition("GatherND", domain=MICROSOFT)
def gather_nd(op, node):
    """Y[i] = X[indices[i]]."""
    x, indices = node.inputs
    return op.GatherND(x, op.Cast(indices, to=int(ir.DataType.INT64)))


@definition("GridSample", domain=MICROSOFT)
def grid_sample(op, node):
    """Y[p] = X at grid[p], interpolated."""
    names = ("mode", "padding_mode", "align_corners")
    attributes = {name: attribute(node, name, None) for name in names}
    if op.opset >= 20 and attributes["mode"] in ("bilinear", "bicubic"):
        attributes["mode"] = attributes["mode"].removeprefix("bi")
    return op.GridSample(*node.inputs, **attributes)


@definition("ExpandDims", domain=MICROSOFT)
def expand_dims(op, node):
    """Y = X with one more axis of size 1."""
    x, axis = node.inputs
    # Not Reshape(Cast): ONNX Runtime would make one Reshape of it and the Squeeze that reads it as axes.
    axes = op.Cast(op.Reshape(axis, [1]), to=int(ir.DataType.INT64))
    return op.Unsqueeze(x, axes)
