"""Inverses and what follows from them, by ONNX Runtime's own Inverse; ONNX itself has the determinant only. Exponentials."""

from __future__ import annotations

import torch

__all__ = ["OF_A_MATRIX", "REWRITES"]


def _inverse(A, *, out=None):
    """torch.linalg.inv; of a singular matrix ONNX Runtime's has infinite elements where torch raises an error."""
    if not torch.compiler.is_exporting():
        return torch.linalg.inv(A)
    return torch.onnx.ops.symbolic("com.microsoft::Inverse", (A,), dtype=A.dtype, shape=A.shape, version=1)


def _solve(A, B, *, left=True, out=None):
    """torch.linalg.solve: X with A X = B, or X A = B."""
    inverse = _inverse(A)
    if left and (B.dim() == 1 or (A.dim() == B.dim() + 1 and A.shape[:-1] == B.shape)):  # vectors
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


def _slogdet(A, *, out=None):
    """torch.linalg.slogdet, from the determinant itself."""
    determinant = torch.linalg.det(A)
    return torch.return_types.linalg_slogdet((torch.sign(determinant.detach()), torch.log(determinant.abs())))


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
    **dict.fromkeys([torch.linalg.inv, torch.inverse, torch.Tensor.inverse], _inverse),
}
REWRITES = {
    **OF_A_MATRIX,
    torch.linalg.solve: _solve,
    **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet], _slogdet),
}
