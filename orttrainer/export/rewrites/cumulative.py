"""Products, sums of exponentials and extrema of each prefix, which torch's exporters do not know, or get wrong."""

from __future__ import annotations

import math

import torch

from orttrainer.export.rewrites.spelled_out import functions

__all__ = ["REWRITES"]

_BLOCK = 128


def _logaddexp(input, other):
    """log(exp(input) + exp(other)), which the exporters write as it stands, so that it overflows."""
    gap = torch.where(input == other, 0.0, (input - other).abs())  # of two infinities, too
    return torch.maximum(input, other) + torch.log1p(torch.exp(-gap))


def _logaddexp2(input, other):
    ln2 = math.log(2.0)
    return _logaddexp(input * ln2, other * ln2) / ln2


def _joined(join, of_all, *parts, filling=None, size=None):
    """[..., n]: what `join` makes of each prefix, in ranges twice as long each time, as on a GPU.

    Where the size is not known, so in blocks; what is before each block makes `of_all`, whose memory is the square of their number.
    The last block is filled up with `filling`, or the last element.
    """
    size, reach = parts[0].size(-1) if size is None else size, 1
    if type(size) is not int:
        blocks = (size + _BLOCK - 1) // _BLOCK
        place = torch.arange(blocks * _BLOCK, device=parts[0].device)
        inside, place = place < size, place.clamp(max=size - 1)
        parts = [x.index_select(-1, place) for x in parts]
        parts = parts if filling is None else [torch.where(inside, x, filling) for x in parts]
        parts = [x.reshape(*x.shape[:-1], blocks, _BLOCK) for x in parts]
        parts = _joined(join, of_all, *parts, size=_BLOCK)  # where TorchScript traces, no size is known
        before = of_all(*(x[..., -1] for x in parts))
        joined = join([x[..., :-1, None] for x in before], [x[..., 1:, :] for x in parts])
        return [torch.cat([x[..., :1, :], y], -2).flatten(-2)[..., :size] for x, y in zip(parts, joined)]
    while reach < size:
        joined = join([x[..., : size - reach] for x in parts], [x[..., reach:] for x in parts])
        parts = [torch.cat([x[..., :reach], y], -1) for x, y in zip(parts, joined)]
        reach *= 2
    return parts


def _prefixes(x, filling):
    """[..., n, n]: row i holds elements 0 to i, and then `filling`."""
    place = torch.arange(x.size(-1), device=x.device)
    return torch.where(place <= place.unsqueeze(-1), x.unsqueeze(-2), filling)


def _cumprod(input, dim, *, dtype=None):
    """The product of each prefix, exact with zeros."""
    input = input if dtype is None else input.to(dtype)
    if not input.dim():
        return input.clone()

    def join(before, here):
        return [before[0] * here[0]]

    def of_all(products):
        return [_prefixes(products, 1).prod(-1)]

    (products,) = _joined(join, of_all, input.transpose(dim, -1), filling=1)
    return products.transpose(dim, -1)


def _running_extremum(original, pick, stands, worst, bound):
    def join(before, here):
        """Of values and their places: what is here stands where it ties, or is NaN."""
        kept = stands(here[0], before[0])
        kept = kept | here[0].isnan() if here[0].is_floating_point() else kept
        return [torch.where(kept, x, y) for x, y in zip(here, before)]

    def of_all(values, places):
        prefixes = _prefixes(values, worst if values.is_floating_point() else getattr(torch.iinfo(values.dtype), bound))
        values = pick(prefixes, -1)
        return values, torch.where(prefixes == values.unsqueeze(-1), _prefixes(places, -1), -1).amax(-1)

    def call(input, dim):
        """The extremum of each prefix, the last of those that tie."""
        if not input.dim():
            return result_type((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
        x = input.detach().transpose(dim, -1)
        x = x.int() if x.dtype == torch.bool else x
        places = torch.arange(x.size(-1), device=x.device).expand(x.shape)
        indices = _joined(join, of_all, x, places)[1].transpose(dim, -1)
        return result_type((torch.gather(input, dim, indices), indices))

    result_type = getattr(torch.return_types, original.__name__)
    return call


def _logcumsumexp(input, dim):
    """The logarithm of the sum of the exponentials of each prefix: beside the largest of all, a prefix may be 0."""
    if not input.dim():
        return input.clone()

    def join(before, here):
        return [_logaddexp(here[0], before[0])]

    (sums,) = _joined(join, lambda x: [_prefixes(x, -math.inf).logsumexp(-1)], input.transpose(dim, -1))
    return sums.transpose(dim, -1)


REWRITES = {
    **functions(
        cummax=_running_extremum(torch.cummax, torch.amax, torch.ge, -math.inf, "min"),
        cummin=_running_extremum(torch.cummin, torch.amin, torch.le, math.inf, "max"),
        cumprod=_cumprod,
        logaddexp=_logaddexp,
        logaddexp2=_logaddexp2,
        logcumsumexp=_logcumsumexp,
    ),
}
