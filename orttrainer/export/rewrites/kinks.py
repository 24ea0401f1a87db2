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


def _clamp(input, min=None, max=None, *, out=None):
    """torch.clamp; at a bound that is a tensor the slope is the input's alone, where ONNX's Max and Min share it."""
    if not isinstance(min, torch.Tensor) and not isinstance(max, torch.Tensor):
        return torch.clamp(input, min, max)
    bounded = input if min is None else torch.where(input < min, min, input)
    return bounded if max is None else torch.where(bounded > max, max, bounded)


def _clamp_min(input, min, *, out=None):
    return _clamp(input, min)


def _clamp_max(input, max, *, out=None):
    return _clamp(input, None, max)


def _logit(input, eps=None, *, out=None):
    """torch.logit, whose slope is 0 beyond eps and 1 - eps."""
    p = input if eps is None else torch.clamp(input, eps, 1 - eps)
    return torch.log(p) - torch.log1p(-p)


REWRITES = {
    **dict.fromkeys([torch.logit, torch.Tensor.logit, torch.special.logit], _logit),
    **dict.fromkeys([torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip], _clamp),
    **dict.fromkeys([torch.clamp_min, torch.Tensor.clamp_min], _clamp_min),
    **dict.fromkeys([torch.clamp_max, torch.Tensor.clamp_max], _clamp_max),
    **dict.fromkeys([torch.std, torch.Tensor.std], _std),
    torch.std_mean: _std_mean,
    F.softshrink: _softshrink,
}
