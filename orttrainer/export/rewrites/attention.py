"""Attention with a dropout, which the exporters lose."""

from __future__ import annotations

import math

import torch

from orttrainer.export.rewrites import noise

__all__ = ["REWRITES", "attention"]


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """softmax(query @ key^T * scale + mask) @ value, with a dropout that an exporter keeps."""
    if enable_gqa:
        key, value = (_repeat_heads(x, query.size(-3)) for x in (key, value))
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(-2, -1))  # [..., target, source]
    if is_causal:
        scores = torch.where(_causal_mask(scores), scores, float("-inf"))
    reachable = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # A finite minimum, for a row with nothing to attend to must not become NaN ...
        scores = scores + _bias_of(attn_mask, scores.dtype)
        reachable = attn_mask.any(dim=-1, keepdim=True)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        weights = noise.dropout(weights, dropout_p, True)
    output = torch.matmul(weights, value)
    # ... and torch gives zeros for it.
    return output if reachable is None else output * reachable.to(output.dtype)


def _repeat_heads(x, heads):
    """[..., few, length, depth] -> [..., heads, length, depth], each head repeated in place."""
    *batch, few, length, depth = x.shape
    x = x.unsqueeze(-3).expand(*batch, few, heads // few, length, depth)
    return x.reshape(*batch, heads, length, depth)


def _causal_mask(scores):
    target = torch.arange(scores.size(-2), device=scores.device).unsqueeze(-1)
    return torch.arange(scores.size(-1), device=scores.device) <= target


def _bias_of(mask, dtype):
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


REWRITES = {torch._C._nn.scaled_dot_product_attention: attention}
