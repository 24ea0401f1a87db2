"""LU, by elimination with pivots, and what is read off it: systems and determinants.

In float64, with PyTorch's closed form in the factors for the gradient, as `factorizations` says.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan
from torch.autograd import Function

from orttrainer.export.rewrites.linear_algebra import applied, inverse, only_exporting
from orttrainer.export.rewrites.triangles import dense, half_of, inverse_of_triangle, inverted_by_halves, put_together

__all__ = ["REWRITES"]


def _eliminated(A, free=None):
    """P^T, the columns of L in the order of A's rows, U, and which rows are free, by elimination in those that were.

    The pivot is the largest element of each column.
    """
    free = torch.ones_like(A[..., 0]) if free is None else free
    if (half := half_of(A)) is not None:
        P, factors, U, free = _eliminated(A[..., :half], free)
        right = inverted_by_halves(P.mT @ factors) @ (P.mT @ A[..., half:])
        rest = (A[..., half:] - factors @ right) * free.unsqueeze(-1)
        other_P, other_factors, other_U, free = _eliminated(rest, free)
        U = put_together(U.mT, right.mT, other_U.mT).mT
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
    (_, free), (chosen, factors, rows) = scan(eliminate, (dense(A), free.clone()), units, dim=0)
    return chosen.movedim(0, -1), factors.movedim(0, -1), rows.movedim(0, -2).triu(), free


def _exchanged(chosen):
    """Of the row that each column chose as its pivot: with which place it exchanges that of the column, counted from 1.

    Args:
        chosen: [..., rows, columns], one row of each column.

    Returns:
        The places as LAPACK counts them, int32 [..., columns], and the row in each place behind the last exchange.
    """
    number = chosen.shape[-2]
    places = torch.arange(number, device=chosen.device)
    rows = chosen.argmax(-2)  # [..., columns]

    def exchange(order, step):
        row, column = step
        place = (order == row.unsqueeze(-1)).to(torch.int64).argmax(-1, keepdim=True)
        return _swapped(order, places, place, column), place.squeeze(-1) + 1

    columns = torch.arange(chosen.shape[-1], device=chosen.device)
    order = dense(places.expand(*chosen.shape[:-2], number))
    order, exchanged = scan(exchange, order, (rows.movedim(-1, 0).clone(), columns), dim=0)
    return exchanged.movedim(0, -1).to(torch.int32), order


def _order(pivots, number):
    """The row in each of `number` places behind all exchanges."""
    places = torch.arange(number, device=pivots.device)

    def exchange(order, step):
        place, column = step
        return _swapped(order, places, place.unsqueeze(-1), column), place.clone()

    columns = torch.arange(pivots.shape[-1], device=pivots.device)
    steps = (pivots.to(torch.int64) - 1).movedim(-1, 0).clone(), columns
    return scan(exchange, dense(places.expand(*pivots.shape[:-1], number)), steps, dim=0)[0]


def _swapped(order, places, first, second):
    """`order` with what is in two places exchanged; `first`: [..., 1]."""
    at_first = order.gather(-1, first)
    at_second = order.gather(-1, second.expand(first.shape))
    return torch.where(places == first, at_second, torch.where(places == second, at_first, order))


def _permutation(order, dtype):
    """P, which moves what is in place i to the row that stands there."""
    return F.one_hot(order, order.shape[-1]).to(dtype).mT


class _LU(Function):
    """P, L and U of a matrix, and its pivots."""

    @staticmethod
    def forward(ctx, A):
        number, x = min(A.shape[-2:]), A.double()
        chosen, factors, U, _ = _eliminated(x[..., :number])
        pivots, order = _exchanged(chosen)
        P = _permutation(order, torch.float64)
        L = (P.mT @ factors).tril()
        if A.shape[-1] > number:
            U = torch.cat([U, inverted_by_halves(L) @ (P.mT @ x[..., number:])], -1)
        P, L, U = (y.to(A.dtype) for y in (P, L, U))
        ctx.save_for_backward(P, L, U)
        ctx.mark_non_differentiable(P, pivots)
        return P, L, U, pivots

    @staticmethod
    def backward(ctx, _, dL, dU, __):
        """Beyond the square, L and U are A by U^-1 and L^-1, of which the square's factors have what follows."""
        dtype = dL.dtype
        P, L, U, dL, dU = (x.double() for x in (*ctx.saved_tensors, dL, dU))
        number = min(L.shape[-2], U.shape[-1])
        L, below = L[..., :number, :], L[..., number:, :]
        U, right = U[..., :number], U[..., number:]
        dL, dbelow, dU, dright = dL[..., :number, :], dL[..., number:, :], dU[..., :number], dU[..., number:]
        of_L, of_U = L.mT @ dL, dU @ U.mT
        if P.shape[-1] > number:
            of_U = of_U - below.mT @ dbelow
        if right.shape[-1]:
            of_L = of_L - dright @ right.mT
        by_L = inverse_of_triangle(L, upper=False, unit=True).mT
        by_U = inverse_of_triangle(U, upper=True).mT
        dA = by_L @ (of_L.tril(-1) + of_U.triu()) @ by_U
        if P.shape[-1] > number:
            dA = torch.cat([dA, dbelow @ by_U], -2)
        if right.shape[-1]:
            dA = torch.cat([dA, by_L @ dright], -1)
        return (P @ dA).to(dtype)


def _lu(A, *, pivot=True, out=None):
    """torch.linalg.lu; without pivots PyTorch has it on CUDA only."""
    return torch.return_types.linalg_lu(applied(_LU, A)[:3]) if pivot else torch.linalg.lu(A, pivot=pivot)


def _factored(A):
    """L without its diagonal and U in one matrix, and the pivots."""
    _, L, U, pivots = applied(_LU, A)
    rows, columns = A.shape[-2:]
    below = L.tril(-1)
    if columns > rows:
        below = F.pad(below, (0, columns - rows))
    elif rows > columns:
        U = F.pad(U, (0, 0, 0, rows - columns))
    return below + U, pivots


def _lu_factor(A, *, pivot=True, out=None):
    return torch.return_types.linalg_lu_factor(_factored(A)) if pivot else torch.linalg.lu_factor(A, pivot=pivot)


def _lu_factor_ex(A, *, pivot=True, check_errors=False, out=None):
    if not pivot:
        return torch.linalg.lu_factor_ex(A, pivot=pivot)
    LU, pivots = _factored(A)
    return torch.return_types.linalg_lu_factor_ex((LU, pivots, _first_zero(LU)))


def _first_zero(LU):
    """Which pivot is the first that is 0, counted from 1; 0: none."""
    diagonal = LU.diagonal(dim1=-2, dim2=-1)
    zero = diagonal == 0
    return torch.where(zero.any(-1), zero.to(torch.int64).argmax(-1) + 1, 0).to(torch.int32)


def _old_lu(A, pivot=True, get_infos=False, out=None):
    """torch.lu, which is a function of Python's."""
    LU, pivots, infos = _lu_factor_ex(A, pivot=pivot)
    return (LU, pivots, infos) if get_infos else (LU, pivots)


def _lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True, *, out=None):
    """torch.lu_unpack: P, L and U; empty what is not asked for."""
    number, rows = min(LU_data.shape[-2:]), LU_data.shape[-2]
    P = L = U = LU_data.new_empty(0)
    if unpack_pivots:
        P = _permutation(_order(LU_pivots, rows), LU_data.dtype)
    if unpack_data:
        unit = torch.eye(rows, number, dtype=LU_data.dtype, device=LU_data.device)
        L, U = LU_data[..., :number].tril(-1) + unit, LU_data[..., :number, :].triu()
    return torch.return_types.lu_unpack((P, L, U))


def _lu_solve(LU, pivots, B, *, left=True, adjoint=False, out=None):
    """torch.linalg.lu_solve: X with A X = B, or X A = B, or those of the transpose."""
    if not left:
        return _lu_solve(LU, pivots, B.mT, adjoint=not adjoint).mT
    P = _permutation(_order(pivots, LU.shape[-1]), torch.float64)
    by_L, by_U = inverse_of_triangle(LU, upper=False, unit=True), inverse_of_triangle(LU, upper=True)
    solution = P @ (by_L.mT @ (by_U.mT @ B.double())) if adjoint else by_U @ (by_L @ (P.mT @ B.double()))
    return solution.to(B.dtype)


def _old_lu_solve(input, LU_data, LU_pivots, *, out=None):
    return _lu_solve(LU_data, LU_pivots, input)


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


REWRITES = only_exporting(
    {
        torch.linalg.lu: _lu,
        torch.linalg.lu_factor: _lu_factor,
        torch.linalg.lu_factor_ex: _lu_factor_ex,
        torch.linalg.lu_solve: _lu_solve,
        **dict.fromkeys([torch.lu, torch.Tensor.lu], _old_lu),
        torch.lu_unpack: _lu_unpack,
        **dict.fromkeys([torch.lu_solve, torch.Tensor.lu_solve], _old_lu_solve),
        **dict.fromkeys([torch.linalg.det, torch.det, torch.Tensor.det], _det),
        **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet], _slogdet),
        **dict.fromkeys([torch.logdet, torch.Tensor.logdet], _logdet),
    }
)
