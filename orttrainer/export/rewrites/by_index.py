"""Reads and writes by index that torch's exporters lack, or get wrong."""

from __future__ import annotations

import itertools
import math

import torch
from torch.autograd import Function
from torch.utils import _pytree as pytree

from orttrainer.export.rewrites.refused import unless
from orttrainer.export.rewrites.spelled_out import functions

__all__ = ["REWRITES"]


# ---------------------------------------------------------------- along an axis


def _index_add(input, dim, index, source, *, alpha=1):
    """Exporters forget the factor, what is added to a scalar, and all but one of what goes to the same place."""
    source = source if alpha == 1 else source * alpha
    if not input.dim():
        return input + source.sum()
    places = index.reshape([-1 if axis == dim % input.dim() else 1 for axis in range(input.dim())])
    source = source if source.dim() else source.reshape([1] * input.dim())
    return torch.scatter_add(input, dim, places.expand(source.shape), source)


def _index_fill(input, dim, index, value):
    """By a mask, of what has a count: ONNX's scatter wants each index once."""
    if not input.dim():
        return torch.index_fill(input, dim, index, value)
    dim, index = dim % input.dim(), index.reshape(-1)
    size = input.size(dim)
    index = torch.where(index < 0, index + size, index)
    hit = index.new_zeros(size).scatter_add(0, index, torch.ones_like(index)) > 0
    hit = hit.reshape([-1 if axis == dim else 1 for axis in range(input.dim())])
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=input.dtype, device=input.device)
    return torch.where(hit, value, input)


def _flip(input, *dims, **kwargs):
    """torch.flip; of a number, which torch takes for a row of one, it is that."""
    return input.flip(*dims, **kwargs) if input.dim() else input.clone()


def _of_numbers(function):
    """`function(input, dim, index, ...)`, which torch has of a number as of a row of one, and ONNX has not."""

    def along_axis(input, dim, index, *values, **named):
        if input.dim():
            return function(input, dim, index, *values, **named)
        index, values, named = pytree.tree_map_only(torch.Tensor, lambda x: x.reshape(1), (index, values, named))
        return function(input.reshape(1), 0, index, *values, **named).reshape(())

    return along_axis


def _scatter_reduce(input, dim, index, src, reduce, *, include_self=True):
    """torch.scatter_reduce, whose mean no exporter knows; nor does ONNX know it of a scalar.

    What `input` has in a place that leaves it out shares the gradient of an extremum that it happens to equal, and loses its share.
    """
    if not input.dim():
        flat = input.reshape(1), 0, index.reshape(-1), src.reshape(-1)
        return _scatter_reduce(*flat, reduce, include_self=include_self).reshape(())
    if reduce != "mean":
        found = torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
        if include_self or reduce not in ("amax", "amin") or not input.is_floating_point():
            return found
        return _ExtremumOfOthers.apply(input, src, found.detach(), index, dim)
    counts = torch.zeros_like(input).scatter_add(dim, index, torch.ones_like(src))
    kept = input if include_self else torch.where(counts > 0, 0, input)
    total = kept.scatter_add(dim, index, src)
    counts = counts + 1 if include_self else counts.clamp(min=1)
    return total / counts if input.is_floating_point() else total.div(counts, rounding_mode="floor")


class _ExtremumOfOthers(Function):
    """What scatter_reduce found in `src` alone, with its gradient as PyTorch has it."""

    @staticmethod
    def forward(ctx, input, src, found, index, dim):
        ctx.save_for_backward(input, src, found, index)
        ctx.dim = dim
        return found.clone()

    @staticmethod
    def backward(ctx, g):
        input, src, found, index = ctx.saved_tensors
        own, ties = (input == found).to(g.dtype), (src == found.gather(ctx.dim, index)).to(g.dtype)
        share = g / own.scatter_add(ctx.dim, index, ties)
        filled = torch.zeros_like(g).scatter_add(ctx.dim, index, torch.ones_like(src)) > 0
        return torch.where(filled, 0.0, own * share), ties * share.gather(ctx.dim, index), None, None, None


def _fill_diagonal_(input, fill_value, wrap=False):
    """Tensor.fill_diagonal_ of a matrix; it goes by strides, which no exporter knows."""
    if input.dim() != 2:
        return input.fill_diagonal_(fill_value, wrap)
    rows, columns = (torch.arange(size, device=input.device) for size in input.shape)
    rows = rows % (input.shape[1] + 1) if wrap else rows  # behind a square and a row that has none it starts anew
    return input.copy_(torch.where(rows[:, None] == columns, fill_value, input))


def _index_reduce(input, dim, index, source, reduce, *, include_self=True):
    """torch.index_reduce, which no exporter knows."""
    axis = dim % max(input.dim(), 1)
    index = index.reshape([-1 if k == axis else 1 for k in range(source.dim())]).expand(source.shape)
    return _scatter_reduce(input, dim, index, source, reduce, include_self=include_self)


def _repeat_interleave(input, repeats=None, dim=None, *, output_size=None):
    """torch.repeat_interleave; the place that each element is from follows from the ends of all."""
    if repeats is None:
        input, repeats = torch.arange(input.shape[0], device=input.device), input
    if not isinstance(repeats, torch.Tensor) or (output_size is None and not torch.compiler.is_exporting()):
        return torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    input, dim = (input.flatten(), 0) if dim is None else (input, dim)
    negative = (repeats < 0).any()
    repeats = repeats.expand(input.shape[dim]) + unless(
        negative, "repeat_interleave a negative number of times", 0, repeats.dtype
    )
    if output_size is None:
        output_size = repeats.sum().item()
        torch._check(output_size >= 0)
    return input.index_select(dim, _ended(torch.cumsum(repeats, 0), output_size))


def _ended(ends, size):
    """[..., size]: how many of `ends`, [..., segments], are at or before each place."""
    ends = ends.long()
    at = ends.new_zeros(*ends.shape[:-1], size + 1).scatter_add(-1, ends, torch.ones_like(ends))
    return at.cumsum(-1)[..., :-1]


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def _segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    """torch.segment_reduce; of elements that tie for the extremum of a segment each has its share of a positive gradient.

    Of a negative one each has all: so PyTorch's kernel has it (2.13).
    """
    if indices is not None:
        return torch.segment_reduce(data, reduce, indices=indices, axis=axis, unsafe=unsafe, initial=initial)
    ends = torch.cumsum(lengths, -1) if offsets is None else offsets[..., 1:]
    count, place = ends.shape[-1], torch.arange(data.shape[axis], device=data.device)
    segment = _ended(ends, data.shape[axis])
    if offsets is not None:  # what is before the first segment, in none, goes behind the last
        segment = torch.where(place < offsets.select(-1, 0).unsqueeze(-1), count, segment)
    segment = segment.reshape(*segment.shape, *[1] * (data.dim() - axis - 1)).expand(data.shape)
    empty = data.new_zeros(*data.shape[:axis], count + 1, *data.shape[axis + 1 :])

    def total(x):
        return empty.scatter_add(axis, segment, x).narrow(axis, 0, count)

    start = _NEUTRAL[reduce] if initial is None else float(initial)
    if reduce == "prod":
        return torch.scatter_reduce(empty + 1, axis, segment, data, "prod").narrow(axis, 0, count) * start
    if reduce in ("sum", "mean"):
        size = total(torch.ones_like(data))
        mean = reduce == "mean"
        return (total(data) + start) / ((size if initial is None else size.clamp(min=1)) if mean else 1)
    extremum = "amax" if reduce == "max" else "amin"
    best = torch.scatter_reduce(empty + _NEUTRAL[reduce], axis, segment, data.detach(), extremum)
    ties = data == best.gather(axis, segment)
    tied = empty.scatter_add(axis, segment, ties.to(data.dtype))
    best, size = (x.narrow(axis, 0, count) for x in (best, tied))
    beyond = (best < start if reduce == "max" else best > start) | (size == 0)
    whole = _SharesWhatIsPositive.apply(data, tied.gather(axis, segment))
    return torch.where(beyond, start, total(torch.where(ties, whole, 0.0)) / size.clamp(min=1))


class _SharesWhatIsPositive(Function):
    """x, of which as many as `size` says have a gradient that was divided by that: a negative one is as it was before."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.save_for_backward(size)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (size,) = ctx.saved_tensors
        return torch.where(g > 0, g, g * size), None


# ---------------------------------------------------------------- in all of a tensor


def _put(input, index, source, accumulate=False):
    """Tensor.put: places are counted over the whole tensor."""
    flat, index = input.flatten(), index.flatten()
    index = torch.where(index < 0, index + flat.shape[0], index)
    scatter = torch.scatter_add if accumulate else torch.scatter
    return scatter(flat, 0, index, source.flatten()).reshape(input.shape)


def _diagonal_scatter(input, src, offset=0, dim1=0, dim2=1):
    """torch.diagonal_scatter: a place on the diagonal has the element of `src` of its row, or of its column below."""
    axes, last = (dim1 % input.dim(), dim2 % input.dim()), (input.dim() - 2, input.dim() - 1)
    x = input.movedim(axes, last)
    rows, columns = (torch.arange(size, device=input.device) for size in x.shape[-2:])
    on_diagonal = columns - rows.unsqueeze(-1) == offset
    along = (rows if offset >= 0 else columns).clamp(max=src.shape[-1] - 1)
    spread = src.index_select(-1, along).unsqueeze(-1 if offset >= 0 else -2)
    return torch.where(on_diagonal, spread, x).movedim(last, axes)


def _combinations(input, r=2, with_replacement=False):
    """torch.combinations; of a vector whose size may vary each number of places in rising order."""
    size = input.shape[0]
    if r == 0:
        return torch.combinations(input, r, with_replacement)
    if not isinstance(size, int):
        place = torch.arange(size, device=input.device)
        pairs = place.unsqueeze(-1) <= place if with_replacement else place.unsqueeze(-1) < place
        rising = torch.ones_like(place, dtype=torch.bool)
        for _ in range(r - 1):
            rising = rising.unsqueeze(-1) & pairs
        return input[rising.nonzero()]
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(size), r)), dtype=torch.int64, device=input.device)
    return input.index_select(0, places.flatten()).reshape(-1, r)


REWRITES = {
    torch.Tensor.fill_diagonal_: _fill_diagonal_,
    torch.segment_reduce: _segment_reduce,
    **functions(
        combinations=_combinations,
        diagonal_scatter=_diagonal_scatter,
        flip=_flip,
        index_add=_index_add,
        index_fill=_index_fill,
        index_reduce=_index_reduce,
        put=_put,
        repeat_interleave=_repeat_interleave,
        scatter=_of_numbers(torch.scatter),
        scatter_add=_of_numbers(torch.scatter_add),
        scatter_reduce=_scatter_reduce,
    ),
}
