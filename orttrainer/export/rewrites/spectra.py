"""Eigenvalues of symmetric matrices and singular values, by Jacobi's rotations, and what follows from them.

In float64. The gradients are not those of the rotations, but PyTorch's closed forms in what they give (Townsend,
"Differentiating the singular value decomposition", 2016).
"""

from __future__ import annotations

import torch
from torch._higher_order_ops.scan import scan
from torch.autograd import Function

from orttrainer.export.rewrites.factorizations import complete_basis, orthonormal, symmetric
from orttrainer.export.rewrites.linear_algebra import applied, inverse, is_vector, only_exporting
from orttrainer.export.rewrites.triangles import eye

__all__ = ["REWRITES", "spectral_norm"]

_SWEEPS = 16  # of rotations: 6 to 10 do for up to some hundred columns, but where values lie close together


def _jacobi(A):
    """A V with orthogonal columns, and the orthogonal V (Hestenes' one-sided rotations; Golub and Van Loan, 8.6.3).

    The columns of the two halves are rotated in pairs, then all but the first move on by one place, in a ring, so that
    each meets each in a sweep (Brent and Luk, 1985).
    """
    size = A.shape[-1]
    half = (size + 1) // 2
    if size == 1:
        return A, torch.ones_like(A[..., :1, :])
    ring = [0, half, *range(1, half - 1), *range(half + 1, 2 * half), half - 1] if half > 1 else [0, 1]
    moves = torch.tensor(ring, device=A.device)
    odd = torch.zeros_like(A[..., : 2 * half - size])  # a column of zeros for who has no partner
    both = torch.cat([torch.cat([A, odd], -1), _eye_like(A, 2 * half)], -2)

    def rotate(both, _):
        torch._check(both.shape[-1] == 2 * half)  # or what is cut off has a size that nobody knows
        torch._check(both.shape[-2] == A.shape[-2] + 2 * half)
        p, q = both[..., :half], both[..., half:]
        x, y = p[..., : A.shape[-2], :], q[..., : A.shape[-2], :]
        product = (x * y).sum(-2, keepdim=True)
        difference = (y * y).sum(-2, keepdim=True) - (x * x).sum(-2, keepdim=True)
        # tan of the angle: 2 p.q / (d + sign(d) sqrt(d^2 + 4 (p.q)^2)), which needs no division by p.q
        root = (difference * difference + 4 * product * product).sqrt()
        denominator = torch.where(difference < 0, difference - root, difference + root)
        tangent = 2 * product / torch.where(denominator == 0, torch.ones_like(denominator), denominator)
        cosine = (1 + tangent * tangent).rsqrt()
        sine = tangent * cosine
        rotated = torch.cat([cosine * p - sine * q, sine * p + cosine * q], -1)
        return rotated[..., moves].clone(), product.sum()

    steps = torch.zeros(_SWEEPS * (2 * half - 1), dtype=A.dtype, device=A.device)
    both, _ = scan(rotate, both, steps, dim=0)
    both = both[..., :size]  # whole sweeps: each column is at its place again
    return both[..., : A.shape[-2], :], both[..., A.shape[-2] : A.shape[-2] + size, :]


def _eye_like(A, size):
    return torch.eye(size, dtype=A.dtype, device=A.device).expand(*A.shape[:-2], size, size)


def _ordered(values, *vectors, descending):
    """`values` in order, and the columns of `vectors` as they go with them."""
    values, order = torch.sort(values, dim=-1, descending=descending)
    return values, *(x.gather(-1, order.unsqueeze(-2).expand(x.shape)) for x in vectors)


def _eigen(whole):
    shift = whole.abs().sum(-1).amax(-1)[..., None, None]  # where none is negative, rotations find eigenvectors
    _, V = _jacobi(whole + shift * eye(whole))
    return _ordered((V * (whole @ V)).sum(-2), V, descending=False)


class _Eigh(Function):
    """Ascending eigenvalues and the eigenvectors of the symmetric matrix whose one triangle is in A."""

    @staticmethod
    def forward(ctx, A, uplo):
        values, V = (x.to(A.dtype) for x in _eigen(symmetric(A.double(), uplo)))
        ctx.save_for_backward(values, V)
        return values, V

    @staticmethod
    def backward(ctx, dvalues, dV):
        values, V = (x.double() for x in ctx.saved_tensors)
        inner = _divided(V.mT @ dV.double(), values.unsqueeze(-2) - values.unsqueeze(-1))
        return (V @ (inner + torch.diag_embed(dvalues.double())) @ V.mT).to(dV.dtype), None


def _divided(x, differences):
    """x / differences, for equal values too, whose vectors nothing depends on; 0 on the diagonal."""
    return _quotient(x.masked_fill(eye(x) == 1, 0.0), differences)


def _quotient(x, y):
    """x / y, and 0 / 0 = 0."""
    nothing = (x == 0) & (y == 0)
    return torch.where(nothing, torch.zeros_like(x), x / torch.where(nothing, torch.ones_like(y), y))


def _eigh(A, UPLO="L", *, out=None):
    return torch.return_types.linalg_eigh(applied(_Eigh, A, UPLO))


def _eigvalsh(A, UPLO="L", *, out=None):
    return applied(_Eigh, A, UPLO)[0]


def _singular(A):
    """U, S in descending order and V of the reduced decomposition: of A = Q R by rotations of R's rows.

    These end sooner than those of A's columns (Drmac and Veselic, "New fast and accurate Jacobi SVD algorithm", 2008).
    Rotations are of so many columns as are known: an axis that varies, and is the shorter one, gets as many zeros as it lacks.
    """
    rows, columns = A.shape[-2:]
    if isinstance(columns, torch.SymInt) and columns < rows:
        V, S, U = _singular(A.mT)
        return U, S, V
    if isinstance(rows, torch.SymInt) and rows < columns:
        U, S, V = _singular(torch.nn.functional.pad(A, (0, 0, 0, columns - rows)))
        return U[..., :rows, :rows], S[..., :rows], V[..., :rows]
    turned = A.shape[-2] < A.shape[-1]
    Q, R = orthonormal(A.mT if turned else A)
    scaled, J = _jacobi(R.mT)
    S, scaled, J = _ordered(scaled.square().sum(-2).sqrt(), scaled, J, descending=True)
    V, lengths = orthonormal(scaled)  # of columns of length 0, too
    V = torch.where(lengths.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) < 0, -V, V)
    return (V, S, Q @ J) if turned else (Q @ J, S, V)


class _SVD(Function):
    """U, S in descending order and V of the reduced decomposition."""

    @staticmethod
    def forward(ctx, A):
        results = tuple(x.to(A.dtype) for x in _singular(A.double()))
        ctx.save_for_backward(*results)
        return results

    @staticmethod
    def backward(ctx, dU, dS, dV):
        U, S, V = (x.double() for x in ctx.saved_tensors)
        dtype, dU, dV, row, column = dU.dtype, dU.double(), dV.double(), S.unsqueeze(-2), S.unsqueeze(-1)
        squares = (row - column) * (row + column)
        of_U, of_V = (_divided(x - x.mT, squares) for x in (U.mT @ dU, V.mT @ dV))
        dA = U @ (of_U * row + column * of_V + torch.diag_embed(dS.double())) @ V.mT
        if U.shape[-2] > U.shape[-1]:
            scaled = _quotient(dU, row)
            dA = dA + (scaled - U @ (U.mT @ scaled)) @ V.mT
        if V.shape[-2] > V.shape[-1]:
            scaled = _quotient(dV, row)
            dA = dA + U @ (scaled - V @ (V.mT @ scaled)).mT
        return dA.to(dtype)


def _svd(A, full_matrices=True, *, driver=None, out=None):
    U, S, V = applied(_SVD, A)
    if full_matrices:
        U, V = complete_basis(U), complete_basis(V)
    return torch.return_types.linalg_svd((U, S, V.mT))


def _old_svd(input, some=True, compute_uv=True, *, out=None):
    """torch.svd, which gives V, not its transpose."""
    if compute_uv:
        U, S, Vh = _svd(input, full_matrices=not some)
        return torch.return_types.svd((U, S, Vh.mT))
    rows, columns = input.shape[-2:]
    U, V = (input.new_zeros((*input.shape[:-2], size, size)) for size in (rows, columns))
    return torch.return_types.svd((U, _svdvals(input), V))


def _svdvals(A, *, driver=None, out=None):
    return applied(_SVD, A)[1]


# ---------------------------------------------------------------- what follows from these


class _Pinv(Function):
    """The pseudoinverse; its gradient (Golub and Pereyra, 1973) is that among matrices of the same rank."""

    @staticmethod
    def forward(ctx, A, atol, rtol, hermitian):
        U, S, V = _singular(symmetric(A.double(), "L") if hermitian else A.double())
        kept = torch.maximum(S[..., :1] * rtol, torch.zeros_like(S[..., :1]) + atol) < S
        inverted = _quotient(kept.to(S.dtype), torch.where(kept, S, torch.zeros_like(S)))
        result = ((V * inverted.unsqueeze(-2)) @ U.mT).to(A.dtype)
        ctx.save_for_backward(A, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        A, P = (x.double() for x in ctx.saved_tensors)
        g = grad.double().mT
        gP, Pg = g @ P, P @ g
        dA = (gP - A @ (P @ gP)) @ P.mT + P.mT @ (Pg - (Pg @ P) @ A) - (P @ gP).mT
        return dA.to(grad.dtype), None, None, None


def _pinv(A, rcond=None, hermitian=False, *, atol=None, rtol=None, out=None):
    """torch.linalg.pinv."""
    return applied(_Pinv, A, *_tolerances(A, atol, rcond if rtol is None else rtol), hermitian)


def _tolerances(A, atol, rtol):
    """What a singular value has to be larger than, and which part of the largest one."""
    if rtol is None:
        rtol = max(A.shape[-2:]) * torch.finfo(A.dtype).eps if atol is None else 0.0
    return (x.unsqueeze(-1) if isinstance(x, torch.Tensor) else x for x in (0.0 if atol is None else atol, rtol))


def _matrix_rank(A, tol=None, hermitian=False, *, atol=None, rtol=None, out=None):
    """torch.linalg.matrix_rank."""
    atol, rtol = _tolerances(A, *((atol, rtol) if tol is None else (tol, 0.0)))
    S = _singular(symmetric(A.double(), "L") if hermitian else A.double())[1]
    return (torch.maximum(S[..., :1] * rtol, torch.zeros_like(S[..., :1]) + atol) < S).sum(-1)


def _pinverse(input, rcond=1e-15):
    return _pinv(input, rcond)


def _lstsq(A, B, rcond=None, *, driver=None, out=None):
    """torch.linalg.lstsq, of matrices of full rank."""
    vector = is_vector(A, B)
    right = B.unsqueeze(-1) if vector else B
    solution = _pinv(A, rcond) @ right
    more_rows = A.shape[-2] > A.shape[-1]
    residuals = (A @ solution - right).square().sum(-2) if more_rows else A.new_zeros(0)
    rank = torch.full(A.shape[:-2], min(A.shape[-2:]), dtype=torch.int64, device=A.device)
    solution = solution.squeeze(-1) if vector else solution
    return torch.return_types.linalg_lstsq((solution, residuals, rank, A.new_zeros(0)))


def _cond(A, p=None, *, out=None):
    """torch.linalg.cond."""
    if p in (None, 2, -2):
        S = _svdvals(A)
        return S[..., -1] / S[..., 0] if p == -2 else S[..., 0] / S[..., -1]
    norm = spectral_norm if p == "nuc" else torch.linalg.matrix_norm
    return norm(A, p) * norm(inverse(A), p)


def spectral_norm(A, ord, dim=None, keepdim=False):
    """torch.linalg.matrix_norm of the orders 2, -2 and "nuc", which the singular values have."""
    if not torch.compiler.is_exporting():
        return torch.linalg.matrix_norm(A, ord, dim or (-2, -1), keepdim)
    axes = [axis % A.dim() for axis in (dim or (-2, -1))]
    values = _svdvals(A.movedim(axes, (-2, -1)))
    norm = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord == 2 else values.amin(-1)
    for axis in sorted(axes) if keepdim else ():
        norm = norm.unsqueeze(axis)
    return norm


class _Sqrth(Function):
    """The root X of a symmetric matrix, beside its eigenvalues and eigenvectors.

    X dA' + dA' X = dX, unlike the gradients of these, has a solution where eigenvalues are equal.
    """

    @staticmethod
    def forward(ctx, A):
        values, V = _eigen(symmetric(A.double(), "L"))
        X = (V * values.clamp(min=0).sqrt().unsqueeze(-2)) @ V.mT
        X, values, V = (x.to(A.dtype) for x in (X, values, V))
        ctx.save_for_backward(values, V)
        return X, values, V

    @staticmethod
    def backward(ctx, dX, dvalues, dV):
        values, V = (x.double() for x in ctx.saved_tensors)
        roots, dX = values.clamp(min=0).sqrt(), dX.double()
        inner = V.mT @ ((dX + dX.mT) / 2) @ V / (roots.unsqueeze(-2) + roots.unsqueeze(-1))
        return (V @ inner @ V.mT).to(dV.dtype) + _Eigh.backward(ctx, dvalues, dV)[0]


def _sqrth(A, *, out=None):
    """torch.linalg.matrix_sqrth."""
    return applied(_Sqrth, A)[0]


class _Polar(Function):
    """A = U H with orthonormal columns of U and a symmetric H, beside the singular value decomposition of A.

    The gradients need no differences of singular values, which may be equal (Kenney and Laub, "Polar decomposition and
    matrix sign function condition estimates", 1991).
    """

    @staticmethod
    def forward(ctx, A):
        W, S, V = _singular(A.double())
        W, S, V, U, H = (x.to(A.dtype) for x in (W, S, V, W @ V.mT, (V * S.unsqueeze(-2)) @ V.mT))
        ctx.save_for_backward(W, S, V)
        return U, H, W, S, V

    @staticmethod
    def backward(ctx, dU, dH, dW, dS, dV):
        W, S, V = (x.double() for x in ctx.saved_tensors)
        dtype, dU, dH, row = dU.dtype, dU.double(), dH.double(), S.unsqueeze(-2)
        inner = (W.mT @ dU @ V - V.mT @ dH @ V * row) / (row + S.unsqueeze(-1))
        dA = W @ ((inner - inner.mT) @ V.mT + V.mT @ dH)
        if W.shape[-2] > W.shape[-1]:
            dA = dA + (dU - W @ (W.mT @ dU)) @ (V / row) @ V.mT
        return dA.to(dtype) + _SVD.backward(ctx, dW, dS, dV)


def _polar(A, *, out=None):
    """torch.linalg.polar."""
    return torch.return_types.linalg_polar(applied(_Polar, A)[:2])


_NEWER = {"matrix_sqrth": _sqrth, "polar": _polar}  # since torch 2.15

REWRITES = only_exporting(
    {
        torch.linalg.eigh: _eigh,
        torch.linalg.eigvalsh: _eigvalsh,
        torch.linalg.svd: _svd,
        torch.linalg.svdvals: _svdvals,
        **dict.fromkeys([torch.svd, torch.Tensor.svd], _old_svd),
        torch.linalg.pinv: _pinv,
        **dict.fromkeys([torch.pinverse, torch.Tensor.pinverse], _pinverse),
        torch.linalg.matrix_rank: _matrix_rank,
        torch.linalg.lstsq: _lstsq,
        torch.linalg.cond: _cond,
        **{getattr(torch.linalg, name): rewrite for name, rewrite in _NEWER.items() if hasattr(torch.linalg, name)},
    }
)
