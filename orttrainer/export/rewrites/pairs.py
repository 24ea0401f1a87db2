"""Places in a triangle of as many rows as a batch has: torch's functions take numbers, and would be exported for one size."""

from __future__ import annotations

import torch

__all__ = ["REWRITES", "above"]


def _triu_indices(row, col, offset=0, **options):
    """torch.triu_indices: (i, j) with j >= i + offset, row by row."""
    if not _grows(row, col, offset) or offset < 0:
        return torch.triu_indices(row, col, offset, **options)
    return _given(*above(row, offset, options.get("device")), **options)


def _tril_indices(row, col, offset=0, **options):
    """torch.tril_indices: (i, j) with j <= i + offset, row by row."""
    if not _grows(row, col, offset) or offset > 0:
        return torch.tril_indices(row, col, offset, **options)
    first, column = _numbered(lambda i: i * (i + 1) // 2, row + offset, options.get("device"))
    return _given(first - offset, column, **options)


def _grows(row, col, offset):
    """Whether it is a square of a size that varies."""
    square = isinstance(row, torch.SymInt) and isinstance(col, torch.SymInt) and row.node.expr == col.node.expr
    return square and isinstance(offset, int)


def above(size, offset, device=None):
    """The rows and the columns of a square's places from `offset` beside its diagonal on."""
    long = size - offset  # the first row
    row, step = _numbered(lambda i: i * long - i * (i - 1) // 2, long, device)
    return row, row + step + offset


def _numbered(start, rows, device):
    """Of all places of a triangle with so many rows: the row, and which of its row it is, where row i starts at `start(i)`."""
    count = rows * (rows + 1) // 2
    starts = start(torch.arange(rows, device=device))
    row = (
        torch.zeros(count, dtype=torch.int64, device=device).scatter_add(0, starts, torch.ones_like(starts)).cumsum(0)
        - 1
    )
    return row, torch.arange(count, device=device) - starts[row]


def _given(*places, dtype=torch.int64, device=None, layout=torch.strided):
    return torch.stack(places).to(dtype)


REWRITES = {torch.triu_indices: _triu_indices, torch.tril_indices: _tril_indices}
