"""Triangular systems, in float64: what LAPACK does in the caller's dtype is short of its roundings by the orders of its sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orttrainer.export.rewrites.linear_algebra import inverse, only_exporting

__all__ = ["REWRITES", "dense", "eye", "half_of", "inverse_of_triangle", "inverted_by_halves", "put_together"]


def _solve_triangular(A, B, *, upper, left=True, unitriangular=False, out=None):
    """torch.linalg.solve_triangular: X with A X = B, or X A = B; the other triangle of A is not read."""
    solution = inverse_of_triangle(A, upper, unitriangular)
    return (solution @ B.double() if left else B.double() @ solution).to(B.dtype)


def _triangular_solve(b, A, upper=True, transpose=False, unitriangular=False, *, out=None):
    """torch.triangular_solve, which gives its A back."""
    triangle = inverse_of_triangle(A, upper, unitriangular)
    solution = (triangle.mT if transpose else triangle) @ b.double()
    return torch.return_types.triangular_solve((solution.to(b.dtype), A.clone()))


def inverse_of_triangle(A, upper, unit=False):
    A = A.double()
    if unit:
        triangle = eye(A) + (A.triu(1) if upper else A.tril(-1))
    else:
        triangle = A.triu() if upper else A.tril()
    return inverted_by_halves(triangle.mT).mT if upper else inverted_by_halves(triangle)


def inverted_by_halves(L):
    """The inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]: products, until the halves are small."""
    half = half_of(L)
    if half is None:
        return inverse(L)
    first, last = inverted_by_halves(L[..., :half, :half]), inverted_by_halves(L[..., half:, half:])
    return put_together(first, -last @ (L[..., half:, :half] @ first), last)


def half_of(A) -> int | None:
    """After how many of its columns the other ones are brought up to date, by products; None: one by one, there are few."""
    size = A.shape[-1]
    return size // 2 if isinstance(size, int) and size > _FEW else None


_FEW = 48


def put_together(first, below, last):
    """[[first, 0], [below, last]]"""
    return torch.cat([F.pad(first, (0, last.shape[-1])), torch.cat([below, last], -1)], -2)


def dense(A):
    """A copy as a loop can begin with: with the layout of what it makes of it."""
    return A.clone(memory_format=torch.contiguous_format)


def eye(A):
    """The identity that A can be multiplied with."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


REWRITES = only_exporting(
    {
        torch.linalg.solve_triangular: _solve_triangular,
        **dict.fromkeys([torch.triangular_solve, torch.Tensor.triangular_solve], _triangular_solve),
    }
)
