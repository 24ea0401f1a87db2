"""Products of rows with one matrix for each group of them: the experts of a mixture, which ONNX has no operator for."""

from __future__ import annotations

import torch
from torch._C._functorch import is_batchedtensor

from orttrainer.errors import UnsupportedModelError
from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["GROUPED_PRODUCTS", "rewrites"]

GROUPED_PRODUCTS = "GroupedProducts"


def rewrites() -> dict:
    """What to call instead of the functions that are there; transformers adds one when it needs it."""
    found = {torch._grouped_mm: _grouped_mm} if hasattr(torch, "_grouped_mm") else {}
    if hasattr(torch.nn.functional, "grouped_mm"):
        found[torch.nn.functional.grouped_mm] = _grouped_mm
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        found[torch.ops.transformers.grouped_mm_fallback] = _grouped_mm
    return found


def _grouped_mm(input, weight, offs=None, bias=None, out_dtype=None):
    """The rows of group e times weight[e]; group e ends before row offs[e], and rows behind the last are zeros."""
    if offs is None or bias is not None or input.dim() != 2 or weight.dim() != 3:
        raise UnsupportedModelError(
            "grouped_mm has an ONNX form only for rows [N, K], weights [groups, K, M] and offs, the ends of the groups, "
            "without a bias. Write it with torch.bmm."
        )
    alone = torch.compiler.is_exporting() and not any(map(is_batchedtensor, (input, weight, offs)))
    product = (_group_by_group if alone else _at_once)(input, weight, offs)
    return product if out_dtype is None else product.to(out_dtype)


def _group_by_group(input, weight, offs):
    """A node that `define_grouped_products` defines: a product for each group, of as many rows as it has in a batch."""
    turned = weight.stride(-1) != 1 and weight.stride(-2) == 1  # read as it lies, as [groups, M, K]
    given = input, weight.transpose(-2, -1) if turned else weight, offs
    form = {"dtype": input.dtype, "shape": (input.shape[0], weight.shape[2]), "version": 1}
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{GROUPED_PRODUCTS}", given, {"turned": int(turned)}, **form)


def _at_once(input, weight, offs):
    """One product: each row is spread over the width of all groups, zeros but for its own, as if every group had every row."""
    rows = torch.arange(input.shape[0], device=input.device).unsqueeze(-1)
    starts = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    own = ((rows >= starts) & (rows < offs)).to(input.dtype)  # [N, groups]
    spread = own.unsqueeze(-1) * input.unsqueeze(1)  # [N, groups, K]
    return spread.flatten(1) @ weight.flatten(0, 1)
