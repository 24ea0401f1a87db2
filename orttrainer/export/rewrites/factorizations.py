"""Triangular systems, and the factorizations that end after a step for each column: Cholesky, LU, QR.

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
from orttrainer.export.rewrites.linear_algebra import applied, inverse, only_exporting

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
    if unit:
        triangle = eye(A) + (A.triu(1) if upper else A.tril(-1))
    else:
        triangle = A.triu() if upper else A.tril()
    return _inverted_by_halves(triangle.mT).mT if upper else _inverted_by_halves(triangle)


def _inverted_by_halves(L):
    """The inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]: products, until the halves are small."""
    half = _half(L)
    if half is None:
        return inverse(L)
    first, last = _inverted_by_halves(L[..., :half, :half]), _inverted_by_halves(L[..., half:, half:])
    return _put_together(first, -last @ (L[..., half:, :half] @ first), last)


def _half(A) -> int | None:
    """After how many of its columns the other ones are brought up to date, by products; None: one by one, there are few."""
    size = A.shape[-1]
    return size // 2 if isinstance(size, int) and size > _FEW else None


_FEW = 48


def _put_together(first, below, last):
    """[[first, 0], [below, last]]"""
    return torch.cat([F.pad(first, (0, last.shape[-1])), torch.cat([below, last], -1)], -2)


def _dense(A):
    """A copy as a loop can begin with: with the layout of what it makes of it."""
    return A.clone(memory_format=torch.contiguous_format)


def eye(A):
    """The identity that A can be multiplied with."""
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)


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
        root = _inverse_of_triangle(factor, upper=False)
        dA = root.mT @ half @ root
        return (0.5 * (dA + dA.mT)).to(dL.dtype)


def _lower_factor(A):
    if (half := _half(A)) is not None:
        first = _lower_factor(A[..., :half, :half])
        below = A[..., half:, :half] @ _inverted_by_halves(first).mT
        return _put_together(first, below, _lower_factor(A[..., half:, half:] - below @ below.mT))

    def column(rest, unit):
        x = (rest * unit).sum(-1)
        x = x / (x * unit).sum(-1, keepdim=True).sqrt()
        return rest - x.unsqueeze(-1) * x.unsqueeze(-2), x.clone()

    return scan(column, _dense(A), eye(A), dim=0)[1].movedim(0, -1).tril()


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


def _cholesky_solve(B, L, upper=False, *, out=None):
    """torch.cholesky_solve: X with L L^T X = B."""
    root = _inverse_of_triangle(L, upper)
    root = root.mT if upper else root
    return (root.mT @ (root @ B.double())).to(B.dtype)


def _cholesky_inverse(L, upper=False, *, out=None):
    root = _inverse_of_triangle(L, upper)
    return (root @ root.mT if upper else root.mT @ root).to(L.dtype)


# ---------------------------------------------------------------- LU, and determinants of any size


def _eliminated(A, free=None):
    """P^T, the columns of L in the order of A's rows, U, and which rows are free, by elimination in those that were.

    The pivot is the largest element of each column.
    """
    free = torch.ones_like(A[..., 0]) if free is None else free
    if (half := _half(A)) is not None:
        P, factors, U, free = _eliminated(A[..., :half], free)
        right = _inverted_by_halves(P.mT @ factors) @ (P.mT @ A[..., half:])
        rest = (A[..., half:] - factors @ right) * free.unsqueeze(-1)
        other_P, other_factors, other_U, free = _eliminated(rest, free)
        U = _put_together(U.mT, right.mT, other_U.mT).mT
        return torch.cat([P, other_P], -1), torch.cat([factors, other_factors], -1), U, free

    def eliminate(state, unit):
        rest, free = state
        column = (rest @ unit.unsqueeze(-1)).squeeze(-1)
        pivot = torch.where(free > 0, column.abs(), -1.0).argmax(-1, keepdim=True)
        chosen = torch.zeros_like(free).scatter(-1, pivot, 1.0)
        row = (chosen.unsqueeze(-2) @ rest).squeeze(-2)
        value = (row * unit).sum(-1, keepdim=True)
        factors = torch.where(value == 0, torch.zeros_like(column), column / value)
        factors = torch.where(chosen > 0, torch.ones_like(factors), factors * free)
        rest = rest - factors.unsqueeze(-1) * row.unsqueeze(-2)  # 0 in the chosen row
        return (rest, free * (1 - chosen)), (chosen, factors.clone(), row.clone())

    units = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    (_, free), (chosen, factors, rows) = scan(eliminate, (_dense(A), free.clone()), units, dim=0)
    return chosen.movedim(0, -1), factors.movedim(0, -1), rows.movedim(0, -2).triu(), free


class _LU(Function):
    """P, L and U of a square matrix."""

    @staticmethod
    def forward(ctx, A):
        P, factors, U, _ = _eliminated(A.double())
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
    return torch.return_types.linalg_lu(applied(_LU, A))


def _pivots(A):
    """Numbers whose product is the determinant but for its sign, and 1 or -1, which is the rest of that."""
    P, _, U, _ = _eliminated(A.double())
    order = P.argmax(-2)
    exchanges = (order.unsqueeze(-1) > order.unsqueeze(-2)).triu(1).sum((-2, -1))
    return U.diagonal(dim1=-2, dim2=-1), 1 - 2 * (exchanges % 2)


class _Det(Function):
    @staticmethod
    def forward(ctx, A):
        pivots, sign = _pivots(A)
        found = sign * pivots.prod(-1)
        ctx.save_for_backward(A, found)
        return found

    @staticmethod
    def backward(ctx, d):
        A, found = ctx.saved_tensors
        return (d * found)[..., None, None] * inverse(A).mT


def _det(A, *, out=None):
    """torch.linalg.det; also of large matrices of float64, of which ONNX Runtime has none, and of small ones within `torch.vmap`."""
    small = A.shape[-1] <= 3
    if torch._C._are_functorch_transforms_active():
        return _det_by_products(A) if small else applied(_Det, A)
    return torch.linalg.det(A) if A.dtype != torch.float64 or small else applied(_Det, A)


def _det_by_products(A):
    """The determinant of a matrix of at most three rows."""
    if A.shape[-1] < 3:
        diagonal = A.diagonal(dim1=-2, dim2=-1).prod(-1)
        return diagonal if A.shape[-1] == 1 else diagonal - A[..., 0, 1] * A[..., 1, 0]
    return (torch.linalg.cross(A[..., 0, :], A[..., 1, :]) * A[..., 2, :]).sum(-1)


class _Slogdet(Function):
    """Sign and logarithm of the determinant, which itself may be too large or small for a number."""

    @staticmethod
    def forward(ctx, A):
        pivots, sign = _pivots(A)
        sign = sign * torch.sign(pivots).prod(-1)
        ctx.save_for_backward(A)
        sign = sign.to(A.dtype)
        ctx.mark_non_differentiable(sign)
        return sign, pivots.abs().log().sum(-1).to(A.dtype)

    @staticmethod
    def backward(ctx, _, dlogarithm):
        A = ctx.saved_tensors[0].double()
        return (dlogarithm[..., None, None] * inverse(A).mT).to(dlogarithm.dtype)


def _slogdet(A, *, out=None):
    return torch.return_types.linalg_slogdet(applied(_Slogdet, A))


def _logdet(A):
    """torch.logdet, NaN of a negative determinant."""
    sign, logarithm = applied(_Slogdet, A)
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
    v, T = _compact(reflectors, tau)
    return torch.eye(v.shape[-2], columns, dtype=v.dtype, device=v.device) - v @ (T @ v[..., :columns, :].mT)


def _compact(reflectors, tau):
    """V and T of the product I - V T V^T."""
    tau = tau.double()
    unit = torch.eye(reflectors.shape[-2], tau.shape[-1], dtype=tau.dtype, device=tau.device)
    v = reflectors.double()[..., : tau.shape[-1]].tril(-1) + unit
    among = tau.unsqueeze(-1) * (v.mT @ v).triu(1)
    return v, _inverted_by_halves((eye(among) + among).mT).mT * tau.unsqueeze(-2)


def _householder(A):
    """R, the reflectors below its diagonal, and their factors, as LAPACK's geqrf has them."""
    rows, number = A.shape[-2], min(A.shape[-2:])
    if (half := _half(A[..., :number])) is not None:
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
    R, (v, tau) = scan(reflect, _dense(A), (units, columns), dim=0)
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
        dA = (dQ + Q @ (M.tril() + M.tril(-1).mT)) @ _inverse_of_triangle(R, upper=True).mT
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
        **dict.fromkeys([torch.linalg.det, torch.det, torch.Tensor.det], _det),
        **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet], _slogdet),
        **dict.fromkeys([torch.logdet, torch.Tensor.logdet], _logdet),
        torch.linalg.qr: _qr,
        **dict.fromkeys([torch.qr, torch.Tensor.qr], _old_qr),
    }
)
