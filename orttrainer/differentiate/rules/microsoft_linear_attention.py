"""Attention with a state instead of all keys, and the convolution before it: com.microsoft, by its definitions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.recurrent_layers import scan
from orttrainer.differentiate.rules.tools import attribute, join, operand, positions, shaped, zeros
from orttrainer.errors import GradientError

MICROSOFT = "com.microsoft"


@definition("LinearAttention", domain=MICROSOFT)
def linear_attention(op, node):
    """S = exp(g) S' + b k (v - exp(g) S'^T k)^T,  y = s S^T q at each time, from S'; without g or b, or both, by its rule."""
    q, k, v, state, decay, beta = (operand(node, index) for index in range(6))
    _refuse(node, "state_window", 0)
    rule = attribute(node, "update_rule", "gated_delta")
    heads, key_heads = attribute(node, "q_num_heads", None), attribute(node, "kv_num_heads", None)
    group = max(heads // key_heads, 1)

    def by_time(x: ir.Value, count: int) -> ir.Value:
        """[batch, time, heads * size] -> [time, batch, heads, size]."""
        return op.Transpose(op.Reshape(x, [0, 0, count, -1]), perm=[1, 0, 2, 3])

    q, k, v = by_time(q, heads), by_time(k, key_heads), by_time(v, key_heads)
    scale = attribute(node, "scale", 0.0)
    if not scale:
        size = q.shape[3]
        known = isinstance(size, int)
        scale = 1 / math.sqrt(size) if known else op.Reciprocal(op.Sqrt(op.cast_as(op.Squeeze(op.dim(q, 3), [0]), q)))
    q = op.Mul(q, scale)
    if heads < key_heads:  # several key heads share a query head
        q = op.Gather(q, np.arange(key_heads) // (key_heads // heads), axis=2)
    q = op.Reshape(q, join(op, op.dim(q, 0), op.dim(q, 1), key_heads, group, op.dim(q, 3)))
    decay = by_time(decay, key_heads) if "gated" in rule else None  # of a head, or of each of its elements
    beta = op.Transpose(op.Unsqueeze(beta, [3]), perm=[1, 0, 2, 3]) if "delta" in rule else None
    first = state
    if first is None:
        first = zeros(op, join(op, op.dim(k, 1), key_heads, op.dim(k, 3), op.dim(v, 3)), q.dtype)

    def step(op, states, inputs):
        (s,), (q, k, v, decay, beta) = states, inputs
        if decay is not None:
            s = op.Mul(s, op.Unsqueeze(op.Exp(decay), [3]))
        k = op.Unsqueeze(k, [3])  # [batch, heads, size, 1]
        if beta is not None:
            v = op.Mul(op.Sub(v, op.ReduceSum(op.Mul(k, s), [2], keepdims=0)), beta)
        s = shaped(op.Add(s, op.Mul(k, op.Unsqueeze(v, [2]))), states[0])
        return [s], [op.MatMul(q, s)]  # [batch, heads, group, value size]

    (last,), (y,) = scan(op, step, [op.cast_as(first, q)], [q, k, v, decay, beta], False)
    y = op.Reshape(op.Transpose(y, perm=[1, 0, 2, 3, 4]), [0, 0, -1])
    return y, last if state is None else op.cast_as(last, state)


@definition("CausalConvWithState", domain=MICROSOFT)
def causal_convolution(op, node):
    """Y = f(X * W + B) with each channel by itself, and nothing from later times: what came before X, or zeros, is its frame."""
    x, w, b, past = (operand(node, index) for index in range(4))
    for name, default in (("state_window", 0), ("channels_last", 0), ("ndim", 1)):
        _refuse(node, name, default)
    dilation = attribute(node, "dilation", 1)
    before = op.Mul(op.Sub(op.dim(w, 2), [1]), np.array([dilation]))
    framed = op.Pad(x, join(op, before, 0), None, [2]) if past is None else op.Concat(past, x, axis=2)
    if isinstance(channels := w.shape[0], int):
        y = op.Conv(framed, w, *([] if b is None else [b]), group=channels, dilations=[dilation])
    else:
        steps = op.Mul(positions(op, op.dim(w, 2)), np.int64(dilation))
        read = op.Gather(framed, op.Add(op.Unsqueeze(positions(op, op.dim(x, 2)), [1]), steps), axis=2)
        y = op.ReduceSum(op.Mul(read, w), [3], keepdims=0)  # [batch, channels, time, taps] * [channels, 1, taps]
        y = y if b is None else op.Add(y, op.Unsqueeze(b, [1]))
    if attribute(node, "activation", "none") != "none":  # silu and swish are the same
        y = op.Mul(y, op.Sigmoid(y))
    present = op.Slice(framed, op.dim(x, 2), op.dim(framed, 2), [2])
    return shaped(y, x), present


def _refuse(node: ir.Node, name: str, default: int) -> None:
    if (value := attribute(node, name, default)) != default:
        raise GradientError(f"no gradient for {name}={value!r} of {node.op_type!r} node {node.name!r}; leave it out")
