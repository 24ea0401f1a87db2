"""`as_strided`: the exporters read the elements in the order of the axes, not of the memory."""

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


REWRITES = {torch.as_strided: _as_strided, torch.Tensor.as_strided: _as_strided}
