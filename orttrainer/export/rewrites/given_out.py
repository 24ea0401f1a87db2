"""`torch.add(x, y, out=z)` as `z.copy_(torch.add(x, y))`.

Only the latter is a write for whatever else asks of a call what it writes: gradients that end, buffers, views of both.
And the exportable forms of functions need not take `out`, which most of them did not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["called_without", "is_given"]


_clone = torch.ops.aten.clone.out


def is_given(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a call writes what it makes of tensors to `out`; what is made of sizes and numbers takes its dtype from there."""
    return (
        kwargs.get("out") is not None
        and func is not _clone
        and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(args))
    )


def called_without(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call `func`, write its results to `out` and return that, in the form of the results."""
    out = kwargs["out"]
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if isinstance(out, torch.Tensor):
        _write(out, result)
        return out
    for x, value in zip(out, result):
        _write(x, value)
    return type(result)(out)


def _write(out: torch.Tensor, value: torch.Tensor) -> None:
    empty = (
        isinstance(out.numel(), int) and out.numel() == 0
    )  # first: to compare sizes that are symbols is to decide by them
    if not empty and tuple(out.shape) == tuple(value.shape):
        out.copy_(value)
    else:
        _clone(value.to(out.dtype), out=out)  # which gives `out` that shape
