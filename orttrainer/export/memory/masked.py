"""Weights that `torch.nn.utils.prune` has masked: attributes, which each forward makes anew of parameters and masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils.prune import BasePruningMethod

__all__ = ["Masked", "masked_in"]


class Masked:
    """Those of some modules. By these the next pruning ranks, so that they are to be of the weights of the moment.

    Args:
        modules: with all of their layers.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]):
        layers = [layer for module in modules for layer in module.modules()]
        self._found = [(layer, hook) for layer in layers for hook in masked_in(layer).values()]

    def make_anew(self) -> None:
        """As forward would, which a step does not run."""
        # Not under `no_grad`: a handler of a signal that raises as that begins would leave it so.
        for layer, hook in self._found:
            setattr(layer, hook._tensor_name, hook.apply_mask(layer).detach())


def masked_in(layer: torch.nn.Module) -> dict[str, BasePruningMethod]:
    """The names of such weights of a layer, and the hooks that mask them."""
    return {
        hook._tensor_name: hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, BasePruningMethod)
    }
