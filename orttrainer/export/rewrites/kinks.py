"""Functions whose slope at a kink PyTorch writes down as 0, where the operators that they are made of have none."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["REWRITES"]


def _std(input, *args, **kwargs):
    """torch.std, whose slope is 0 where all elements are equal."""
    return _root(torch.var(input, *args, **kwargs))


def _std_mean(input, *args, **kwargs):
    variance, mean = torch.var_mean(input, *args, **kwargs)
    return _root(variance), mean


def _root(variance):
    nothing = variance == 0
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, variance).sqrt())


def _softshrink(input, lambd=0.5):
    """torch.nn.functional.softshrink; exporters multiply by 0 in between, an infinite gradient too."""
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, 0.0))


REWRITES = {
    **dict.fromkeys([torch.std, torch.Tensor.std], _std),
    torch.std_mean: _std_mean,
    F.softshrink: _softshrink,
}
