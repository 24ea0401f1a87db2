"""Factorizations that end after a step for each column: Cholesky and QR; `elimination` has LU.

In float64: what LAPACK does in the caller's dtype is short of its roundings by what pivots and orders of sums it takes.
A factorization is a loop of its own, so the gradient is not that of the loop, which keeps a matrix for each step, but
PyTorch's closed form in the factors (Giles, "An extended collection of matrix derivative results", 2008).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan
from torch.autograd import Function

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.linear_algebra import applied, only_exporting
from orttrainer.export.rewrites.triangles import (
    dense,
    eye,
    half_of,
    inverse_of_triangle,
    inverted_by_halves,
    put_together,
)

__all__ = ["REWRITES", "complete_basis", "orthonormal", "symmetric"]

# ---------------------------------------------------------------- Cholesky


class _Cholesky(Function):
    """The lower factor of a positive definite matrix, by columns; NaN where it has none."""

    @staticmethod
    def forward(ctx, A):
        factor = _lower_factor(symmetric(A.double(), "L")).to(A.dtype)
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, dL):
        factor = ctx.saved_tensors[0].double()
        product = factor.mT @ dL.double()
        half = product.tril(-1) + 0.5 * torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        root = inverse_of_triangle(factor, upper=False)
        dA = root.mT @ half @ root
        return (0.5 * (dA + dA.mT)).to(dL.dtype)


def _lower_factor(A):
    if (half := half_of(A)) is not None:
        first = _lower_factor(A[..., :half, :half])
        below = A[..., half:, :half] @ inverted_by_halves(first).mT
        return put_together(first, below, _lower_factor(A[..., half:, half:] - below @ below.mT))

    def column(rest, unit):
        x = (rest * unit).sum(-1)
        x = x / (x * unit).sum(-1, keepdim=True).sqrt()
        return rest - x.unsqueeze(-1) * x.unsqueeze(-2), x.clone()

    return scan(column, dense(A), eye(A), dim=0)[1].movedim(0, -1).tril()


def symmetric(A, triangle):
    """The symmetric matrix that has this triangle of A."""
    return A.tril() + A.tril(-1).mT if triangle.upper() == "L" else A.triu() + A.triu(1).mT


def _cholesky(input, *, upper=False, out=None):
    factor = applied(_Cholesky, input)
    return factor.mT if upper else factor


def _old_cholesky(input, upper=False, *, out=None):
    return _cholesky(input.mT if upper else input, upper=upper)


def _cholesky_ex(input, *, upper=False, check_errors=False, out=None):
    factor = _cholesky(input, upper=upper)
    positive, size = factor.diagonal(dim1=-2, dim2=-1) > 0, input.shape[-1]
    pivots = torch.arange(1, size + 1, dtype=torch.int32, device=input.device)
    first = torch.where(positive, size + 1, pivots).amin(-1)  # NaN follows it
    return torch.return_types.linalg_cholesky_ex((factor, (first % (size + 1)).to(torch.int32)))


class _CholeskySolve(Function):
    """X with L L^T X = B, or U^T U X = B; PyTorch's gradient of a factor is that of the whole matrix, not of its triangle."""

    @staticmethod
    def forward(ctx, B, factor, upper):
        X = _solved(B, factor, upper)
        ctx.upper = upper
        ctx.save_for_backward(factor, X)
        return X

    @staticmethod
    def backward(ctx, dX):
        factor, X = ctx.saved_tensors
        dB = _solved(dX, factor, ctx.upper)
        product = dB @ X.mT
        product = product + product.mT
        return dB, -(factor @ product if ctx.upper else product @ factor), None


def _solved(B, factor, upper):
    root = inverse_of_triangle(factor, upper)
    root = root.mT if upper else root
    return (root.mT @ (root @ B.double())).to(B.dtype)


def _cholesky_solve(B, L, upper=False, *, out=None):
    """torch.cholesky_solve."""
    if torch._C._are_functorch_transforms_active():
        return _solved(B, L, upper)
    if B.shape[:-2] != L.shape[:-2]:
        batch = torch.broadcast_shapes(B.shape[:-2], L.shape[:-2])
        B, L = B.expand(*batch, *B.shape[-2:]), L.expand(*batch, *L.shape[-2:])
    return _CholeskySolve.apply(B, L, upper)


def _cholesky_inverse(L, upper=False, *, out=None):
    """torch.cholesky_inverse: (L L^T)^-1, or (U^T U)^-1."""
    return _cholesky_solve(eye(L), L, upper)


# ---------------------------------------------------------------- QR


def _householder_product(input, tau, *, out=None):
    """torch.linalg.householder_product: the first columns of (I - tau_1 v_1 v_1^T) (I - tau_2 v_2 v_2^T) ...

    As I - V T V^T, where T is the inverse of a triangle (Joffrain et al., "Accumulating Householder transformations,
    revisited", 2006).
    """
    return _reflected(input, tau, input.shape[-1]).to(input.dtype)


def _reflected(reflectors, tau, columns):
    """The first columns of the product of `reflectors`, of which what is below the diagonal is read; in float64."""
    v, T = _compact(reflectors, tau)
    return torch.eye(v.shape[-2], columns, dtype=v.dtype, device=v.device) - v @ (T @ v[..., :columns, :].mT)


def _ormqr(input, tau, other, left=True, transpose=False, *, out=None):
    """torch.ormqr: a product with the whole of what `_householder_product` has the first columns of."""
    v, T = _compact(input, tau)
    T, other = T.mT if transpose else T, other.double()
    product = other - v @ (T @ (v.mT @ other)) if left else other - ((other @ v) @ T) @ v.mT
    return product.to(input.dtype)


def _compact(reflectors, tau):
    """V and T of the product I - V T V^T."""
    tau = tau.double()
    unit = torch.eye(reflectors.shape[-2], tau.shape[-1], dtype=tau.dtype, device=tau.device)
    v = reflectors.double()[..., : tau.shape[-1]].tril(-1) + unit
    among = tau.unsqueeze(-1) * (v.mT @ v).triu(1)
    return v, inverted_by_halves((eye(among) + among).mT).mT * tau.unsqueeze(-2)


def _householder(A):
    """R, the reflectors below its diagonal, and their factors, as LAPACK's geqrf has them."""
    rows, number = A.shape[-2], min(A.shape[-2:])
    if (half := half_of(A[..., :number])) is not None:
        R, v, tau = _householder(A[..., :half])
        V, T = _compact(v, tau)
        right = A[..., half:] - V @ (T.mT @ (V.mT @ A[..., half:]))
        below, other_v, other_tau = _householder(right[..., half:, :])
        R = torch.cat([R, torch.cat([right[..., :half, :], below], -2)], -1)
        return R, torch.cat([v, F.pad(other_v, (0, 0, half, 0))], -1), torch.cat([tau, other_tau], -1)
    units = torch.eye(number, rows, dtype=A.dtype, device=A.device)

    def reflect(R, positions):
        unit, column = positions
        x = (R * column).sum(-1)
        below = torch.cumsum(unit, -1) - unit
        alpha, tail = (x * unit).sum(-1, keepdim=True), x * below
        tail_norm = tail.square().sum(-1, keepdim=True)
        beta = (alpha.square() + tail_norm).sqrt()
        beta = torch.where(alpha < 0, beta, -beta)
        still = tail_norm == 0
        v = tail / torch.where(still, torch.ones_like(alpha), alpha - beta)
        factor = torch.where(still, torch.zeros_like(beta), 1 - alpha / torch.where(still, torch.ones_like(beta), beta))
        whole = v + unit
        reflected = R - factor.unsqueeze(-1) * whole.unsqueeze(-1) * (whole.unsqueeze(-2) @ R)
        return reflected, (v.clone(), factor.squeeze(-1))

    columns = torch.eye(number, A.shape[-1], dtype=A.dtype, device=A.device)
    R, (v, tau) = scan(reflect, dense(A), (units, columns), dim=0)
    return R, v.movedim(0, -1), tau.movedim(0, -1)


def orthonormal(A):
    """Q and R of min(m, n) columns and rows."""
    R, reflectors, tau = _householder(A)
    number = min(A.shape[-2:])
    return _reflected(reflectors, tau, number), R[..., :number, :].triu()


class _QR(Function):
    @staticmethod
    def forward(ctx, A):
        Q, R = (x.to(A.dtype) for x in orthonormal(A.double()))
        ctx.save_for_backward(A, Q, R)
        return Q, R

    @staticmethod
    def backward(ctx, dQ, dR):
        number, dtype = dQ.shape[-1], dQ.dtype
        A, Q, R = (x.double() for x in ctx.saved_tensors)
        dQ, dR = dQ.double(), dR.double()
        beyond = dR[..., number:]  # more columns than rows: these are Q^T A
        # Products over nothing ONNX Runtime (1.31.1) does not write, where it takes a transpose into those of a batch.
        if A.shape[-1] > number:
            dQ = dQ + A[..., number:] @ beyond.mT
        R, dR = R[..., :number], dR[..., :number]
        M = R @ dR.mT - dQ.mT @ Q
        dA = (dQ + Q @ (M.tril() + M.tril(-1).mT)) @ inverse_of_triangle(R, upper=True).mT
        return (torch.cat([dA, Q @ beyond], -1) if A.shape[-1] > number else dA).to(dtype)


def complete_basis(U):
    """Orthonormal columns, and what makes them a basis; these have no gradient in PyTorch either."""
    rows, columns = U.shape[-2:]
    if rows == columns:
        return U
    _, reflectors, tau = _householder(U.double())
    others = _reflected(reflectors, tau, rows)[..., columns:].to(U.dtype)
    return torch.cat([U, stopped(others)], -1)


def _qr(A, mode="reduced", *, out=None):
    """torch.linalg.qr."""
    if mode == "reduced" or (mode == "complete" and A.shape[-2] <= A.shape[-1]):
        return torch.return_types.linalg_qr(applied(_QR, A))
    R, reflectors, tau = _householder(A.double())
    R = stopped(R.triu().to(A.dtype))  # PyTorch, too, has a gradient of the reduced form only
    if mode == "complete":
        return torch.return_types.linalg_qr((stopped(_reflected(reflectors, tau, A.shape[-2]).to(A.dtype)), R))
    return torch.return_types.linalg_qr((A.new_empty(0), R[..., : min(A.shape[-2:]), :]))


def _old_qr(input, some=True, *, out=None):
    return torch.return_types.qr(tuple(_qr(input, "reduced" if some else "complete")))


REWRITES = only_exporting(
    {
        torch.linalg.cholesky: _cholesky,
        torch.linalg.cholesky_ex: _cholesky_ex,
        **dict.fromkeys([torch.cholesky, torch.Tensor.cholesky], _old_cholesky),
        **dict.fromkeys([torch.cholesky_solve, torch.Tensor.cholesky_solve], _cholesky_solve),
        **dict.fromkeys([torch.cholesky_inverse, torch.Tensor.cholesky_inverse], _cholesky_inverse),
        torch.linalg.householder_product: _householder_product,
        **dict.fromkeys([torch.orgqr, torch.Tensor.orgqr], _householder_product),
        **dict.fromkeys([torch.ormqr, torch.Tensor.ormqr], _ormqr),
        torch.linalg.qr: _qr,
        **dict.fromkeys([torch.qr, torch.Tensor.qr], _old_qr),
    }
)
