"""Functions whose slope at a kink PyTorch writes down as 0, where the operators that they are made of have none."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.precision import rounded_once

__all__ = ["REWRITES", "clamp", "flat_beyond", "larger", "slope_at_zero", "smaller"]


def _of_a_row(function):
    """torch.var or torch.var_mean: of a number as of a row of one, since the exporters ask for the size along its axis."""

    def call(input, *args, **kwargs):
        if input.dim():
            return function(input, *args, **kwargs)
        found = function(input.reshape(1), *args, **kwargs)
        return tuple(part.reshape(()) for part in found) if isinstance(found, tuple) else found.reshape(())

    return call


_var, _var_mean = _of_a_row(torch.var), _of_a_row(torch.var_mean)


def _std(input, *args, **kwargs):
    """torch.std, whose slope is 0 where all elements are equal."""
    return _root(_var(input, *args, **kwargs))


def _std_mean(input, *args, **kwargs):
    variance, mean = _var_mean(input, *args, **kwargs)
    return _root(variance), mean


def _root(variance):
    nothing = variance == 0
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, variance).sqrt())


def _softshrink(input, lambd=0.5):
    """torch.nn.functional.softshrink; exporters multiply by 0 in between, an infinite gradient too."""
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, 0.0))


def clamp(input, min=None, max=None, *, out=None):
    """torch.clamp.

    At a bound that is a number the slope is 1, as ONNX's Clip has it, and since torch 2.14 it is 0; at one that is a tensor
    it is the input's alone, and since then both share it, as ONNX's Max and Min do. The lower of two such bounds has none but
    where it is lower.
    """
    if isinstance(min, torch.Tensor) or isinstance(max, torch.Tensor):
        at_least, at_most = (torch.maximum, torch.minimum) if _FLAT_AT_BOUNDS else (larger, smaller)
        if isinstance(min, torch.Tensor) and isinstance(max, torch.Tensor) and not _FLAT_AT_BOUNDS:
            min = torch.where(min < max, min, stop_gradient(min))
        bounded = input if min is None else at_least(input, min)
        return bounded if max is None else at_most(bounded, max)
    if _FLAT_AT_BOUNDS and input.is_floating_point():
        return flat_beyond(input, min, max)
    if input.is_floating_point():  # of none ONNX takes the largest number, below which infinity is not
        min, max = -math.inf if min is None else min, math.inf if max is None else max
    return torch.clamp(input, min, max)


def larger(x, other):
    """torch.maximum, but that the slope where both are equal is `x`'s alone."""
    return torch.where(x < other, other, x)


def smaller(x, other):
    """torch.minimum, likewise."""
    return torch.where(x > other, other, x)


def flat_beyond(x, low, high):
    """`x` between two numbers, or one and None, with slope 0 at these."""
    if low is not None:
        x = F.relu(x) if low == 0 else torch.where(x <= low, low, x)
    return x if high is None else torch.where(x >= high, high, x)


def slope_at_zero(function) -> float:
    """That of a function of a number, in the torch that is installed."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True, device="cpu")
        (slope,) = torch.autograd.grad(function(x), x)
    return slope.item()


_FLAT_AT_BOUNDS = slope_at_zero(lambda x: x.clamp(min=0.0)) == 0.0


def _clamp_min(input, min, *, out=None):
    return clamp(input, min)


def _clamp_max(input, max, *, out=None):
    return clamp(input, None, max)


def _logit(input, eps=None, *, out=None):
    """torch.logit, whose slope is 0 beyond eps and 1 - eps."""
    return _log_odds(input if eps is None else torch.clamp(input, eps, 1 - eps))


@rounded_once
def _log_odds(p):
    return torch.log(p) - torch.log1p(-p)


REWRITES = {
    **dict.fromkeys([torch.logit, torch.Tensor.logit, torch.special.logit], _logit),
    **dict.fromkeys([torch.clamp, torch.Tensor.clamp, torch.clip, torch.Tensor.clip], clamp),
    **dict.fromkeys([torch.clamp_min, torch.Tensor.clamp_min], _clamp_min),
    **dict.fromkeys([torch.clamp_max, torch.Tensor.clamp_max], _clamp_max),
    **dict.fromkeys([torch.std, torch.Tensor.std], _std),
    torch.std_mean: _std_mean,
    **dict.fromkeys([torch.var, torch.Tensor.var], _var),
    torch.var_mean: _var_mean,
    F.softshrink: _softshrink,
}
