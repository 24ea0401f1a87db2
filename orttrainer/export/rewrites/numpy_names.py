"""NumPy's names of arguments, which torch takes beside its own: x.mean(axis=0, keepdims=True)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["by_torchs_names"]

_OF_TORCH = {"axis": "dim", "keepdims": "keepdim", "a": "input", "x": "input", "x1": "input", "x2": "other"}


def by_torchs_names(form: Callable | None, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What to call `form` with, which stands in the place of a function of torch's, where it has but torch's names."""
    if form is None or _OF_TORCH.keys().isdisjoint(kwargs):
        return kwargs
    own = _parameters(form)
    return {
        _OF_TORCH[name] if name not in own and _OF_TORCH.get(name) in own else name: x for name, x in kwargs.items()
    }


@functools.cache
def _parameters(form: Callable) -> Collection[str]:
    try:
        return inspect.signature(form).parameters.keys()
    except (TypeError, ValueError):  # a function of C, which knows both
        return ()
