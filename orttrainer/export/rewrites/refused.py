"""Numbers that PyTorch refuses, as a number of the form that stands for a function: no graph can make it of these."""

from __future__ import annotations

import torch
from torch._C._functorch import is_batchedtensor

from orttrainer.graph.passes.gradient_marks import DOMAIN

__all__ = ["REFUSES", "unless"]

REFUSES = "Refuses"  # attribute "what": what PyTorch refuses


def unless(refused: torch.Tensor, what: str, number: float, dtype: torch.dtype) -> torch.Tensor:
    """`number`, of shape [], by which a graph fails where this is so; what reads it, waits for that.

    Args:
        refused: bool [].
        what: PyTorch refuses, for the error; PyTorch's own is raised where the module raises one on the batch.
    """
    table = torch.full((1,), number, dtype=dtype, device=refused.device)
    if torch.compiler.is_exporting() and not is_batchedtensor(refused):  # a node that `define_refusals` defines
        form = {"dtype": dtype, "shape": (), "version": 1}
        return torch.onnx.ops.symbolic(f"{DOMAIN}::{REFUSES}", (table, refused), {"what": what}, **form)
    return table.index_select(0, refused.long().reshape(1)).reshape(())
