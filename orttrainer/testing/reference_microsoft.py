"""Operators of com.microsoft in NumPy, for the float64 checks of `orttrainer.testing`.

They follow the documentation of ONNX Runtime's contributed operators; a test compares them with its kernels.
"""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv import _conv_implementation

from orttrainer.testing import reference_windows
from orttrainer.testing.reference_functions import named_activation

__all__ = ["OPS"]

DOMAIN = "com.microsoft"


class _Microsoft(OpRun):
    """Attributes that the node has, by name: these operators have no schema here to take defaults from."""

    op_domain = DOMAIN

    def _run(self, *inputs, **given):
        names = {attribute.name for attribute in self.onnx_node.attribute}  # not those of a namesake in ai.onnx
        given = {name: value for name, value in given.items() if name in names}
        found = self.compute(*inputs, **given)
        return found[: len(self.onnx_node.output)] if isinstance(found, tuple) else (found,)


class FusedMatMul(_Microsoft):
    def compute(self, a, b, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0):
        a, b = (np.moveaxis(x, 0, -2) if swap else x for x, swap in ((a, transBatchA), (b, transBatchB)))
        a, b = (x.swapaxes(-1, -2) if swap and x.ndim > 1 else x for x, swap in ((a, transA), (b, transB)))
        return np.asarray(alpha * (a @ b), a.dtype)


class TransposeMatMul(FusedMatMul):
    op_domain = DOMAIN


class FusedGemm(_Microsoft):
    def compute(self, a, b, c=0.0, alpha=1.0, beta=1.0, transA=0, transB=0, activation="", **given):
        y = alpha * (a.T if transA else a) @ (b.T if transB else b) + beta * c
        first, second = given.get("activation_alpha"), given.get("activation_beta", given.get("activation_gamma"))
        return named_activation(activation, y.astype(a.dtype), first, second)


class FusedConv(_Microsoft):
    def compute(self, x, w, b=None, z=None, activation="", activation_params=(), **given):
        defaults = {"auto_pad": "NOTSET", "dilations": None, "group": 1, "kernel_shape": w.shape[2:], "pads": None}
        y = _conv_implementation(x, w, b, **(defaults | {"strides": None} | given)).astype(
            x.dtype
        )  # ONNX 1.21 makes float64
        y = y if z is None else y + z
        return named_activation(activation, y, *activation_params) if activation else y


class CDist(_Microsoft):
    def compute(self, a, b, metric="sqeuclidean"):
        y = ((a[:, None] - b[None]) ** 2).sum(2)
        return np.sqrt(y) if metric == "euclidean" else y


def layer_normalization(x, scale, shift, epsilon):
    mean, rstd = x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return (x - mean) * rstd * scale + (0 if shift is None else shift), mean, rstd


def rms_normalization(x, scale, axes, epsilon):
    r = 1 / np.sqrt((x * x).mean(axes, keepdims=True) + epsilon)
    return x * r * scale, r


class SkipLayerNormalization(_Microsoft):
    def compute(self, x, skip, scale, shift=None, bias=None, epsilon=1e-12):
        total = x + skip + (0 if bias is None else bias)
        return *layer_normalization(total, scale, shift, epsilon), total


class SkipSimplifiedLayerNormalization(_Microsoft):
    def compute(self, x, skip, scale, bias=None, epsilon=1e-12):
        total = x + skip + (0 if bias is None else bias)
        return rms_normalization(total, scale, (-1,), epsilon)[0], None, None, total


class SimplifiedLayerNormalization(_Microsoft):
    op_domain = ""

    def compute(self, x, scale, axis=-1, epsilon=1e-5, stash_type=1):
        return rms_normalization(x, scale, tuple(range(axis % x.ndim, x.ndim)), epsilon)


class EmbedLayerNormalization(_Microsoft):
    def compute(self, ids, segment_ids, words, places, segments, scale, shift, mask=None, place_ids=None,
                epsilon=1e-12, mask_index_type=0):  # fmt: skip
        total = words[ids] + (places[: ids.shape[1]] if place_ids is None else places[place_ids])
        total = total if segments is None else total + segments[segment_ids]
        index = np.zeros(len(ids), np.int32) if mask is None else np.sum(mask, 1, dtype=np.int32)
        return layer_normalization(total, scale, shift, epsilon)[0], index, total


def attended(q, k, v, offset, mask, added, scale=None, mask_filter_value=-10000.0, unidirectional=0):
    """Q, K, V as [batch, heads, time, size]; `offset` is the number of keys of the past."""
    y = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    times, keys = q.shape[2], k.shape[2]
    for n, h, i in np.ndindex(*q.shape[:3]):
        s = k[n, h] @ q[n, h, i] * (scale or q.shape[3] ** -0.5)
        for j in range(keys):
            if mask is not None and not mask[n, i if mask.shape[1] > 1 else 0, j if mask.shape[2] > 1 else 0]:
                s[j] += mask_filter_value
            if unidirectional and j > i + offset and i < times - 1:
                s[j] = -np.inf
        if added is not None:
            s = s + np.broadcast_to(added, (*q.shape[:3], keys))[n, h, i]
        p = np.exp(s - s.max())
        y[n, h, i] = p / p.sum() @ v[n, h]
    return y.transpose(0, 2, 1, 3).reshape(len(y), times, -1)


def kept(mask, batch, keys):
    """[batch, query time or 1, key time or 1] of each form of mask."""
    if mask is None:
        return None
    if mask.ndim > 1:
        return (mask > 0).reshape(batch, -1, mask.shape[-1])
    last, first = mask[:batch, None], mask[batch:, None] if len(mask) == 2 * batch else 0
    return ((np.arange(keys) < last) & (np.arange(keys) >= first))[:, None]


def heads_of(x, heads):
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


class MultiHeadAttention(_Microsoft):
    def compute(self, q, k, v, bias=None, mask=None, added=None, past_k=None, past_v=None, num_heads=None, **given):
        if bias is not None:
            bias_q, bias_k, bias_v = np.split(bias, [q.shape[2], 2 * q.shape[2]])
            q = q + bias_q
            k, v = (k, v) if k.ndim == 4 else (k + bias_k, v + bias_v)
        q, k, v = (heads_of(x, num_heads) for x in (q, k, v))
        if past_k is not None:
            k, v = np.concatenate([past_k, k], 2), np.concatenate([past_v, v], 2)
        mask = kept(mask, len(q), k.shape[2])
        return attended(q, k, v, 0 if past_k is None else past_k.shape[2], mask, added, **given), k, v


class Attention(_Microsoft):
    def compute(self, x, w, b=None, mask=None, past=None, added=None, num_heads=None, qkv_hidden_sizes=None, **given):
        y = x @ w + (0 if b is None else b)
        sizes = qkv_hidden_sizes or [y.shape[2] // 3] * 3
        q, k, v = (heads_of(part, num_heads) for part in np.split(y, np.cumsum(sizes)[:2], 2))
        if past is not None:
            k, v = np.concatenate([past[0], k], 2), np.concatenate([past[1], v], 2)
        mask = kept(mask, len(q), k.shape[2])
        y = attended(q, k, v, 0 if past is None else past.shape[3], mask, added, **given)
        return (y, np.stack([k, v])) if len(self.onnx_node.output) > 1 else y


class GroupQueryAttention(_Microsoft):
    """Without a past."""

    def compute(self, q, k, v, past_k, past_v, lengths, total, cos=None, sin=None, ids=None, added=None, sink=None,
                num_heads=None, kv_num_heads=None, do_rotary=0, rotary_interleaved=0, scale=None, softcap=0.0, causal=1,
                local_window_size=-1, smooth_softmax=-1):  # fmt: skip
        if k is None:
            size = q.shape[2] // (num_heads + 2 * kv_num_heads)
            q, k, v = np.split(q, [num_heads * size, (num_heads + kv_num_heads) * size], 2)
        q, k, v = heads_of(q, num_heads), heads_of(k, kv_num_heads), heads_of(v, kv_num_heads)
        if do_rotary:
            first = np.arange(q.shape[2])[None] + (0 if ids is None else ids.flat[0])
            q, k = (turned(x, first, cos, sin, rotary_interleaved) for x in (q, k))
        y = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        sink = np.zeros(num_heads) if sink is None and smooth_softmax == 1 else sink
        for n, h, i in np.ndindex(*q.shape[:3]):
            key_head = h // (num_heads // kv_num_heads)
            s = k[n, key_head] @ q[n, h, i] * (scale or q.shape[3] ** -0.5)
            s = softcap * np.tanh(s / softcap) if softcap else s
            s = s if added is None else s + np.broadcast_to(added, (*q.shape[:3], len(s)))[n, h, i]
            j = np.arange(len(s))
            keep = (
                (j <= lengths[n]) & ((j <= i) | (not causal)) & ((j > i - local_window_size) | (local_window_size < 1))
            )
            e = np.exp(s) * keep
            total = e.sum() + (0 if sink is None else np.exp(sink[h]))
            y[n, h, i] = e / (total or 1) @ v[n, key_head]
        return y.transpose(0, 2, 1, 3).reshape(*y.shape[::2], -1), k, v


def turned(x, ids, cos, sin, interleaved):
    """Pairs of the last axis of [batch, heads, time, size], at the angles of `ids`, [batch or 1, time]."""
    y, width = x.copy(), 2 * cos.shape[1]
    for k in range(width // 2):
        first, second = (2 * k, 2 * k + 1) if interleaved else (k, k + width // 2)
        c, s = (np.broadcast_to(cache[ids][:, None, :, k], x.shape[:3]) for cache in (cos, sin))
        y[..., first] = c * x[..., first] - s * x[..., second]
        y[..., second] = s * x[..., first] + c * x[..., second]
    return y


class RotaryEmbedding(_Microsoft):
    def compute(self, x, ids, cos, sin, interleaved=0, num_heads=0, rotary_embedding_dim=0, scale=1.0):
        flat = x.ndim == 3
        time = x.shape[1] if flat else x.shape[2]
        ids = ids if ids.ndim == 2 else ids + np.arange(time)[None]
        heads = num_heads or x.shape[-1] // (2 * cos.shape[1])
        y = turned(heads_of(x, heads) if flat else x, ids, cos, sin, interleaved)
        return y.swapaxes(1, 2).reshape(x.shape) if flat else y


def sigmoid(x):
    return named_activation("sigmoid", x)


class GatedRMSNorm(_Microsoft):
    def compute(self, x, scale, gate, epsilon=1e-5, activation="silu"):
        y, _ = rms_normalization(x.reshape(*x.shape[:-1], -1, len(scale)), scale, (-1,), epsilon)
        return y.reshape(x.shape) * sigmoid(gate) * (1 if activation == "sigmoid" else gate)


class GatedAdd(_Microsoft):
    def compute(self, x, y, gate):
        return x + y * gate


class ScaledSiLU(_Microsoft):
    def compute(self, x, scale=None, alpha=1.0):
        z = x * (alpha if scale is None else scale)
        return z * sigmoid(z)


class LinearAttentionGate(_Microsoft):
    def compute(self, a, bias, scale, b=None):
        return scale * np.logaddexp(0, a + bias), None if b is None else sigmoid(b)


class LinearAttention(_Microsoft):
    def compute(self, q, k, v, state=None, decay=None, beta=None, q_num_heads=1, kv_num_heads=1, scale=0.0,
                update_rule="gated_delta"):  # fmt: skip
        (batch, time, _), count = q.shape, max(q_num_heads, kv_num_heads)
        q, k, v = (x.reshape(batch, time, h, -1) for x, h in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)))
        scale = scale or q.shape[3] ** -0.5
        last = np.zeros((batch, kv_num_heads, k.shape[3], v.shape[3]), q.dtype) if state is None else state.copy()
        y = np.zeros((batch, time, count, v.shape[3]), q.dtype)
        for n, t in np.ndindex(batch, time):
            for h in range(kv_num_heads):
                if "gated" in update_rule:
                    g = decay[n, t].reshape(kv_num_heads, -1)[h]
                    last[n, h] *= np.exp(g)[:, None]
                value = v[n, t, h]
                if "delta" in update_rule:
                    value = np.broadcast_to(beta[n, t], kv_num_heads)[h] * (value - last[n, h].T @ k[n, t, h])
                last[n, h] += np.outer(k[n, t, h], value)
            for h in range(count):
                y[n, t, h] = scale * q[n, t, h * q_num_heads // count] @ last[n, h * kv_num_heads // count]
        return y.reshape(batch, time, -1), last


class CausalConvWithState(_Microsoft):
    def compute(self, x, w, b=None, past=None, dilation=1, activation="none"):
        before = (w.shape[2] - 1) * dilation
        framed = np.concatenate([np.zeros((*x.shape[:2], before), x.dtype) if past is None else past, x], 2)
        y = sum(w[:, 0, j, None] * framed[:, :, j * dilation :][:, :, : x.shape[2]] for j in range(w.shape[2]))
        y = y if b is None else y + b[:, None]
        return y if activation == "none" else y * sigmoid(y), framed[:, :, x.shape[2] :]


class Pad(_Microsoft):
    def compute(self, x, pads, value=0.0, mode="constant"):
        before, after = pads.reshape(2, -1)
        more = {"constant_values": np.asarray(value).item()} if mode == "constant" else {}
        return np.pad(x, list(zip(before, after)), mode, **more)


class Trilu(_Microsoft):
    def compute(self, x, k=0, upper=1):
        return np.triu(x, int(k)) if upper else np.tril(x, int(k))


class GatherND(_Microsoft):
    def compute(self, x, indices):
        return x[tuple(np.moveaxis(indices, -1, 0))]


class ExpandDims(_Microsoft):
    def compute(self, x, axis):
        return np.expand_dims(x, int(axis))


class GridSample(reference_windows.GridSample):
    op_domain = DOMAIN


OPS = (
    Attention,
    CausalConvWithState,
    CDist,
    EmbedLayerNormalization,
    ExpandDims,
    FusedConv,
    FusedGemm,
    FusedMatMul,
    GatedAdd,
    GatedRMSNorm,
    GatherND,
    GridSample,
    GroupQueryAttention,
    LinearAttention,
    LinearAttentionGate,
    MultiHeadAttention,
    Pad,
    RotaryEmbedding,
    ScaledSiLU,
    SimplifiedLayerNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
    TransposeMatMul,
    Trilu,
)
