"""Views by strides: the exporters read the elements in the order of the axes, not of the memory, and lose what is written."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from orttrainer.errors import UnsupportedModelError

__all__ = ["REWRITES", "Bases"]


class Bases:
    """What views are views of, in one trace: `as_strided` reads that."""

    def __init__(self):
        self._shown: dict[int, torch.Tensor] = {}  # by the base, which it keeps alive

    def rewrites(self) -> dict:
        """What to call instead of the functions that are there."""
        return {torch.as_strided: self._as_strided, torch.Tensor.as_strided: self._as_strided}

    def note(self, args: tuple, kwargs: dict, result: Any) -> None:
        """Remember a result that is a view of no argument but of what its function made within, as F.linear does for rows of rows.

        Of that nothing is known in the trace.
        """
        for x in result if isinstance(result, (tuple, list)) else (result,):
            base = x._base if isinstance(x, torch.Tensor) else None
            if base is None or id(base) in self._shown:
                continue
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not any(base is x or base is x._base for x in given):
                self._shown[id(base)] = x

    def _as_strided(self, input, size, stride, storage_offset=None):
        """`torch.as_strided` of what `input` is a view of, with the axes in the order in which they lie in memory."""
        base = input if input._base is None or input._base.dtype != input.dtype else input._base
        base = self._shown.get(id(base), base)
        begin = input.storage_offset() if storage_offset is None else storage_offset
        strides = base.stride()
        order = sorted(range(base.dim()), key=lambda axis: (strides[axis], base.shape[axis]), reverse=True)
        memory = base.permute(order)
        if not memory.is_contiguous():
            raise UnsupportedModelError(
                f"as_strided of a tensor of shape {tuple(base.shape)} and strides {tuple(strides)}, which leaves gaps in memory"
            )
        return torch.as_strided(memory, size, stride, begin - base.storage_offset())


def _unfold(input, dimension, size, step):
    """`torch.Tensor.unfold`; windows that do not overlap are parts of the axis, and views that forward may write to."""
    length = input.shape[dimension] if input.dim() else None
    windows = (length - size) // step + 1 if 0 < size <= step and isinstance(length, int) else 0
    if windows < 1 or windows * step > length:
        return input.unfold(dimension, size, step)
    axis = dimension % input.dim()
    whole = input if windows * step == length else input.narrow(axis, 0, windows * step)
    parts = whole.unflatten(axis, (windows, step))
    return (parts if size == step else parts.narrow(axis + 1, 0, size)).movedim(axis + 1, -1)


REWRITES = {torch.Tensor.unfold: _unfold}
