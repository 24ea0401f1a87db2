"""Functions whose result has a size that values give, in forms that the exporters know; and numbers as tensors that are sizes."""

from __future__ import annotations

import torch

__all__ = ["REWRITES"]


def _masked_select(input, mask):
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


def _quotient(input, other, **options):
    """torch.div; of two sizes a size, since what is a tensor in PyTorch is asked for its number, as for another `view`."""
    sizes = all(isinstance(x, (int, torch.SymInt)) for x in (input, other)) and not torch.jit.is_tracing()
    if sizes and isinstance(input, torch.SymInt) and options.get("rounding_mode") is not None:
        return input // other  # neither is negative
    return torch.div(input, other, **options)


REWRITES = {
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.argwhere: torch.nonzero,
    torch.Tensor.argwhere: torch.nonzero,
    torch.div: _quotient,
}
