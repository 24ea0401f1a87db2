"""What forward writes where autograd does not see it: under `no_grad`, or by way of `data`.

    y.data.masked_fill_(mask, -1)          with torch.no_grad(): y[:, 0].mul_(2)

In PyTorch only values change by that: a buffer gets no gradient, and what forward has computed keeps the one that it
had. In a trace the `data` of the latter is a copy: what is written to one of them has to be written to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from orttrainer.export.forms.changed_parameters import VIEWS
from orttrainer.export.forms.stop_gradient import detached, stopped, viewed
from orttrainer.export.untouched import SET_DATA, memory_of, written

__all__ = ["copied", "write", "write_back", "written_apart"]

_FORMS = {"squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}  # change no values


def write(x: torch.Tensor, value: torch.Tensor) -> None:
    """Write `value` to `x`, which keeps its gradient."""
    with torch.no_grad():
        value = stopped(value) if value.requires_grad else value
        if _computed(x):
            nothing = x - stopped(x)
            value = value + torch.where(nothing == 0, nothing, 0)  # inf - inf is NaN
        x.copy_(value)


def write_back(func: Callable, args: tuple, kwargs: dict) -> None:
    """Write to what forward computed what a call wrote to its `data`, or to a view of that; and what it wrote there to its `data`."""
    for target in written(func, args, kwargs) if torch.compiler.is_exporting() else ():
        copy = viewed(target)
        if _computed(x := getattr(copy, "data_of", None)):
            write(x, copy)
        if func == SET_DATA or getattr(func, "__name__", "") in _FORMS:
            continue
        for other in [known() for known in getattr(viewed(copy if x is None else x), "copies", ())]:
            if other is not None and other is not copy and _computed(other.data_of):
                with torch.no_grad():
                    other.copy_(stopped(other.data_of))


def copied(func: Callable, args: tuple) -> torch.Tensor | None:
    """The `data` of what forward computed, if a call under `no_grad` would write to it, or show it."""
    if not torch.compiler.is_exporting() or not args or not _computed(args[0]):
        return None
    shows = getattr(func, "__name__", "") in VIEWS - {"detach", "__get__"}
    return detached(args[0]) if shows or any(x is args[0] for x in written(func, args, {})) else None


def written_apart(func: Callable, args: tuple, kwargs: dict, buffers: Iterable[torch.Tensor]) -> tuple[Any, dict]:
    """The arguments of a call, of which what is written unseen, such as a parameter to a buffer that follows it, has no gradient."""
    target = next(written(func, args, kwargs), None) if torch.compiler.is_exporting() else None
    if target is None or (torch.is_grad_enabled() and not _shows_apart(target, buffers)):
        return args, kwargs
    apart = lambda x: stopped(x) if isinstance(x, torch.Tensor) and x.requires_grad else x  # noqa: E731
    return (*args[:1], *pytree.tree_map(apart, args[1:])), pytree.tree_map(apart, kwargs)


def _computed(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf


def _shows_apart(x: torch.Tensor, buffers: Iterable[torch.Tensor]) -> bool:
    """Whether `x` shows the memory of a buffer, and is no view of it for autograd."""
    memory = memory_of(x)
    shown = [buffer for buffer in buffers if memory is not None and memory_of(buffer) == memory]
    return bool(shown) and not any(buffer is x or buffer is x._base for buffer in shown)
