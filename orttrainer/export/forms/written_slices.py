"""What is written into a slice, as torch's dynamo exporter should write it down: put side by side with what stays.

Its own form transposes the axis to the front, scatters row by row, and transposes back; that of a single index scatters
number by number.
"""

from __future__ import annotations

import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops import core

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten
_END = 2**63 - 1


def _slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    """aten.slice_scatter: `self` with `src` in the place of self[start:end] along `dim`."""
    start, end = 0 if start is None else start, _END if end is None else end
    known = all(isinstance(number, int) for number in (start, end, step)) and step == 1 and self.shape is not None
    size = self.shape[dim] if known else None
    if known and isinstance(size, int):
        start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    elif known:  # of any size there are: start, what is written, end
        known = start >= 0 and (end >= start or end == _END)
    if not known or end <= start:
        return core.aten_slice_scatter(self, src, dim, start, end, step)
    return _between(self, src, dim, start, None if end in (size, _END) else end)


def _select_scatter(self, src, dim, index):
    """aten.select_scatter: `self` with `src` in the place of self[index] along `dim`."""
    if not isinstance(index, int) or self.shape is None:
        return core.aten_select_scatter(self, src, dim, index)
    size = self.shape[dim]
    if isinstance(size, int):
        index %= size
    after = None if index in (-1, size - 1 if isinstance(size, int) else -1) else index + 1
    return _between(self, op.Unsqueeze(src, [dim]), dim, index, after)


def _diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    """aten.diagonal_scatter: `self` with `src` on a diagonal. What torch makes of it, its own exporter refuses."""
    rank = len(self.shape)
    last = [dim1 % rank, dim2 % rank]
    axes = [axis for axis in range(rank) if axis not in last] + last
    x = self if axes == sorted(axes) else op.Transpose(self, perm=axes)
    rows, columns = (
        op.Range(_int(0), op.Squeeze(op.Shape(x, start=at, end=at + 1), [0]), _int(1)) for at in (rank - 2, rank - 1)
    )
    on_diagonal = op.Equal(op.Sub(columns, op.Unsqueeze(rows, [1])), _int(offset))
    length = op.Shape(src, start=rank - 2)
    place = op.Min(rows if offset >= 0 else columns, op.Sub(length, _int(1)))
    spread = op.Unsqueeze(op.Gather(src, place, axis=rank - 2), [-1 if offset >= 0 else -2])
    y = op.Where(on_diagonal, spread, x)
    return y if x is self else op.Transpose(y, perm=[axes.index(axis) for axis in range(rank)])


def _int(value):
    return op.Constant(value_int=value)


def _between(self, src, dim, start, end):
    """`src` behind self[:start] and before self[end:]."""
    before = [op.Slice(self, [0], [start], [dim])] if start != 0 else []
    behind = [op.Slice(self, [end], [_END], [dim])] if end is not None else []
    parts = [*before, src, *behind]
    return op.Concat(*parts, axis=dim) if len(parts) > 1 else op.Identity(src)


TRANSLATIONS = {
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
}
