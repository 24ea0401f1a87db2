"""Sparse matrices that forward makes, as dense ones: no operator of ONNX takes others."""

from __future__ import annotations

import torch

from orttrainer.export.rewrites.linear_algebra import only_exporting

__all__ = ["REWRITES"]


def _sparse_coo_tensor(indices, values, size=None, *, dtype=None, device=None, **options):
    """torch.sparse_coo_tensor of a given size; what goes to one place is added up."""
    if size is None:  # by the largest of the indices
        return torch.sparse_coo_tensor(indices, values, dtype=dtype, device=device, **options)
    values = torch.as_tensor(values, dtype=dtype, device=device)
    indices = torch.as_tensor(indices, device=values.device)
    return values.new_zeros(size).index_put(tuple(indices.unbind(0)), values, accumulate=True)


def _sparse_csr_tensor(crow_indices, col_indices, values, size=None, **options):
    """torch.sparse_csr_tensor of a given size: an element is in as many rows behind the first as have ended before it."""
    if size is None:
        return torch.sparse_csr_tensor(crow_indices, col_indices, values, **options)
    ends, columns = (torch.as_tensor(x, dtype=torch.int64) for x in (crow_indices[1:], col_indices))
    ended = torch.zeros(columns.shape[0] + 1, dtype=torch.int64, device=ends.device)
    rows = ended.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
    return _sparse_coo_tensor(torch.stack([rows, columns]), values, size, **options)


def _itself(input, *args, **kwargs):
    """What changes the form of a sparse tensor only, or a dense one's into that."""
    return input


REWRITES = only_exporting(
    {
        torch.sparse_coo_tensor: _sparse_coo_tensor,
        torch.sparse_csr_tensor: _sparse_csr_tensor,
        **dict.fromkeys([torch.Tensor.coalesce, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], _itself),
        torch.sparse.mm: torch.mm,
        torch.sparse.addmm: torch.addmm,
        torch.spmm: torch.mm,
    }
)
