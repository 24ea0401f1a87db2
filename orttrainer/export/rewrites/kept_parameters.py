"""What forward says to its parameters that leaves them what they are: other data, another device, whether they train."""

from __future__ import annotations

import torch

from orttrainer.export.forms import unseen
from orttrainer.export.untouched import SET_DATA, memory_of

__all__ = ["REWRITES", "apply"]

_apply_to_all = torch.nn.Module._apply


def apply(self, fn, recurse=True):
    """`module.to(device)`, `.float()` and the like in forward, where all is there already: torch would swap parameters."""
    tensors = [*self.parameters(recurse), *self.buffers(recurse)]
    kinds = {(x.dtype, x.device) for x in tensors}
    found = {(dtype, device): fn(torch.empty(0, dtype=dtype, device=device)) for dtype, device in kinds}
    changed = any((x.dtype, x.device) != kind for kind, x in found.items())
    return _apply_to_all(self, fn, recurse) if changed else self


def _set_data(self, value):
    """x.data = y in the memory that x has: an exporter sees who writes there."""
    if value.shape != self.shape or value.dtype != self.dtype:
        SET_DATA(self, value)
    elif memory_of(value) != memory_of(self) and getattr(value, "data_of", None) is not self:
        unseen.write(self, value)


def _requires_grad_(self, requires_grad=True):
    """x.requires_grad_(): what stands for `x.detach()` is no leaf, and has no gradient."""
    return self if not requires_grad and not self.is_leaf else self.requires_grad_(requires_grad)


REWRITES = {
    SET_DATA: _set_data,
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.requires_grad.__set__: _requires_grad_,
}
