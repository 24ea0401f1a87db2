"""`Tensor.unfold`, as torch's dynamo exporter should write it down: rows of as many numbers as a step has, side by side.

Its own form gathers each number by its place, which ONNX Runtime copies one by one, and its gradient adds them so.
"""

from __future__ import annotations

import math

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]

_FEW, _MOST = 8, 1024  # rows of a window: up to these they are put side by side at once; by their places beyond
_END = 2**63 - 1


def _unfold(self, dimension, size, step):
    """aten.unfold: [.., length, ..] -> [.., windows, .., size]. A window is some rows that follow each other, the last cut."""
    rank = 0 if self.shape is None else len(self.shape)
    rows, axis = -(-size // step), dimension % max(rank, 1)
    table = _rows(self, axis, size, step, rows) if rank and 0 < rows <= _MOST else None
    if table is None:
        return core.aten_unfold(self, dimension, size, step)
    windows = _following(table, axis, rows, step)
    if size < rows * step:
        windows = op.Slice(windows, [0], [size], [axis + 1])
    order = [k for k in range(rank + 1) if k != axis + 1] + [axis + 1]
    return windows if axis == rank - 1 else op.Transpose(windows, perm=order)


def _following(table, axis, count, size):
    """[.., rows, size, ..] -> [.., rows - count + 1, count * size, ..]: each row, and those behind it.

    Many in two turns, the second of what the first put side by side: of 64 rows there are 16 slices, of more numbers each.
    """
    if count <= _FEW:
        parts = [op.Slice(table, [k], [k + 1 - count or _END], [axis]) for k in range(count)]
        return table if count == 1 else op.Concat(*parts, axis=axis + 1)
    few = math.isqrt(count - 1) + 1
    some = _following(table, axis, few, size)
    parts = [op.Slice(some, [k], [k + few - count or _END], [axis]) for k in range(0, count - few + 1, few)]
    if rest := count % few:
        last = op.Slice(some, [count - few], [_END], [axis])
        parts.append(op.Slice(last, [(few - rest) * size], [_END], [axis + 1]))
    return op.Concat(*parts, axis=axis + 1)


def _rows(self, axis, size, step, rows):
    """[.., rows, step, ..], as many as all windows have, with zeros where they end beyond `self`; None where sizes are not known."""
    if step == 1:
        return op.Unsqueeze(self, [axis + 1])
    length, behind = self.shape[axis], self.shape[axis + 1 :]
    if not all(isinstance(number, int) for number in (length, *behind)):
        return None
    count = (length - size) // step + rows
    more = count * step - length
    if more > 0:
        fitted = op.Pad(self, [*[0] * len(self.shape), *[more if k == axis else 0 for k in range(len(self.shape))]])
    else:
        fitted = op.Slice(self, [0], [count * step], [axis]) if more else self
    return op.Reshape(fitted, [*[0] * axis, count, step, *behind])


TRANSLATIONS = {torch.ops.aten.unfold.default: _unfold}
