"""Products, norms and inverses of complex matrices, by the real ones of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from orttrainer.export.rewrites import linear_algebra
from orttrainer.export.rewrites.complex_parts import by_parts, parts

__all__ = ["chain", "distance", "matmul", "product", "rewrites_of_others"]


def product(function: Callable) -> Callable:
    """`function` is linear in each of its first two arguments."""

    def applied(x, y, *args, **kwargs):
        (a, b), (c, d) = parts(x), parts(y)
        real = function(a, c, *args, **kwargs) - function(b, d, *args, **kwargs)
        return torch.complex(real, function(a, d, *args, **kwargs) + function(b, c, *args, **kwargs))

    return applied


matmul = product(torch.matmul)


def chain(*matrices):
    """torch.linalg.multi_dot of a list of matrices, or torch.chain_matmul; the first and the last may be vectors."""
    several = matrices[0] if len(matrices) == 1 else matrices
    return functools.reduce(matmul, several)


def _by_blocks(function: Callable) -> Callable:
    """`function` of matrices, an inverse or a power series: that of A + iB is read off that of the real [[A, -B], [B, A]]."""

    def applied(z, *args, **kwargs):
        (a, b), (rows, columns) = parts(z), z.shape[-2:]
        result = function(torch.cat((torch.cat((a, -b), -1), torch.cat((b, a), -1)), -2), *args, **kwargs)
        return torch.complex(result[..., :columns, :rows], result[..., columns:, :rows])

    return applied


_inverse = _by_blocks(linear_algebra.inverse)


def _solve(A, B, *, left=True, out=None):
    """X with A X = B, or X A = B, by the inverse, as of real matrices."""
    inverted, is_vector = _inverse(A), B.dim() == 1
    X = by_parts(torch.unsqueeze)(B, 1) if is_vector else B
    X = matmul(inverted, X) if left else matmul(X, inverted)
    return by_parts(torch.squeeze)(X, 1) if is_vector else X


def _solve_triangular(A, B, *, upper, left=True, unitriangular=False, out=None):
    """torch.linalg.solve_triangular, which reads one triangle, and of that no diagonal where it is ones."""
    triangle = torch.triu if upper else torch.tril
    T = by_parts(triangle)(A, (1 if upper else -1) if unitriangular else 0)
    if unitriangular:
        T = T + torch.eye(A.shape[-1], dtype=A.real.dtype, device=A.device)
    return _solve(T, B, left=left)


def _cholesky(cholesky: Callable) -> Callable:
    """The factor has real numbers on its diagonal. So with the parts of each element in a block of their own it is a triangle, too.

    [[a, -b], [b, a]] for a + ib makes of products of complex matrices those of real ones: it is the factor of that matrix.
    """

    def factor(A, *, upper=False, out=None):
        a, b = parts(A)
        if upper:
            a, b = parts(factor(torch.complex(a.mT, -b.mT)))
            return torch.complex(a.mT, -b.mT)
        b = b.tril(-1) + b.triu(1)
        whole = torch.stack((torch.stack((a, -b), -1), torch.stack((b, a), -1)), -3)  # [..., n, 2, n, 2]
        size = 2 * A.shape[-1]
        found = cholesky(whole.reshape(*A.shape[:-2], size, size))[..., ::2]
        return torch.complex(found[..., ::2, :], found[..., 1::2, :])

    return factor


def _norm(norm: Callable, of_matrices: bool) -> Callable:
    """A norm goes by the absolute values, unless it is one of those `of_matrices` that singular values have."""

    def applied(z, ord=None, dim=None, *args, **kwargs):
        is_vector = isinstance(dim, int) or (dim is None and z.dim() == 1) or not of_matrices
        by_elements = ord != "nuc" and (is_vector or ord not in (2, -2))
        x = z.abs() if by_elements else z
        if ord is None and not args:
            return norm(x, **({} if dim is None else {"dim": dim}), **kwargs)
        return norm(x, ord, *([] if dim is None and not args else [dim]), *args, **kwargs)

    return applied


def distance(input, other, p=2):
    return torch.linalg.vector_norm((input - other).abs(), p)


def rewrites_of_others(others: Mapping[Callable, Callable]) -> dict[Callable, Callable]:
    """Those of functions that are no methods of tensors, or differ from these; `others` are the rewrites of real ones."""
    linalg = torch.linalg
    norms = dict.fromkeys([torch.norm, torch.Tensor.norm, linalg.vector_norm], False)
    norms |= dict.fromkeys([linalg.norm, linalg.matrix_norm], True)
    return {
        **{function: _by_blocks(others[function]) for function in (*linear_algebra.OF_A_MATRIX, linalg.pinv)},
        linalg.solve: _solve,
        linalg.solve_triangular: _solve_triangular,
        linalg.cholesky: _cholesky(others[linalg.cholesky]),
        linalg.multi_dot: chain,
        **{norm: _norm(others.get(norm, norm), of_matrices) for norm, of_matrices in norms.items()},
    }
