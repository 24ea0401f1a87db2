"""Reads and writes at a place that a tensor of one number tells: `x[t] = v`, `x[t] += v`, `x[mask, t]`, `x[:t] = v`.

torch makes a Python number of it, which an export has not; here it stays a tensor.
"""

from __future__ import annotations

import torch

from orttrainer.export.rewrites.by_value import has_tensors, stacked
from orttrainer.export.values.ranges import is_symbolic

__all__ = ["REWRITES"]

_NO_PLACES = (torch.bool, torch.uint8)  # of which one number is a mask


def _get_item(input, index):
    input, index = _with_axes_of_masks(input, _without_lists(index))
    places, others = _counted(index)
    return torch.ops.aten.index.Tensor(*_shown(input, index)) if places and others else input[index]


def _set_item(input, index, value):
    input, index = _with_axes_of_masks(input, _without_lists(index))
    if _has_told_bounds(index):
        _set_slices(input, index, value)
    elif _counted(index)[0]:
        view, indices = _shown(input, index)
        torch.ops.aten.index_put_.default(view, indices, _value_for(view, value, _rank(view, indices)))
    else:
        input[index] = value


def _value_for(view, value, rank):
    """`value` as a tensor like `view`, without axes of one number in front that are more than `rank`, as torch's own."""
    value = torch.as_tensor(value, dtype=view.dtype, device=view.device)
    while value.dim() > rank and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _has_told_bounds(index) -> bool:
    """Whether there are slices whose bounds values tell, beside nothing but slices, numbers, places, None and `...`."""
    items = index if isinstance(index, tuple) else (index,)
    if not torch.compiler.is_exporting() or any(isinstance(x, (bool, list)) for x in items):
        return False
    if any(isinstance(x, torch.Tensor) and not _is_place(x) for x in items):
        return False
    return any(isinstance(x, slice) and x.step in (None, 1) and _is_told_range(x) for x in items)


def _is_told_range(x) -> bool:
    return isinstance(x, slice) and (_is_told(x.start) or _is_told(x.stop))


def _set_slices(input, index, value):
    """`x[:n, t] = v`: all is written of what the other indices show, with what was there outside of these bounds."""
    items = _items(input, index)
    told = [_is_told(x) or _is_told_range(x) for x in items]
    view = input[tuple(slice(None) if by_values else x for x, by_values in zip(items, told))]
    left = zip(items, told)
    left = [x if by_values else slice(None) for x, by_values in left if by_values or x is None or isinstance(x, slice)]
    view.copy_(_with(view, left, value))


def _with(view, at, value):
    """`view` with `value` in its place: `at` has a slice or a place for each axis."""
    rank = sum(isinstance(x, slice) for x in at)
    value = _value_for(view, value, rank)
    value = value[(None,) * (rank - value.dim())]
    inside = torch.ones((), dtype=torch.bool, device=view.device)
    for axis, x in enumerate(at):
        if isinstance(x, slice) and x.start is None and x.stop is None:
            continue
        if isinstance(x, slice):
            start, stop = (None if k is None else _bound(k, view, axis) for k in (x.start, x.stop))
            value = _placed(value, axis, view.shape[axis], start)
        else:  # a slice of one, whose axis the value has not
            start = _bound(x, view, axis)
            value, stop = value.unsqueeze(axis), start + 1
        places = torch.arange(view.shape[axis], device=view.device).view(-1, *[1] * (view.dim() - axis - 1))
        inside = inside if start is None else inside & (places >= start)
        inside = inside if stop is None else inside & (places < stop)
    return torch.where(inside, value, view)


def _bound(x, view, axis):
    """A bound as a tensor, counted from the start of the axis."""
    bound = x if isinstance(x, torch.Tensor) else torch.full((), x, device=view.device)
    return torch.where(bound < 0, bound + view.shape[axis], bound)


def _placed(value, axis, size, start):
    """`value`, which is as long as the slice, or one number, as long as what is sliced, and in its place there."""
    if type(value.shape[axis]) is int and value.shape[axis] == 1:
        return value
    places = torch.arange(size, device=value.device)
    places = places if start is None else places - start.clamp(min=0)
    before = value.new_zeros([1 if k == axis else n for k, n in enumerate(value.shape)])  # the slice may be empty
    padded = torch.cat([before, value], axis)
    return padded.index_select(axis, (places + 1).clamp(min=0).clamp(max=value.shape[axis]))


def _without_lists(index):
    """`x[rows, columns]` of lists of places that tensors tell, and of ranges as long as a size: torch asks for their numbers."""
    if not torch.compiler.is_exporting():
        return index
    if not isinstance(index, tuple):
        return stacked(index) if is_symbolic(index) else index
    return tuple(stacked(x) if has_tensors(x) else x for x in index)


def _with_axes_of_masks(input, index):
    """`x[b]` of one truth, which shows x once or not at all: a mask of an axis of one, that is not there before."""
    items = index if isinstance(index, tuple) else (index,)
    truths = [isinstance(x, torch.Tensor) and not x.dim() and not _is_place(x) for x in items]
    if not any(truths):
        return input, index
    pairs = [*zip(items, truths)]
    axes = [
        None if truth else ... if x is ... else slice(None)
        for x, truth in pairs
        if x is not None
        for _ in range(_axes(x) or 1)
    ]
    return input[tuple(axes)], tuple(x.reshape(1).bool() if truth else x for x, truth in pairs)


def _select(select):
    """`x[t]` alone, which torch makes select with a number that the export does not know; noted for `x[t] += v`."""

    def selected(input, dim, index):
        shown = select(input, dim, index)
        if torch.compiler.is_exporting() and (_is_told(index) or hasattr(input, "_shown_at")):
            shown._shown_at = input, dim, index
        return shown

    return selected


def _slice(input, dim=0, start=None, end=None, step=1):
    """`x[:t]`, which torch makes this of; noted for `x[:t] += v`, too."""
    shown = torch.ops.aten.slice(input, dim, start, end, step)
    index = slice(start, end)
    if torch.compiler.is_exporting() and step == 1 and (_is_told_range(index) or hasattr(input, "_shown_at")):
        shown._shown_at = input, dim, index
    return shown


def _is_told(index) -> bool:
    """Whether it is a tensor, or the number made of one."""
    if isinstance(index, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # here: with it comes sympy

        return bool(free_unbacked_symbols(index))
    return isinstance(index, torch.Tensor)


def _in_place(name: str):
    """`x[t] += v`, `x[:t] += v`: Python reads, changes what it has read, and writes it; what is read shows x, but not to an export."""
    function, out_of_place = getattr(torch.Tensor, f"{name}_"), getattr(torch.Tensor, name)

    def changed(input, *args, **kwargs):
        if not hasattr(input, "_shown_at"):
            return function(input, *args, **kwargs)
        result = out_of_place(input, *args, **kwargs).to(input.dtype)
        _write(input, result)
        return result

    return changed


def _write(shown, value):
    input, dim, index = shown._shown_at
    if isinstance(index, slice):
        whole = _with(input, [slice(None)] * dim + [index] + [slice(None)] * (input.dim() - dim - 1), value)
    else:
        whole = torch.select_scatter(input, value, dim, index)
    if hasattr(input, "_shown_at"):
        _write(input, whole)
    else:
        input.copy_(whole)


def _counted(index) -> tuple[int, int]:
    """How many places among the indices are tensors of one number, and how many are other tensors or lists."""
    items = index if isinstance(index, tuple) else (index,)
    known = all(isinstance(x, (int, slice, list, torch.Tensor, torch.SymInt)) or x is None or x is ... for x in items)
    if not known or any(isinstance(x, bool) for x in items) or not torch.compiler.is_exporting():
        return 0, 0
    tensors = [x for x in items if isinstance(x, (torch.Tensor, list))]
    places = sum(map(_is_place, tensors))
    return places, len(tensors) - places


def _is_place(index) -> bool:
    return isinstance(index, torch.Tensor) and not index.dim() and index.dtype not in _NO_PLACES


def _shown(input, index):
    """What ints, slices and None show of `input`, and the tensors among the indices, as aten.index takes them.

    A place is an index like the others there, but where these go, its axis does not count: it goes before the first one.
    """
    items = _items(input, index)
    basic = tuple(k for x in items for k in ([slice(None)] * _axes(x) if isinstance(x, torch.Tensor) else [x]))
    view = input[basic]
    left = [x if isinstance(x, torch.Tensor) else None for x in items if not isinstance(x, (int, torch.SymInt))]
    starts = [sum(map(_axes, left[:at])) for at in range(len(left))]
    places = [at for at, x in enumerate(left) if _is_place(x)]
    first = next((at for at, x in enumerate(left) if x is not None and at not in places), None)
    if first is None:
        return view, left
    order = [at for at in range(first) if at not in places] + places
    order += [at for at in range(first, len(left)) if at not in places]
    axes = [axis for at in order for axis in range(starts[at], starts[at] + _axes(left[at]))]
    return view.permute(axes), [left[at] for at in order]


def _items(input, index) -> list:
    """The indices, with lists as tensors, and a slice for each axis that has none."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(x, device=input.device) if isinstance(x, list) else x for x in items]
    taken = sum(_axes(x) for x in items if x is not None and x is not ...)
    at = next((at for at, x in enumerate(items) if x is ...), len(items))
    items[at : at + 1] = [slice(None)] * (input.dim() - taken)
    return items


def _axes(index) -> int:
    """How many axes an index is for."""
    return index.dim() if isinstance(index, torch.Tensor) and index.dtype in _NO_PLACES else 1


def _rank(view, indices) -> int:
    """The number of axes of view[indices]."""
    tensors = [x for x in indices if x is not None]
    broadcast = max(1 if x.dtype in _NO_PLACES else x.dim() for x in tensors)
    return view.dim() - sum(map(_axes, tensors)) + broadcast


REWRITES = {
    torch.Tensor.__getitem__: _get_item,
    torch.Tensor.__setitem__: _set_item,
    torch.ops.aten.slice: _slice,
    **{select: _select(select) for select in (torch.select, torch.Tensor.select)},
    **{getattr(torch.Tensor, f"{name}_"): _in_place(name) for name in ("add", "sub", "mul", "div")},
}
