"""How many outputs a module has, which nobody has described."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from orttrainer import signals
from orttrainer.describe import leaves, mapped
from orttrainer.export.call import flat, in_train_mode, is_marked
from orttrainer.export.evaluated import RunningStatistics
from orttrainer.export.memory.outside import noticed
from orttrainer.export.memory.run_code import watched
from orttrainer.export.quiet import unheard
from orttrainer.export.untouched import unchanged
from orttrainer.export.values.told import OF_GRADIENTS, by_torch

__all__ = ["count_outputs"]


@signals.none_lost()  # what it puts back is put back
def count_outputs(module: nn.Module, inputs: Sequence | Mapping) -> int:
    """How many tensors `module` returns as it trains, whatever else it does; it and what it calls are left as they are.

    Args:
        inputs: of a batch that trains or evaluates: a sequence of tensors, or a dict of them by the names that forward has; or of tuples, lists and dicts of them.
    """
    device = next((p.device for p in module.parameters()), None)
    copies = mapped(lambda x: _copied(x).to(device).requires_grad_(is_marked(x)), inputs)

    def call(*watching):
        with (
            unchanged(module, [*leaves(copies)]), in_train_mode(module), noticed(module), RunningStatistics(),
            contextlib.ExitStack() as stack,
        ):  # fmt: skip
            for context in watching:
                stack.enter_context(context)
            return module(**copies) if isinstance(copies, dict) else module(*copies)

    return sum(isinstance(output, torch.Tensor) for output in flat(_returned(call)))


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.is_inference() else x.detach()


def _returned(call):
    """What it returns with gradients; without them, which spares the activations, where it neither asks for them nor needs them."""
    for gradients in (False, True):
        # What it says is heard at its export.
        with contextlib.suppress(Exception), torch.set_grad_enabled(gradients), unheard():
            asks = _AsksForGradients()
            outputs = call(asks, watched({torch.is_grad_enabled: asks.note}))
            if gradients or not asks.asked:
                return outputs
    with torch.enable_grad():
        return call()  # an error of its own is raised again, behind what it prints


class _AsksForGradients(TorchFunctionMode):
    """Whether code that is not torch's asks if there are any."""

    def __init__(self):
        super().__init__()
        self.asked = False

    def note(self) -> None:
        self.asked |= not by_torch()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in OF_GRADIENTS:
            self.note()
        return func(*args, **(kwargs or {}))
