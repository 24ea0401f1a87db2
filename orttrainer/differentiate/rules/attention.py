"""Attention and rotary embeddings, by their definitions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.differentiate.definition import definition
from orttrainer.differentiate.rules.tools import attribute, join, operand, positions, rank, shaped
from orttrainer.graph.builder import same_dim

# -- rotary embeddings ------------------------------------------------------------------------


@definition("RotaryEmbedding")
def rotary_embedding(op, node):
    """Y = (cos X1 - sin X2, sin X1 + cos X2) for each pair (X1, X2) of a head's elements, at the angle of its position."""
    x, cos, sin = node.inputs[:3]
    if (ids := operand(node, 3)) is not None:
        cos, sin = op.Gather(cos, ids, axis=0), op.Gather(sin, ids, axis=0)  # [batch, time, pairs]
    heads = attribute(node, "num_heads", 0) if rank(node, x) == 3 else None
    width = attribute(node, "rotary_embedding_dim", 0)
    return rotated(op, x, cos, sin, heads, width, attribute(node, "interleaved", 0))


def rotated(op, x, cos, sin, heads: int | None, width: int, interleaved: int) -> ir.Value:
    """Turn the first `width` (0: all) elements of each head.

    Args:
        x: [batch, heads, time, head size]; or [batch, time, heads * head size] if `heads` is given.
        cos, sin: [batch or 1, time, pairs].
        interleaved: pairs are neighbours, else they are in two halves.
    """
    y = x if heads is None else op.Reshape(x, [0, 0, heads, -1])
    cos, sin = (op.Unsqueeze(c, [1 if heads is None else 2]) for c in (cos, sin))
    rest = []
    if width and y.shape[3] != width:
        rest = [op.Slice(y, [width], [np.iinfo(np.int64).max], [3])]
        y = op.Slice(y, [0], [width], [3])
    if interleaved:
        y = op.Reshape(y, [0, 0, 0, -1, 2])
        cos, sin = op.Unsqueeze(cos, [-1]), op.Unsqueeze(sin, [-1])
    a, b = op.Split(y, axis=-1, num_outputs=2, outputs=2)
    y = op.Concat(op.Sub(op.Mul(cos, a), op.Mul(sin, b)), op.Add(op.Mul(sin, a), op.Mul(cos, b)), axis=-1)
    if interleaved:
        y = op.Reshape(y, [0, 0, 0, -1])
    if rest:
        y = op.Concat(y, *rest, axis=-1)
    return shaped(y if heads is None else op.Reshape(y, [0, 0, -1]), x)


# -- attention --------------------------------------------------------------------------------


@definition("Attention")
def attention(op, node):
    """Y = P V,  P = softmax(s Q K^T + mask), with a softcap and windows; each key head serves a group of query heads."""
    q, k, v, mask, past_k, past_v, lengths = (operand(node, index) for index in range(7))
    flat = rank(node, q) == 3
    if flat:
        q = split_heads(op, q, attribute(node, "q_num_heads", None))
        k, v = (split_heads(op, x, attribute(node, "kv_num_heads", None)) for x in (k, v))
    offset = None
    if past_k is not None:
        offset = op.dim(past_k, 2)
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
    elif lengths is not None:
        offset = op.Sub(op.Reshape(lengths, [-1, 1, 1, 1]), op.dim(q, 2))
    raw = capped = scores(op, q, k, attribute(node, "scale", None))
    if softcap := attribute(node, "softcap", 0.0):
        capped = op.Mul(op.Tanh(op.Mul(raw, 1 / softcap)), softcap)
    allowed = [_padded(op, mask, op.dim(k, 2), k, False)] if mask is not None and mask.dtype == ir.DataType.BOOL else []
    window = (attribute(node, "left_window_size", -1), attribute(node, "right_window_size", -1))
    may_be_empty = bool(mask is not None or lengths is not None or max(window) >= 0)
    allowed += _places(op, q, k, offset, attribute(node, "is_causal", 0), *window)
    if lengths is not None:
        allowed.append(op.Less(positions(op, op.dim(k, 2)), op.Reshape(lengths, [-1, 1, 1, 1])))
    bias = None if mask is None or mask.dtype == ir.DataType.BOOL else _padded(op, mask, op.dim(k, 2), k, -math.inf)
    for a in allowed:
        part = op.Where(a, op.scalar(0.0, q), op.scalar(-math.inf, q))
        bias = part if bias is None else op.Add(bias, part)
    masked = capped if bias is None else shaped(op.Add(capped, bias), capped)
    p = masked
    if precision := attribute(node, "softmax_precision", 0):
        p = op.Cast(p, to=precision)
    empty = op.Equal(op.ReduceMax(bias, [-1], keepdims=1), op.scalar(-math.inf, q)) if may_be_empty else None
    p = op.cast_as(softmax_of_rows(op, p, empty), q)
    y = weighted(op, p, v)
    modes = [raw, capped, masked, p]
    return merge_heads(op, y) if flat else y, k, v, modes[attribute(node, "qk_matmul_output_mode", 0)]


def split_heads(op, x: ir.Value, heads: int) -> ir.Value:
    """[batch, time, heads * size] -> [batch, heads, time, size]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def merge_heads(op, x: ir.Value) -> ir.Value:
    """[batch, heads, time, size] -> [batch, time, heads * size]."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def scores(op, q: ir.Value, k: ir.Value, scale: float | None) -> ir.Value:
    """scale * Q K^T, [batch, query heads, query time, key time]; by default the scale is 1 / sqrt(size of a head)."""
    if scale is None:
        size = q.shape[3]
        if isinstance(size, int):
            scale = 1 / math.sqrt(size)
        else:
            scale = op.Reciprocal(op.Sqrt(op.cast_as(op.Squeeze(op.dim(q, 3), [0]), q)))
    groups = _grouped(op, op.Mul(q, scale), k)
    products = op.MatMul(groups, op.Transpose(k, perm=[0, 1, 3, 2]))
    return _as(op.Reshape(products, join(op, op.dim(q, 0), op.dim(q, 1), -1, op.dim(k, 2))), q, k)


def weighted(op, p: ir.Value, v: ir.Value) -> ir.Value:
    """P V, [batch, query heads, query time, size of a value head]."""
    p = op.cast_as(p, v)
    products = op.MatMul(_grouped(op, p, v), v)
    return _as(op.Reshape(products, join(op, op.dim(p, 0), op.dim(p, 1), -1, op.dim(v, 3))), p, v, 3)


def _grouped(op, x: ir.Value, keys: ir.Value) -> ir.Value:
    """[batch, query heads, time, size] -> [batch, key heads, query heads of one key head * time, size]."""
    if same_dim(x.shape[1], keys.shape[1]):
        return x
    y = op.Reshape(x, join(op, op.dim(x, 0), op.dim(keys, 1), -1, op.dim(x, 3)))
    y.shape = ir.Shape([x.shape[0], keys.shape[1], y.shape[2], x.shape[3]])
    return y


def softmax_of_rows(op, x: ir.Value, empty: ir.Value | None) -> ir.Value:
    """Softmax along the last axis; 0 in the `empty` rows, through which no cotangent passes."""
    if empty is None:
        return op.Softmax(x, axis=-1)
    zero = op.scalar(0.0, x)
    return op.Where(empty, zero, op.Softmax(op.Where(empty, zero, x), axis=-1))


def _as(y: ir.Value, left: ir.Value, right: ir.Value, axis: int = 2) -> ir.Value:
    y.shape = ir.Shape([*left.shape.dims[:3], right.shape.dims[axis]])
    return y


def _places(op, q, k, offset: ir.Value | None, causal: int, left: int, right: int) -> list[ir.Value]:
    """What each query may attend to by its place: bools that broadcast to [batch, heads, query time, key time]."""
    if not causal and left < 0 and right < 0:
        return []
    i = op.Unsqueeze(positions(op, op.dim(q, 2)), [1])
    i, j = i if offset is None else op.Add(i, offset), positions(op, op.dim(k, 2))
    found = [op.LessOrEqual(j, i)] if causal else []
    if left >= 0:
        found.append(op.GreaterOrEqual(j, op.Sub(i, np.int64(left))))
    if right >= 0:
        found.append(op.LessOrEqual(j, op.Add(i, np.int64(right))))
    return found


def _padded(op, mask: ir.Value, length: ir.Value, k: ir.Value, value) -> ir.Value:
    """A mask may be shorter than the keys: those behind its end are masked."""
    dims = len(mask.shape)
    if dims and same_dim(mask.shape[-1], k.shape[2]):
        return mask
    pads = join(op, [0] * (2 * dims - 1), op.Sub(length, op.dim(mask, -1)))
    return op.Pad(mask, pads, op.const(np.array(value, mask.dtype.numpy())))


# -- caches -----------------------------------------------------------------------------------


@definition("TensorScatter")
def tensor_scatter(op, node):
    """Y = the cache, with the slices of an update from each sample's index on, around the end if it is circular."""
    cache, update, first = (operand(node, index) for index in range(3))
    dims = rank(node, cache)
    axis = attribute(node, "axis", -2) % dims
    place = op.Unsqueeze(positions(op, op.dim(update, axis)), [k for k in range(dims) if k != axis])
    if first is not None:
        place = op.Add(place, op.Unsqueeze(first, list(range(1, dims))))
    if attribute(node, "mode", "linear") == "circular":
        place = op.Mod(place, op.dim(cache, axis))
    return shaped(op.ScatterElements(cache, op.expand_as(place, update), update, axis=axis), cache)
