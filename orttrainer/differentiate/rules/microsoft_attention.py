"""Attention of com.microsoft, by its definitions: as the kernels compute it on the CPU, masks and all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.attention import (
    merge_heads,
    rotated,
    scores,
    softmax_of_rows,
    split_heads,
    weighted,
)
from orttrainer.differentiate.rules.tools import attribute, constant, join, operand, positions, rank
from orttrainer.errors import GradientError
from orttrainer.graph.builder import same_dim

MICROSOFT = "com.microsoft"


@definition("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(op, node):
    """Y = P V,  P = softmax(s Q K^T + mask + bias), of Q, K, V each plus its part of another bias."""
    q, k, v, bias, mask, added, past_k, past_v, past_length, beams = (operand(node, index) for index in range(10))
    if k is None or v is None or rank(node, q) != 3 or rank(node, k) == 5:
        raise _refused(node, "packed Q, K, V", "give the query, the key and the value apart")
    if past_length is not None or beams is not None:
        raise _refused(node, "a buffer shared by past and present", "leave out its inputs after past_value")
    heads = attribute(node, "num_heads", None)
    given = rank(node, k) == 4  # K and V are of [batch, heads, time, size] already
    if bias is not None:
        hidden = op.dim(q, 2)
        ends = [[0], hidden, op.Mul(hidden, np.int64(2)), op.dim(bias, 0)]
        parts = [op.Slice(bias, first, last, [0]) for first, last in itertools.pairwise(ends)]
        q = op.Add(q, parts[0])
        if not given:
            k, v = op.Add(k, parts[1]), op.Add(v, parts[2])
    q = split_heads(op, q, heads)
    if not given:
        k, v = split_heads(op, k, heads), split_heads(op, v, heads)
    if past_k is not None:
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
    return _attended(op, node, q, k, v, past_k, mask, added), k, v


@definition("Attention", domain=MICROSOFT)
def attention(op, node):
    """[Q K V] = X W + B,  Y = P V,  P = softmax(s Q K^T + mask + bias)."""
    x, w, b, mask, past, added, past_length = (operand(node, index) for index in range(7))
    if past_length is not None or attribute(node, "past_present_share_buffer", 0):
        raise _refused(node, "a buffer shared by past and present", "leave out past_sequence_length")
    if attribute(node, "do_rotary", 0):
        raise _refused(node, "do_rotary", "use MultiHeadAttention after RotaryEmbedding")
    heads, projected = attribute(node, "num_heads", None), op.MatMul(x, w)
    if b is not None:
        projected = op.Add(projected, b)
    if sizes := attribute(node, "qkv_hidden_sizes", None):
        parts = op.Split(projected, list(sizes), axis=2, outputs=3)
    else:
        parts = op.Split(projected, axis=2, num_outputs=3, outputs=3)
    q, k, v = (split_heads(op, part, heads) for part in parts)
    past_k = None
    if past is not None:
        past_k, past_v = (op.Squeeze(part, [0]) for part in op.Split(past, axis=0, num_outputs=2, outputs=2))
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
    y = _attended(op, node, q, k, v, past_k, mask, added)
    if len(node.outputs) == 1:  # K and V may differ in size
        return y
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


@definition("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(op, node):
    """Y = P V,  P = softmax of (s Q K^T + bias) and a sink, of turned Q and K; causal, and within each sequence's length.

    Of the first step of a sequence, which is what is trained: with no past.
    """
    q, k, v, past_k, _, lengths, _, cos, sin, ids, added, sink, k_scale, _, q_norm, *_ = (
        operand(node, index) for index in range(16)
    )
    if past_k is not None and (rank(node, past_k) != 4 or past_k.shape[2] != 0):
        raise _refused(node, "a past that may not be empty", "leave out past_key and past_value, or give them length 0")
    for given, what in ((k_scale, "a quantised cache"), (q_norm, "q_norm_weight")):
        if given is not None:
            raise _refused(node, what, "leave it out")
    for name in ("qk_output", "sliding_window_cache"):
        if attribute(node, name, 0):
            raise _refused(node, name, "leave it out")
    heads, key_heads = attribute(node, "num_heads", None), attribute(node, "kv_num_heads", None)
    if k is None:  # packed
        size = op.Div(op.dim(q, 2), np.array([heads + 2 * key_heads]))
        sizes = op.Mul(size, np.array([heads, key_heads, key_heads]))
        q, k, v = op.Split(q, sizes, axis=2, outputs=3)
    q, k, v = split_heads(op, q, heads), split_heads(op, k, key_heads), split_heads(op, v, key_heads)
    i, j = (positions(op, op.dim(x, 2)) for x in (q, k))
    if attribute(node, "do_rotary", 0):
        place = op.Unsqueeze(i, [0])
        if ids is not None:  # the kernels look at the first only
            place = op.Add(place, op.Slice(op.Reshape(ids, [-1]), [0], [1], [0]))
        angles = [op.Gather(cache, place, axis=0) for cache in (cos, sin)]
        q, k = (rotated(op, x, *angles, None, 0, attribute(node, "rotary_interleaved", 0)) for x in (q, k))
    s = scores(op, q, k, attribute(node, "scale", 0.0) or None)
    if softcap := attribute(node, "softcap", 0.0):
        s = op.Mul(op.Tanh(op.Mul(s, 1 / softcap)), softcap)
    if added is not None:
        s = op.Add(s, added)
    ends = op.Reshape(op.Add(op.Cast(lengths, to=int(ir.DataType.INT64)), np.int64(1)), [-1, 1, 1, 1])
    allowed, i = op.Less(j, ends), op.Unsqueeze(i, [1])
    if attribute(node, "causal", 1):
        allowed = op.And(allowed, op.LessOrEqual(j, i))
    if (window := attribute(node, "local_window_size", -1)) > 0:
        allowed = op.And(allowed, op.Greater(j, op.Sub(i, np.int64(window))))
    s = op.Where(allowed, s, op.scalar(-math.inf, s))
    if sink is None and attribute(node, "smooth_softmax", -1) == 1:
        sink = op.const(np.zeros(heads), q.dtype)
    if sink is not None:  # one more key, that has no value
        column = op.Expand(op.Unsqueeze(sink, [0, 2, 3]), join(op, op.dim(q, 0), 1, op.dim(q, 2), 1))
        p = op.Slice(op.Softmax(op.Concat(s, column, axis=3), axis=-1), [0], op.dim(k, 2), [3])
    else:  # behind the end of a sequence a window may be empty
        empty = op.Equal(op.ReduceMax(s, [-1], keepdims=1), op.scalar(-math.inf, s)) if window > 0 else None
        p = softmax_of_rows(op, s, empty)
    return merge_heads(op, weighted(op, p, v)), k, v


@definition("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(op, node):
    """Y = (cos X1 - sin X2, sin X1 + cos X2) for each pair (X1, X2) of a head's elements, at the angle of its position."""
    x, ids, cos, sin = node.inputs
    if attribute(node, "is_packed_batching", 0):
        raise _refused(node, "is_packed_batching", "give the sequences as a batch")
    flat, width = rank(node, x) == 3, attribute(node, "rotary_embedding_dim", 0)
    if rank(node, ids) == 1:  # the first position of every sequence
        ids = op.Unsqueeze(op.Add(positions(op, op.dim(x, 1 if flat else 2)), ids), [0])
    cos, sin = op.Gather(cos, ids, axis=0), op.Gather(sin, ids, axis=0)
    heads = None
    if flat and not (heads := attribute(node, "num_heads", 0)):
        size, hidden = constant(op.dim(cos, -1)), constant(op.dim(x, 2))
        if size is None or hidden is None:
            raise _refused(node, "num_heads=0 where the size of a head is not known", "set num_heads")
        heads = int(hidden[0]) // (2 * int(size[0]))
    return rotated(op, x, cos, sin, heads, width, attribute(node, "interleaved", 0))


def _attended(op, node: ir.Node, q, k, v, past_k, mask, added) -> ir.Value:
    """[batch, time, heads * size], of Q, K, V as [batch, heads, time, size]."""
    s = scores(op, q, k, attribute(node, "scale", 0.0) or None)
    if mask is not None:
        value = op.scalar(attribute(node, "mask_filter_value", -10000.0), q)  # added, and of finite size
        s = op.Add(s, op.Where(_kept(op, node, mask, k), op.scalar(0.0, q), value))
    if attribute(node, "unidirectional", 0):
        times = op.dim(q, 2)
        i, j = op.Unsqueeze(positions(op, times), [1]), positions(op, op.dim(k, 2))
        ahead = op.LessOrEqual(j, i if past_k is None else op.Add(i, op.dim(past_k, 2)))
        last = op.Equal(i, op.Sub(times, np.int64(1)))  # it sees all keys, also if there are more than queries
        allowed = op.Or(ahead, last)
        s = op.Add(s, op.Where(allowed, op.scalar(0.0, q), op.scalar(-math.inf, q)))
    if added is not None:
        s = op.Add(s, added)
    return merge_heads(op, weighted(op, op.Softmax(s, axis=-1), v))


def _kept(op, node: ir.Node, mask: ir.Value, k: ir.Value) -> ir.Value:
    """Which keys are no padding: bools that broadcast to [batch, heads, query time, key time]."""
    dims = rank(node, mask)
    if dims in (2, 3):
        return op.Unsqueeze(op.Greater(mask, 0), [1, 2] if dims == 2 else [1])
    rows, batch = mask.shape[0] if dims == 1 else None, k.shape[0]
    known = isinstance(rows, int) and isinstance(batch, int)
    if dims != 1 or (known and rows not in (batch, 2 * batch)):
        raise _refused(node, f"a mask of shape {mask.shape}", "give it as [batch, time] or [batch, query time, time]")
    numbers, bounds = positions(op, op.dim(k, 2)), op.Cast(mask, to=int(ir.DataType.INT64))
    if same_dim(rows, batch):
        return op.Less(numbers, op.Reshape(bounds, [-1, 1, 1, 1]))
    # The ends, and the starts if there are any; a mask of other numbers has not the size that it is reshaped to.
    count = op.Add(op.Cast(op.Greater(op.dim(mask, 0), op.dim(k, 0)), to=int(ir.DataType.INT64)), [1])
    bounds = op.Reshape(bounds, join(op, count, op.dim(k, 0)))
    bounds = op.Concat(bounds, op.Expand(np.int64(0), join(op, 1, op.dim(k, 0))), axis=0)
    last, first = (op.Reshape(op.Gather(bounds, np.int64(row), axis=0), [-1, 1, 1, 1]) for row in (0, 1))
    return op.And(op.Less(numbers, last), op.GreaterOrEqual(numbers, first))


def _refused(node: ir.Node, what: str, instead: str) -> GradientError:
    return GradientError(f"no gradient for {what} of {node.op_type!r} node {node.name!r}; {instead}")
