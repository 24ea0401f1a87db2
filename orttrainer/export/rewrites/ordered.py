"""What orders along an axis, and what an order tells: medians, the most frequent, places in what is sorted."""

from __future__ import annotations

import math

import torch

from orttrainer.export.rewrites.spelled_out import functions

__all__ = ["REWRITES", "searchsorted"]

_FEW = 16  # to compare with each of so many is no slower than to sort


def _sort(input, dim=-1, descending=False, *, stable=None):
    """ONNX's is always stable, and knows no masks."""
    if input.dtype != torch.bool:
        return torch.sort(input, dim, descending)
    values, indices = torch.sort(input.int(), dim, descending)
    return torch.return_types.sort((values.bool(), indices))


def _argsort(input, dim=-1, descending=False, *, stable=None):
    return _sort(input, dim, descending)[1]


def _kthvalue(input, k, dim=-1, keepdim=False):
    if not input.dim():
        return torch.return_types.kthvalue((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
    found = [part.narrow(dim, k - 1, 1) for part in torch.topk(input, k, dim, largest=False)]
    return torch.return_types.kthvalue(found if keepdim else [part.squeeze(dim) for part in found])


def _topk(input, k, dim=-1, largest=True, sorted=True):
    """ONNX's has no axis for a number."""
    if input.dim():
        return torch.topk(input, k, dim, largest, sorted)
    found = torch.topk(input.reshape(1), k, dim, largest, sorted)
    return torch.return_types.topk(part.reshape(()) for part in found)


def _median(input, dim=None, keepdim=False):
    """The lower one of the two in the middle; without `dim`, elements that tie with it share its gradient."""
    if dim is None:
        flat = input.flatten()
        middle = torch.topk(flat.detach(), (flat.size(0) - 1) // 2 + 1, largest=False)[0][-1]
        ties = flat == middle
        found = torch.where(ties, flat, 0.0).sum() / ties.sum()
        return torch.where(input.isnan().any(), math.nan, found)
    size = input.size(dim) if input.dim() else 1
    values, indices = _kthvalue(input, (size - 1) // 2 + 1, dim, keepdim)
    nan = input.isnan().any(dim, keepdim) if input.dim() else input.isnan()
    return torch.return_types.median((torch.where(nan, math.nan, values), indices))


def _nanmedian(input, dim=None, keepdim=False):
    """The lower one of the two in the middle of the numbers, likewise; NaN if there are none."""
    if dim is None:
        flat = input.flatten()
        middle = _nanmedian(flat.detach(), 0)[0]
        ties = flat == middle
        return torch.where(middle.isnan(), math.nan, torch.where(ties, flat, 0.0).sum() / ties.sum().clamp(min=1))
    if not input.dim():
        return torch.return_types.nanmedian((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
    middle = ((~input.isnan()).sum(dim, keepdim=True) - 1).clamp(min=0) // 2
    indices = _numbers_in_order(input, dim).gather(dim, middle)
    found = input.gather(dim, indices), indices
    return torch.return_types.nanmedian(found if keepdim else [part.squeeze(dim) for part in found])


def _nanquantile(input, q, dim=None, keepdim=False, *, interpolation="linear"):
    """Quantiles of the numbers; NaN if there are none."""
    q = q if isinstance(q, torch.Tensor) else torch.full((), q, dtype=input.dtype, device=input.device)
    x = input.reshape(-1) if dim is None or input.dim() < 2 else input.movedim(dim % input.dim(), input.dim() - 1)
    last = (~x.isnan()).sum(-1, keepdim=True) - 1
    rank, order = (q.reshape(-1) * last).clamp(min=0), _numbers_in_order(x, -1)  # [..., quantiles]
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
    low, high = (x.gather(-1, order.gather(-1, end.long())) for end in (rank.floor(), rank.ceil()))
    found = torch.lerp(low, high, torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - rank.floor())
    found = (
        found.movedim(found.dim() - 1, 0) if found.dim() > 1 else found
    )  # TorchScript's exporter knows no axis -1 here
    if keepdim and input.dim():
        found = found.reshape(-1, *[1] * input.dim()) if dim is None else found.unsqueeze(dim % input.dim() + 1)
    return found if q.dim() else found.squeeze(0)


def _numbers_in_order(input, dim):
    """Their places in rising order, then those of NaN."""
    order = torch.sort(_with_nan_last(input.detach()), dim)[1]
    return order.gather(dim, _argsort(input.isnan().gather(dim, order), dim))  # an infinity may be behind a NaN


def _with_nan_last(x):
    """`x` with infinities for NaN, which ONNX Runtime's TopK puts anywhere."""
    return torch.where(x.isnan(), math.inf, x) if x.is_floating_point() else x


def _in_order(x):
    return _numbers_in_order(x, -1) if x.is_floating_point() else _argsort(x)


def _mode(input, dim=-1, keepdim=False):
    """The most frequent value, the least of those that tie, where it is last."""
    if not input.dim():
        return torch.return_types.mode((input.clone(), torch.zeros_like(input, dtype=torch.int64)))
    x = input.detach().transpose(dim, -1)
    order = _in_order(x)
    run = _runs(x.gather(-1, order))
    lengths = torch.zeros_like(run).scatter_add(-1, run, torch.ones_like(run))
    end = lengths.cumsum(-1).gather(-1, lengths.argmax(-1, keepdim=True))
    indices = order.gather(-1, end - 1).transpose(dim, -1)
    found = input.gather(dim, indices), indices
    return torch.return_types.mode(found if keepdim else [part.squeeze(dim) for part in found])


def _runs(ordered):
    """Which run of equal numbers each is in, of the last axis."""
    starts = ordered[..., 1:] != ordered[..., :-1]
    return torch.cat([torch.zeros_like(ordered[..., :1], dtype=torch.int64), starts.long().cumsum(-1)], -1)


# ---------------------------------------------------------------- searched


def searchsorted(sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None):
    """How many numbers of each row lie before each value: all do before NaN."""
    rows = sorted_sequence if sorter is None else sorted_sequence.gather(-1, sorter)
    values, right = torch.as_tensor(input, device=rows.device), right or side == "right"
    found = _compared(rows, values, right) if _few(rows, values) else _merged(rows, values, right)
    return found.to(torch.int32) if out_int32 else found


def _few(rows, values) -> bool:
    """Whether that is known of the numbers, or of the values, of a row."""
    sizes = rows.shape[-1], values.numel() if rows.dim() == 1 else values.shape[-1]
    return any(type(size) is int and size <= _FEW for size in sizes)


def _compared(rows, values, right):
    values = values.unsqueeze(-1)
    rows = rows.unsqueeze(-2) if rows.dim() > 1 else rows
    return (~(rows > values if right else rows >= values)).sum(-1)


def _merged(rows, values, right):
    """By the order of both, of which those that come first do so where they are equal."""
    size, shape = rows.shape[-1], values.shape
    values = values.flatten() if rows.dim() == 1 else values
    both = torch.cat([rows, values] if right else [values, rows], -1).detach()
    order = _argsort(_with_nan_last(both))
    is_of_rows = (order < size if right else order >= values.shape[-1]).long()
    found = torch.zeros_like(order).scatter(-1, order, is_of_rows.cumsum(-1))
    found = found.narrow(-1, size if right else 0, values.shape[-1])
    return (torch.where(values.isnan(), size, found) if values.is_floating_point() else found).reshape(shape)


def _bucketize(input, boundaries, *, out_int32=False, right=False):
    """The exporter reads a tensor without axes as a number."""
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


def _isin(elements, test_elements, *, assume_unique=False, invert=False):
    """Whether each is among the others: in a run of equal numbers, sorted with them, or by comparison with a few."""
    elements, others = (torch.as_tensor(x) for x in (elements, test_elements))
    others = others.flatten()
    if _few(others, elements):
        found = (elements.unsqueeze(-1) == others).any(-1)
    else:
        both = torch.cat([others, elements.flatten()]).detach()
        order = _in_order(both)
        run = _runs(both.gather(0, order))
        counts = torch.zeros_like(run).scatter_add(0, run, (order < others.shape[0]).long())
        counts = torch.zeros_like(run).scatter(0, order, counts.gather(0, run))
        found = counts[others.shape[0] :].reshape(elements.shape) > 0
    return ~found if invert else found


REWRITES = functions(
    argsort=_argsort,
    bucketize=_bucketize,
    isin=_isin,
    kthvalue=_kthvalue,
    median=_median,
    mode=_mode,
    nanmedian=_nanmedian,
    nanquantile=_nanquantile,
    searchsorted=searchsorted,
    sort=_sort,
    topk=_topk,
)
