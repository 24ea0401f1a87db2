"""Embeddings as autograd trains them: no gradient for padding, a share by frequency, bags as sums."""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.extrema import first_maximum
from orttrainer.graph.passes.from_front import NOWHERE

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
    if input.dim() == 2 and padding_idx is None:
        return _of_one_length(_looked_up(input, weight, False), per_sample_weights, mode)
    bag, bags = _numbered(input, offsets[:-1] if include_last_offset else offsets)
    input, results = input.flatten(), bags
    if padding_idx is not None:  # in one bag more, so that nothing of the size of the rows is masked
        bag, results = torch.where(_is_padding(input, weight, padding_idx), bags, bag), bags + 1
    if mode == "max":
        return _first_maxima(input, weight, bag, results)[:bags]
    rows = _looked_up(input, weight, False)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    start = weight.new_zeros(results, weight.shape[1])
    reduced = start.scatter_add(0, bag.unsqueeze(1).expand_as(rows), rows)
    if mode == "mean":
        count = bag.new_zeros(results).scatter_add(0, bag, torch.ones_like(bag))
        reduced = reduced / count.clamp(min=1).unsqueeze(1)
    return reduced if padding_idx is None else reduced[:-1]


def _of_one_length(rows, weights, mode):
    """[bags, length, width] -> [bags, width]."""
    if mode == "max":
        return first_maximum(rows, 1)[0]
    if weights is not None:
        return (weights.unsqueeze(1) @ rows).squeeze(1)
    return rows.sum(1) / rows.shape[1] if mode == "mean" else rows.sum(1)


def _numbered(input, offsets):
    """Which bag each index is in, [length], and how many there are: bag i is what lies between offsets i and i + 1."""
    if input.dim() == 2:
        return torch.arange(input.shape[0], device=input.device).unsqueeze(1).expand_as(input).flatten(), input.shape[0]
    offsets, bags = offsets.long(), offsets.shape[0]
    descends = offsets[1:] < offsets[:-1]  # by which PyTorch reads, and refuses, whatever is there
    offsets = torch.cat([offsets[:1], torch.where(descends, NOWHERE, offsets[1:])])
    starts = offsets.new_zeros(input.shape[0] + 1).scatter_add(0, offsets, torch.ones_like(offsets))
    first = torch.where(starts[0] > 0, -1, bags + 1)  # what lies before all bags, PyTorch refuses
    return starts.cumsum(0)[:-1] + first, bags


def _first_maxima(input, weight, bag, bags):
    """The largest element of each bag, of those that tie the first: there its gradient goes; 0 of none.

    What has the size of all rows is not differentiated, and made for one reader each: so it need never all be there.
    """
    rows = stop_gradient(_looked_up(input, weight, False))
    places, count = bag.unsqueeze(1).expand_as(rows), input.shape[0]
    left = count - torch.arange(count, dtype=torch.int32, device=input.device)  # rows from here on, 0 from none
    nothing = weight.new_zeros(bags, weight.shape[1])
    best = (nothing - math.inf).scatter_reduce(0, places, rows, "amax")
    tied = torch.where(rows == best.gather(0, places), left.unsqueeze(1), 0)
    first = nothing.int().scatter_reduce(0, places, tied, "amax")
    start = left.new_zeros(bags).scatter_reduce(0, bag, left, "amax")
    row, start, first = F.pad(input, (0, 1)), start.long().unsqueeze(1), first.long()  # of an empty bag any row
    unordered = F.embedding(row[count - start].squeeze(1), weight).isnan()  # PyTorch asks what is larger than the first
    chosen = weight.gather(0, row[count - torch.where(unordered | (first == 0), start, first)])
    return torch.where(start > 0, chosen, 0.0)


REWRITES = {F.embedding: _embedding, F.embedding_bag: _embedding_bag, torch.embedding_renorm_: _renorm_}
