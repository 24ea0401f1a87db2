"""Inverses and what follows from them, by ONNX Runtime's own Inverse; ONNX itself has the determinant only. Exponentials."""

from __future__ import annotations

import math

import torch

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.rewrites.argument_names import by_torchs_names

__all__ = ["OF_A_MATRIX", "REWRITES", "applied", "inverse", "is_vector", "only_exporting"]


def inverse(A, *, out=None):
    """torch.linalg.inv; of a singular matrix ONNX Runtime's has infinite elements where torch raises an error."""
    if not torch.compiler.is_exporting():
        return torch.linalg.inv(A)
    return torch.onnx.ops.symbolic("com.microsoft::Inverse", (A,), dtype=A.dtype, shape=A.shape, version=1)


def _solve(A, B, *, left=True, out=None):
    """torch.linalg.solve: X with A X = B, or X A = B."""
    inverted = inverse(A)
    if left and is_vector(A, B):
        return (inverted @ B.unsqueeze(-1)).squeeze(-1)
    return inverted @ B if left else B @ inverted


def is_vector(A, B):
    """Whether torch takes B for one right-hand side of each system of A."""
    return B.dim() == 1 or (A.dim() == B.dim() + 1 and A.shape[:-1] == B.shape)


def _inverse_ex(A, *, check_errors=False, out=None):
    return torch.return_types.linalg_inv_ex((inverted := inverse(A), _is_singular(inverted)))


def _solve_ex(A, B, *, left=True, check_errors=False, out=None):
    return torch.return_types.linalg_solve_ex((_solve(A, B, left=left), _is_singular(inverse(A))))


def _is_singular(inverted):
    """What LAPACK reports of each matrix: 0, or the number of a pivot that is 0, which is taken to be the last."""
    return (~inverted.isfinite()).to(torch.int32).amax((-2, -1)) * inverted.shape[-1]


def applied(function: type[torch.autograd.Function], *args):
    """What it makes of a matrix, or of a batch of matrices.

    Raises:
        UnsupportedModelError: within `torch.vmap`.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedModelError(
            f"forward calls torch.vmap on a function of a matrix that takes its factors ({function.__name__.strip('_')}), which has "
            "no form there. Call it with all samples at once: it takes batches of matrices."
        )
    return function.apply(*args)


def only_exporting(rewrites):
    """The functions, each as itself where torch's older exporter makes the graph, or of empty matrices."""

    def chosen(function, rewritten):
        def call(*args, **kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            empty = any(type(size) is int and size == 0 for x in tensors for size in x.shape)
            if not torch.compiler.is_exporting() or empty:
                return function(*args, **kwargs)
            args, kwargs = by_torchs_names(rewritten, args, kwargs)
            return rewritten(*args, **kwargs)

        return call

    return {function: chosen(function, rewritten) for function, rewritten in rewrites.items()}


def _tensorinv(A, ind=2, *, out=None):
    """torch.linalg.tensorinv: the inverse of the matrix whose rows are the first `ind` axes."""
    size = math.prod(A.shape[ind:])
    return inverse(A.reshape(-1, size)).reshape(A.shape[ind:] + A.shape[:ind])


def _tensorsolve(A, B, dims=None, *, out=None):
    """torch.linalg.tensorsolve: X with tensordot(A, X) = B."""
    if dims is not None:
        moved = sorted(axis % A.dim() for axis in dims)
        A = A.permute([axis for axis in range(A.dim()) if axis not in moved] + moved)
    shape = A.shape[B.dim() :]
    return _solve(A.reshape(B.numel(), -1), B.reshape(-1)).reshape(shape)


def _matrix_power(A, n, *, out=None):
    """torch.linalg.matrix_power, by squaring."""
    if n < 0:
        return _matrix_power(inverse(A), -n)
    if n == 0:
        return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape).clone()
    half = _matrix_power(A, n // 2) if n > 1 else None
    square = A if half is None else half @ half
    return square @ A if half is not None and n % 2 else square


_TERMS, _SQUARINGS = 12, 12


def _matrix_exp(A):
    """torch.linalg.matrix_exp: a Taylor polynomial of A / 2^s, squared s times (Higham 2008, section 10.3).

    s is such that the norm of what goes into the polynomial is at most 1/2, up to norms of 2048; its rest is below 1e-13.
    """
    norm = A.detach().abs().sum(-1).amax(-1)[..., None, None]
    halvings = torch.clamp(torch.ceil(torch.log2(norm.clamp(min=0.5) * 2)), max=_SQUARINGS)
    scaled, unit = A * 0.5**halvings, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    result = unit + scaled / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        result = unit + scaled @ result / term
    for step in range(_SQUARINGS):
        result = torch.where(halvings > step, result @ result, result)
    return result


OF_A_MATRIX = {
    **dict.fromkeys([torch.linalg.matrix_exp, torch.matrix_exp, torch.Tensor.matrix_exp], _matrix_exp),
    **dict.fromkeys([torch.linalg.inv, torch.inverse, torch.Tensor.inverse], inverse),
}
REWRITES = {
    **OF_A_MATRIX,
    torch.linalg.solve: _solve,
    torch.linalg.inv_ex: _inverse_ex,
    torch.linalg.solve_ex: _solve_ex,
    torch.linalg.tensorinv: _tensorinv,
    torch.linalg.tensorsolve: _tensorsolve,
    **dict.fromkeys([torch.linalg.matrix_power, torch.matrix_power, torch.Tensor.matrix_power], _matrix_power),
}
