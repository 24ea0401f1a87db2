"""Functions whose result has a size that values give, in forms that the exporters know; and numbers as tensors that are sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["REWRITES", "SEEN"]


def _masked_select(input, mask):
    input, mask = torch.broadcast_tensors(input, mask)
    return input[mask]


def _unbind(input, dim=0):
    """torch.unbind, whose parts the tracer gives another rank where their number is a symbol."""
    size = input.shape[dim]
    return torch.unbind(input, dim) if isinstance(size, int) else tuple(input.select(dim, i) for i in range(size))


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
    torch.unbind: _unbind,
    torch.Tensor.unbind: _unbind,
    torch.div: _quotient,
}


def _one_hot(x, num_classes=-1):
    """`F.one_hot`, which takes the number of classes from the values where it is not given."""
    if num_classes == -1:
        return (x.unsqueeze(-1) == torch.arange(x.max().item() + 1, device=x.device)).long()
    with torch._C.DisableTorchFunction():
        return F.one_hot(x, num_classes)


SEEN = {F.one_hot: _one_hot}  # its calls are to be seen by a mode, in an observed forward, too
