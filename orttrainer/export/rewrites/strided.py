"""Views by strides: the exporters read the elements in the order of the axes, not of the memory, and lose what is written."""

from __future__ import annotations

import torch

from orttrainer.errors import UnsupportedModelError

__all__ = ["REWRITES"]


def _as_strided(input, size, stride, storage_offset=None):
    """`torch.as_strided` of what `input` is a view of, with the axes in the order in which they lie in memory."""
    base = input if input._base is None or input._base.dtype != input.dtype else input._base
    begin = input.storage_offset() if storage_offset is None else storage_offset
    strides = base.stride()
    memory = base.permute(sorted(range(base.dim()), key=lambda axis: (strides[axis], base.shape[axis]), reverse=True))
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


REWRITES = {torch.as_strided: _as_strided, torch.Tensor.as_strided: _as_strided, torch.Tensor.unfold: _unfold}
