"""Products, sums of exponentials and extrema of each prefix, which torch's exporters do not know, or get wrong."""

from __future__ import annotations

import math

import torch

from orttrainer.export.rewrites.spelled_out import functions

__all__ = ["REWRITES"]


def _logaddexp(input, other):
    """log(exp(input) + exp(other)), which the exporters write as it stands, so that it overflows."""
    gap = torch.where(input == other, 0.0, (input - other).abs())  # of two infinities, too
    return torch.maximum(input, other) + torch.log1p(torch.exp(-gap))


def _logaddexp2(input, other):
    ln2 = math.log(2.0)
    return _logaddexp(input * ln2, other * ln2) / ln2


def _prefixes(input, dim, filling):
    """[..., n, n]: row i holds elements 0 to i along `dim`, swapped with the last axis, and then `filling`."""
    x = input.transpose(dim, -1)
    place = torch.arange(x.size(-1), device=x.device)
    return torch.where(place <= place.unsqueeze(-1), x.unsqueeze(-2), filling)


def _cumprod(input, dim, *, dtype=None):
    """The product of each prefix, exact with zeros: of ranges twice as long each time, as on a GPU.

    Where the size is not known, from all prefixes: the memory is the square of the axis then.
    """
    input = input if dtype is None else input.to(dtype)
    if not input.dim():
        return input.clone()
    size, reach = input.size(dim), 1
    if type(size) is not int:
        return _prefixes(input, dim, 1.0).prod(-1).transpose(dim, -1)
    products = input.transpose(dim, -1)
    while reach < size:
        products = products * torch.nn.functional.pad(products[..., : size - reach], (reach, 0), value=1)
        reach *= 2
    return products.transpose(dim, -1)


def _running_extremum(original, pick, worst, bound):
    def call(input, dim):
        """The extremum of each prefix, the last of those that tie; its memory is the square of the axis."""
        if not input.dim():
            return result_type((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
        filling = worst if input.is_floating_point() else getattr(torch.iinfo(input.dtype), bound)
        prefixes = _prefixes(input.detach(), dim, filling)
        place = torch.arange(prefixes.size(-1), device=input.device)
        best = (prefixes == pick(prefixes, -1, keepdim=True)) & (place <= place.unsqueeze(-1))
        indices = torch.where(best, place, -1).amax(-1).transpose(dim, -1)
        return result_type((torch.gather(input, dim, indices), indices))

    result_type = getattr(torch.return_types, original.__name__)
    return call


def _logcumsumexp(input, dim):
    """The logarithm of the sum of the exponentials of each prefix, as `_cumprod`: beside the largest of all, a prefix may be 0."""
    if not input.dim():
        return input.clone()
    size, reach = input.size(dim), 1
    if type(size) is not int:
        return _prefixes(input, dim, -math.inf).logsumexp(-1).transpose(dim, -1)
    sums = input.transpose(dim, -1)
    while reach < size:
        sums = torch.cat([sums[..., :reach], _logaddexp(sums[..., reach:], sums[..., : size - reach])], -1)
        reach *= 2
    return sums.transpose(dim, -1)


REWRITES = {
    **functions(
        cummax=_running_extremum(torch.cummax, torch.amax, -math.inf, "min"),
        cummin=_running_extremum(torch.cummin, torch.amin, math.inf, "max"),
        cumprod=_cumprod,
        logaddexp=_logaddexp,
        logaddexp2=_logaddexp2,
        logcumsumexp=_logcumsumexp,
    ),
}
