"""Products of rows with one matrix for each group of them: the experts of a mixture, which ONNX has no operator for."""

from __future__ import annotations

import torch

from orttrainer.errors import UnsupportedModelError

__all__ = ["rewrites"]


def rewrites() -> dict:
    """What to call instead of the functions that are there; transformers adds one when it needs it."""
    found = {torch._grouped_mm: _grouped_mm} if hasattr(torch, "_grouped_mm") else {}
    if hasattr(torch.nn.functional, "grouped_mm"):
        found[torch.nn.functional.grouped_mm] = _grouped_mm
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        found[torch.ops.transformers.grouped_mm_fallback] = _grouped_mm
    return found


def _grouped_mm(input, weight, offs=None, bias=None, out_dtype=None):
    """The rows of group e times weight[e]; group e ends before row offs[e], and rows behind the last are zeros.

    One product: each row is spread over the width of all groups, zeros but for its own. It computes as if every expert
    had every row, for in ONNX nothing less is differentiable and of one shape.
    """
    if offs is None or bias is not None or input.dim() != 2 or weight.dim() != 3:
        raise UnsupportedModelError(
            "grouped_mm has an ONNX form only for rows [N, K], weights [groups, K, M] and offs, the ends of the groups, "
            "without a bias. Write it with torch.bmm."
        )
    rows = torch.arange(input.shape[0], device=input.device).unsqueeze(-1)
    starts = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    own = ((rows >= starts) & (rows < offs)).to(input.dtype)  # [N, groups]
    spread = own.unsqueeze(-1) * input.unsqueeze(1)  # [N, groups, K]
    product = spread.flatten(1) @ weight.flatten(0, 1)
    return product if out_dtype is None else product.to(out_dtype)
