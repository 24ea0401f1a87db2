"""Inputs whose numbers are places along an axis: PyTorch refuses a negative one where ONNX counts it from the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from orttrainer.export.untouched import memory_of

__all__ = ["AT_INDEX", "Places"]


def _functions(*names: str) -> set[Callable]:
    return {getattr(owner, name) for owner in (torch, torch.Tensor) for name in names if hasattr(owner, name)}


# Whose third argument, `index`, is one that counts from the front only.
AT_INDEX = _functions(
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select", "index_add",
    "index_add_", "index_copy", "index_copy_", "index_reduce", "index_reduce_",
)  # fmt: skip
_COUNTS = _functions("bincount")
# What has the numbers of its first argument, in other memory.
_SAME_NUMBERS = _functions("long", "int", "to", "type", "clone", "contiguous", "repeat", "tile", "reshape", "flatten")


class Places:
    """Which of a forward's inputs it reads, or writes, by. An index that it computes of them is its own matter."""

    def __init__(self, inputs: Sequence[torch.Tensor] = ()):
        self._inputs: dict[Any, tuple[torch.Tensor, int]] = {}  # by memory, which so is no other tensor's later
        self._found: dict[int, int | None] = {}
        for number, x in enumerate(inputs):
            if x.dtype != torch.bool and not x.is_complex() and (memory := memory_of(x)) is not None:
                self._inputs[memory] = x, number

    def note(self, func: Callable, args: Sequence, kwargs: Mapping[str, Any], result: Any = None) -> None:
        """Note what `func` takes for places."""
        if not self._inputs:
            return
        most = None
        if func in _SAME_NUMBERS:
            number, memory = self._number_of(args[0]), memory_of(result) if isinstance(result, torch.Tensor) else None
            if number is not None and memory is not None:
                self._inputs.setdefault(memory, (result, number))
            return
        if func in AT_INDEX:
            index = kwargs.get("index", args[2] if len(args) > 2 else None)
        elif func in _COUNTS:
            index = args[0] if args else kwargs.get("input")
        elif func is F.one_hot:
            index, classes = args[0] if args else kwargs.get("tensor"), kwargs.get("num_classes", *args[1:2] or (-1,))
            most = classes if type(classes) is int and classes > 0 else None
        else:
            return
        if (number := self._number_of(index)) is not None:
            known = [x for x in (most, self._found.get(number)) if x is not None]
            self._found[number] = min(known, default=None)

    def _number_of(self, x: Any) -> int | None:
        memory = memory_of(x) if isinstance(x, torch.Tensor) else None
        return None if memory is None or memory not in self._inputs else self._inputs[memory][1]

    def found(self) -> tuple[tuple[int, int | None], ...]:
        """The numbers of these inputs, and how many places there are, where a function was told so."""
        return tuple(sorted(self._found.items()))
