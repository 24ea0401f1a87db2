"""Places that PyTorch counts from the front only, where ONNX counts negative ones from the end: here these are nowhere.

So a lookup of places that forward computes fails in the graph. Of those of a batch `engine/indices.py` asks before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from orttrainer.export.values.places import AT_INDEX
from orttrainer.graph.passes.from_front import NOWHERE

__all__ = ["from_front", "with_places"]


def from_front(index: torch.Tensor) -> torch.Tensor:
    """`index`, in which a negative place is one that no axis has."""
    return torch.where(index < 0, NOWHERE, index)


def with_places(func: Callable, args: Sequence, kwargs: Mapping[str, Any]) -> tuple[Sequence, Mapping[str, Any]]:
    """The arguments of `func`, with an `index` that counts from the front, if it takes such a one."""
    if func not in AT_INDEX:
        return args, kwargs
    if isinstance(index := kwargs.get("index"), torch.Tensor):
        return args, {**kwargs, "index": from_front(index)}
    if len(args) > 2 and isinstance(args[2], torch.Tensor):
        return (*args[:2], from_front(args[2]), *args[3:]), kwargs
    return args, kwargs
