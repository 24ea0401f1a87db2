"""Triangular systems, and the factorizations that end after a step for each column: Cholesky, LU, QR.

In float64: what LAPACK does in the caller's dtype is short of its roundings by what pivots and orders of sums it takes.
A factorization is a loop of its own, so the gradient is not that of the loop, which keeps a matrix for each step, but
PyTorch's closed form in the factors (Giles, "An extended collection of matrix derivative results", 2008).
"""

from __future__ import annotations

import torch
from torch._higher_order_ops.scan import scan
from torch.autograd import Function

from orttrainer.export.rewrites.linear_algebra import inverse, no_errors, only_exporting
from orttrainer.export.stop_gradient import stopped

__all__ = ["REWRITES", "complete_basis", "eye", "orthonormal", "symmetric"]

# ---------------------------------------------------------------- triangular systems


def _solve_triangular(A, B, *, upper, left=True, unitriangular=False, out=None):
    """torch.linalg.solve_triangular: X with A X = B, or X A = B; the other triangle of A is not read."""
    solution = _inverse_of_triangle(A, upper, unitriangular)
    return (solution @ B.double() if left else B.double() @ solution).to(B.dtype)


def _triangular_solve(b, A, upper=True, transpose=False, unitriangular=False, *, out=None):
    """torch.triangular_solve, which gives its A back."""
    triangle = _inverse_of_triangle(A, upper, unitriangular)
    solution = (triangle.mT if transpose else triangle) @ b.double()
    return torch.return_types.triangular_solve((solution.to(b.dtype), A.clone()))


def _inverse_of_triangle(A, upper, unit=False):
    A = A.double()
    if not unit:
        return inverse(A.triu() if upper else A.tril())
    return inverse(eye(A) + (A.triu(1) if upper else A.tril(-1)))


def eye(A):
    """The identity that A can be multiplied with."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


# ---------------------------------------------------------------- Cholesky


class _Cholesky(Function):
    """The lower factor of a positive definite matrix, by columns; NaN where it has none."""

    @staticmethod
    def forward(ctx, A):
        def column(rest, unit):
            x = (rest * unit).sum(-1)
            x = x / (x * unit).sum(-1, keepdim=True).sqrt()
            return rest - x.unsqueeze(-1) * x.unsqueeze(-2), x.clone()

        rest = symmetric(A.double(), "L")
        factor = scan(column, rest, eye(rest), dim=0)[1].movedim(0, -1).tril().to(A.dtype)
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, dL):
        factor = ctx.saved_tensors[0].double()
        product = factor.mT @ dL.double()
        half = product.tril(-1) + 0.5 * torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        root = _inverse_of_triangle(factor, upper=False)
        dA = root.mT @ half @ root
        return (0.5 * (dA + dA.mT)).to(dL.dtype)


def symmetric(A, triangle):
    """The symmetric matrix that has this triangle of A."""
    return A.tril() + A.tril(-1).mT if triangle.upper() == "L" else A.triu() + A.triu(1).mT


def _cholesky(input, *, upper=False, out=None):
    factor = _Cholesky.apply(input)
    return factor.mT if upper else factor


def _old_cholesky(input, upper=False, *, out=None):
    return _cholesky(input.mT if upper else input, upper=upper)


def _cholesky_ex(input, *, upper=False, check_errors=False, out=None):
    return torch.return_types.linalg_cholesky_ex((_cholesky(input, upper=upper), no_errors(input)))


def _cholesky_solve(B, L, upper=False, *, out=None):
    """torch.cholesky_solve: X with L L^T X = B."""
    root = _inverse_of_triangle(L, upper)
    root = root.mT if upper else root
    return (root.mT @ (root @ B.double())).to(B.dtype)


def _cholesky_inverse(L, upper=False, *, out=None):
    root = _inverse_of_triangle(L, upper)
    return (root @ root.mT if upper else root.mT @ root).to(L.dtype)


# ---------------------------------------------------------------- LU, and determinants of any size


def _eliminated(A):
    """P^T, the columns of L in the order of A's rows, and U, by elimination with the largest element of each column."""

    def eliminate(state, unit):
        rest, free = state
        column = (rest * unit).sum(-1)
        pivot = torch.where(free > 0, column.abs(), -1.0).argmax(-1, keepdim=True)
        chosen = torch.zeros_like(free).scatter(-1, pivot, 1.0)
        row = (rest * chosen.unsqueeze(-1)).sum(-2)
        value = (row * unit).sum(-1, keepdim=True)
        factors = torch.where(value == 0, torch.zeros_like(column), column / value)
        factors = torch.where(chosen > 0, torch.ones_like(factors), factors * free)
        rest = (rest - factors.unsqueeze(-1) * row.unsqueeze(-2)) * (1 - chosen).unsqueeze(-1)
        return (rest, free * (1 - chosen)), (chosen, factors.clone(), row.clone())

    free = torch.ones_like(A[..., 0])
    _, (chosen, factors, rows) = scan(eliminate, (A.clone(), free), eye(A), dim=0)
    return chosen.movedim(0, -1), factors.movedim(0, -1), rows.movedim(0, -2).triu()


class _LU(Function):
    """P, L and U of a square matrix."""

    @staticmethod
    def forward(ctx, A):
        P, factors, U = _eliminated(A.double())
        P, L, U = (x.to(A.dtype) for x in (P, P.mT @ factors, U))
        L = L.tril()
        ctx.save_for_backward(P, L, U)
        ctx.mark_non_differentiable(P)
        return P, L, U

    @staticmethod
    def backward(ctx, _, dL, dU):
        P, L, U = (x.double() for x in ctx.saved_tensors)
        inner = (L.mT @ dL.double()).tril(-1) + (dU.double() @ U.mT).triu()
        dA = _inverse_of_triangle(L, upper=False, unit=True).mT @ inner @ _inverse_of_triangle(U, upper=True).mT
        return (P @ dA).to(dL.dtype)


def _lu(A, *, pivot=True, out=None):
    """torch.linalg.lu of a square matrix, with pivots."""
    if not pivot or A.shape[-1] != A.shape[-2]:
        return torch.linalg.lu(A, pivot=pivot)
    return torch.return_types.linalg_lu(_LU.apply(A))


class _Slogdet(Function):
    """Sign and logarithm of the determinant, which itself may be too large or small for a number."""

    @staticmethod
    def forward(ctx, A):
        P, _, U = _eliminated(A.double())
        pivots = U.diagonal(dim1=-2, dim2=-1)
        order = P.argmax(-2)
        exchanges = (order.unsqueeze(-1) > order.unsqueeze(-2)).triu(1).sum((-2, -1))
        sign = (1 - 2 * (exchanges % 2)) * torch.sign(pivots).prod(-1)
        ctx.save_for_backward(A)
        sign = sign.to(A.dtype)
        ctx.mark_non_differentiable(sign)
        return sign, pivots.abs().log().sum(-1).to(A.dtype)

    @staticmethod
    def backward(ctx, _, dlogarithm):
        A = ctx.saved_tensors[0].double()
        return (dlogarithm[..., None, None] * inverse(A).mT).to(dlogarithm.dtype)


def _slogdet(A, *, out=None):
    return torch.return_types.linalg_slogdet(_Slogdet.apply(A))


def _logdet(A):
    """torch.logdet, NaN of a negative determinant."""
    sign, logarithm = _Slogdet.apply(A)
    return torch.where(sign < 0, torch.full_like(logarithm, torch.nan), logarithm)


# ---------------------------------------------------------------- QR


def _householder_product(input, tau, *, out=None):
    """torch.linalg.householder_product: the first columns of (I - tau_1 v_1 v_1^T) (I - tau_2 v_2 v_2^T) ...

    As I - V T V^T, where T is the inverse of a triangle (Joffrain et al., "Accumulating Householder transformations,
    revisited", 2006).
    """
    return _reflected(input, tau, input.shape[-1]).to(input.dtype)


def _reflected(reflectors, tau, columns):
    """The first columns of the product of `reflectors`, of which what is below the diagonal is read; in float64."""
    tau, rows = tau.double(), reflectors.shape[-2]
    unit = torch.eye(rows, max(columns, tau.shape[-1]), dtype=tau.dtype, device=tau.device)
    v = reflectors.double()[..., : tau.shape[-1]].tril(-1) + unit[:, : tau.shape[-1]]
    among = tau.unsqueeze(-1) * (v.mT @ v).triu(1)
    combined = inverse(eye(among) + among) * tau.unsqueeze(-2)
    return unit[:, :columns] - v @ (combined @ v[..., :columns, :].mT)


def _householder(A):
    """R, the reflectors below its diagonal, and their factors, as LAPACK's geqrf has them."""
    rows, number = A.shape[-2], min(A.shape[-2:])
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
    R, (v, tau) = scan(reflect, A, (units, columns), dim=0)
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
        dQ = dQ + A[..., number:] @ beyond.mT
        R, dR = R[..., :number], dR[..., :number]
        M = R @ dR.mT - dQ.mT @ Q
        dA = (dQ + Q @ (M.tril() + M.tril(-1).mT)) @ _inverse_of_triangle(R, upper=True).mT
        return torch.cat([dA, Q @ beyond], -1).to(dtype)


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
        return torch.return_types.linalg_qr(_QR.apply(A))
    R, reflectors, tau = _householder(A.double())
    R = stopped(R.triu().to(A.dtype))  # PyTorch, too, has a gradient of the reduced form only
    if mode == "complete":
        return torch.return_types.linalg_qr((stopped(_reflected(reflectors, tau, A.shape[-2]).to(A.dtype)), R))
    return torch.return_types.linalg_qr((A.new_empty(0), R[..., : min(A.shape[-2:]), :]))


def _old_qr(input, some=True, *, out=None):
    return torch.return_types.qr(tuple(_qr(input, "reduced" if some else "complete")))


REWRITES = only_exporting(
    {
        torch.linalg.solve_triangular: _solve_triangular,
        **dict.fromkeys([torch.triangular_solve, torch.Tensor.triangular_solve], _triangular_solve),
        torch.linalg.cholesky: _cholesky,
        torch.linalg.cholesky_ex: _cholesky_ex,
        **dict.fromkeys([torch.cholesky, torch.Tensor.cholesky], _old_cholesky),
        **dict.fromkeys([torch.cholesky_solve, torch.Tensor.cholesky_solve], _cholesky_solve),
        **dict.fromkeys([torch.cholesky_inverse, torch.Tensor.cholesky_inverse], _cholesky_inverse),
        torch.linalg.householder_product: _householder_product,
        **dict.fromkeys([torch.orgqr, torch.Tensor.orgqr], _householder_product),
        torch.linalg.lu: _lu,
        **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet], _slogdet),
        **dict.fromkeys([torch.logdet, torch.Tensor.logdet], _logdet),
        torch.linalg.qr: _qr,
        **dict.fromkeys([torch.qr, torch.Tensor.qr], _old_qr),
    }
)
