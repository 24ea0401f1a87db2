"""Embeddings as autograd trains them: no gradient for padding, a share by frequency, bags as sums."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.extrema import first_maximum

__all__ = ["REWRITES", "shortened"]


def _embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    """F.embedding, whose padding row gets no gradient from being looked up."""
    rows = _looked_up(input, weight, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    return torch.where(_is_padding(input, weight, padding_idx).unsqueeze(-1), stop_gradient(rows), rows)


def _looked_up(input, weight, scale_grad_by_freq):
    # ONNX counts a negative index from the back; torch refuses it, as ONNX does one that is too large.
    rows = F.embedding(torch.where(input < 0, weight.shape[0], input), weight)
    if not scale_grad_by_freq:
        return rows
    flat = input.reshape(-1)
    count = torch.zeros_like(weight[:, 0]).scatter_add(0, flat, torch.ones_like(flat, dtype=weight.dtype))
    share = rows / count[input].unsqueeze(-1)
    return stop_gradient(rows) + (share - stop_gradient(share))  # the values of rows, the gradient of share


def shortened(func, args, kwargs, mode):
    """The arguments of a lookup with `max_norm` without that; `mode` sees the rows get at most this norm."""
    if func not in (F.embedding, F.embedding_bag):
        return args, kwargs
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if (max_norm := given.pop("max_norm", None)) is not None:
        with mode:
            torch.embedding_renorm_(given["weight"], given["input"], max_norm, given.get("norm_type", 2.0))
    return (), given


def _renorm_(weight, indices, max_norm, norm_type):
    """torch.embedding_renorm_, of the whole table."""
    with torch.no_grad():
        norm = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
        read = torch.zeros_like(norm, dtype=torch.int64).index_fill(0, indices.flatten(), 1)
        factor = torch.where((read > 0) & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
        return weight.copy_(weight * factor)


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
    rows = _looked_up(input, weight, False)
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
        return torch.where(count > 0, reduce(rows, "max"), 0.0)
    total = reduce(rows, "sum")
    return total / count.clamp(min=1) if mode == "mean" else total


def _reduce_rows(rows, how):
    """[bags, length, width] -> [bags, width]."""
    return rows.sum(1) if how == "sum" else first_maximum(rows, 1)[0]


def _reduce_bags(offsets, include_last_offset):
    """[length, width] -> [bags, width], where bag i is what lies between offsets i and i + 1."""
    offsets = offsets[:-1] if include_last_offset else offsets

    def reduce(rows, how):
        position = torch.arange(rows.shape[0], device=rows.device)
        bag = (position.unsqueeze(1) >= offsets.unsqueeze(0)).sum(1) - 1
        bag = bag.unsqueeze(1).expand(-1, rows.shape[1])
        start = rows.new_zeros(offsets.shape[0], rows.shape[1])
        return start.scatter_add(0, bag, rows) if how == "sum" else _first_maxima(rows, bag, start)

    return reduce


def _first_maxima(rows, bag, start):
    """The largest element of each bag, the first of those that tie: there its gradient goes."""
    nowhere, position = rows.shape[0], torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    best = (start + torch.finfo(rows.dtype).min).scatter_reduce(0, bag, stop_gradient(rows), "amax")
    tied = torch.where(rows == best.gather(0, bag), position, nowhere)
    first = (start.long() + nowhere).scatter_reduce(0, bag, tied, "amin")
    return torch.cat([rows, torch.zeros_like(rows[:1])]).gather(0, first)


REWRITES = {F.embedding: _embedding, F.embedding_bag: _embedding_bag, torch.embedding_renorm_: _renorm_}
