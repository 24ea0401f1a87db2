"""Weights and inputs that are the same but for rounding, to see what that alone changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

__all__ = ["ROUNDING", "moved"]

ROUNDING = 2.0**-20  # what float32 sums of some depth are off by: a few units in the last place


@contextlib.contextmanager
def moved(
    module: torch.nn.Module, batch: Sequence[torch.Tensor], generator: torch.Generator
) -> Iterator[list[torch.Tensor]]:
    """Within the block each weight differs by `ROUNDING` of itself, at most; gives inputs that do, nearer to 0: a probability stays one."""
    factors = [1 + ROUNDING * (2 * _drawn_for(p, generator) - 1) for p in module.parameters()]
    with torch.no_grad():
        for parameter, factor in zip(module.parameters(), factors):
            parameter.mul_(factor)
    yield [x * (1 - ROUNDING * _drawn_for(x, generator)) if x.is_floating_point() else x for x in batch]
    with torch.no_grad():
        for parameter, factor in zip(module.parameters(), factors):
            parameter.div_(factor)


def _drawn_for(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(x.shape, generator=generator, device="cpu").to(x)
