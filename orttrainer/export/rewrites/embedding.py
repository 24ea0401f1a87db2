"""Embeddings as autograd trains them: no gradient for padding, a share by frequency, bags as sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.stop_gradient import stop_gradient

__all__ = ["REWRITES"]


def _embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    """F.embedding, whose padding row gets no gradient from being looked up."""
    rows = _looked_up(input, weight, max_norm, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    return torch.where(_is_padding(input, weight, padding_idx).unsqueeze(-1), stop_gradient(rows), rows)


def _looked_up(input, weight, max_norm, scale_grad_by_freq):
    if max_norm is not None:
        raise UnsupportedModelError(
            "the module uses an embedding with max_norm, whose forward rescales its weight in place, which an "
            "optimizer's update would overwrite. Leave max_norm out, or divide the looked-up rows by their norm."
        )
    # ONNX counts a negative index from the back; torch refuses it, as ONNX does one that is too large.
    rows = F.embedding(torch.where(input < 0, weight.shape[0], input), weight)
    if not scale_grad_by_freq:
        return rows
    flat = input.reshape(-1)
    count = torch.zeros_like(weight[:, 0]).scatter_add(0, flat, torch.ones_like(flat, dtype=weight.dtype))
    share = rows / count[input].unsqueeze(-1)
    return stop_gradient(rows) + (share - stop_gradient(share))  # the values of rows, the gradient of share


def _is_padding(input, weight, padding_idx):
    return input == (padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx)


def _embedding_bag(
    input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode="mean", sparse=False,
    per_sample_weights=None, include_last_offset=False, padding_idx=None,
):  # fmt: skip
    """F.embedding_bag: look up, then sum, average or take the maximum of each bag; padding is in no bag."""
    if scale_grad_by_freq:
        raise UnsupportedModelError(
            "the module uses an embedding bag with scale_grad_by_freq, for which PyTorch's CPU and GPU have different "
            "gradients. Leave it out, or use nn.Embedding with it, and sum."
        )
    rows = _looked_up(input, weight, max_norm, False)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = ~_is_padding(input, weight, padding_idx)
    if mode == "max":
        lowest = torch.finfo(rows.dtype).min
        rows = torch.where(counted.unsqueeze(-1), rows, lowest)
    elif padding_idx is not None:
        rows = torch.where(counted.unsqueeze(-1), rows, 0.0)
    reduce = _reduce_rows if input.dim() == 2 else _reduce_bags(offsets, include_last_offset)
    count = reduce(counted.to(rows.dtype).unsqueeze(-1), "sum")  # [bags, 1]
    if mode == "max":
        return torch.where(count > 0, reduce(rows, "amax"), 0.0)
    total = reduce(rows, "sum")
    return total / count.clamp(min=1) if mode == "mean" else total


def _reduce_rows(rows, how):
    """[bags, length, width] -> [bags, width]."""
    return rows.sum(1) if how == "sum" else rows.amax(1)


def _reduce_bags(offsets, include_last_offset):
    """[length, width] -> [bags, width], where bag i is what lies between offsets i and i + 1."""
    offsets = offsets[:-1] if include_last_offset else offsets

    def reduce(rows, how):
        position = torch.arange(rows.shape[0], device=rows.device)
        bag = (position.unsqueeze(1) >= offsets.unsqueeze(0)).sum(1) - 1
        bag = bag.unsqueeze(1).expand(-1, rows.shape[1])
        start = rows.new_full((offsets.shape[0], rows.shape[1]), 0.0 if how == "sum" else torch.finfo(rows.dtype).min)
        return start.scatter_add(0, bag, rows) if how == "sum" else start.scatter_reduce(0, bag, rows, how)

    return reduce


REWRITES = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}
