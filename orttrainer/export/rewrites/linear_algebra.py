"""Inverses and what follows from them, by ONNX Runtime's own Inverse; ONNX itself has the determinant only."""

from __future__ import annotations

import torch

__all__ = ["REWRITES"]


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


REWRITES = {
    **dict.fromkeys([torch.linalg.inv, torch.inverse, torch.Tensor.inverse], _inverse),
    torch.linalg.solve: _solve,
    **dict.fromkeys([torch.linalg.slogdet, torch.slogdet, torch.Tensor.slogdet], _slogdet),
}
