"""The incomplete gamma functions, which ONNX has not: P(a, x), the part of gamma(a) up to x, and Q(a, x), the rest.

Each is x^a e^-x / gamma(a) times an integral over w without a pole, by Gauss and Legendre's rule, whose terms are all positive:
with x e^-w for what is integrated up to x, and with x e^w from there on. In float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.series import expm1, float_of, in_float64
from orttrainer.export.rewrites.special import lgamma

__all__ = ["REWRITES"]

_DROP = 37.0  # beyond e^-37 of the largest nothing counts


def _igamma(input, other, *, out=None):
    """P(a, x); with a gradient for x alone, as in torch."""
    return _with_slope(input, other, 1.0, lambda less, more, below: torch.where(below, less, 1.0 - more))


def _igammac(input, other, *, out=None):
    """Q(a, x) = 1 - P(a, x)."""
    return _with_slope(input, other, -1.0, lambda less, more, below: torch.where(below, 1.0 - less, more))


def _with_slope(input, other, sign, choose):
    """What `choose` makes of P, of Q and of where P is the exact one of the two; its slope has the sign `sign`."""
    dtype = torch.result_type(input, other)
    live = torch.broadcast_tensors(in_float64(input.to(dtype)), in_float64(other.to(dtype)))
    a, x = stopped(live[0]), stopped(live[1])
    inside = (a > 0) & (x > 0) & (a < math.inf) & (x < math.inf)
    b, y = torch.where(inside, a, 1.0), torch.where(inside, x, 1.0)
    below = (y < b + 1) & ((b >= 1) | (y < 0.1))
    value = choose(_up_to(b, torch.where(below, y, 0.05)), _beyond(b, torch.where(below, b + 1, y)), below)
    value = torch.where(inside, value, _at_ends(a, x) if sign > 0 else 1.0 - _at_ends(a, x))
    slope = torch.where(inside, sign * torch.exp((b - 1) * y.log() - y - lgamma(b)), 0.0)
    change = torch.where(inside, live[1] - x, 0.0)  # 0: so derivatives up to the second one are these
    moved = value + slope * change + slope * ((b - 1) / y - 1) / 2 * change.square()
    return moved.to(dtype if dtype.is_floating_point else float_of(input))


def _at_ends(a, x):
    """P where there is no integral."""
    value = torch.where(x == math.inf, 1.0, math.nan)
    value = torch.where(a == math.inf, torch.where(x == math.inf, math.nan, 0.0), value)
    value = torch.where(x == 0, 0.0, value)
    value = torch.where(a == 0, torch.where(x > 0, 1.0, math.nan), value)
    return torch.where((a < 0) | (x < 0), math.nan, value)


def _up_to(a, x):
    """P for x <= a + 1: x^a e^-x / gamma(a + 1) (1 + x times the integral of e^(x (1 - e^-w) - (a + 1) w))."""
    b = a + 1
    end = (_DROP + x) / b
    end = torch.where(x >= 3 * _DROP, torch.minimum(end, torch.sqrt(3 * _DROP / x)), end)
    places, weights = _rule(x)
    w = end.unsqueeze(-1) * places
    terms = torch.exp(x.unsqueeze(-1) * -expm1(-w) - b.unsqueeze(-1) * w) * weights
    return torch.exp(a * x.log() - x - lgamma(b)) * (1 + x * end * terms.sum(-1))


def _beyond(a, x):
    """Q, where a is not much larger than x: x^a e^-x / gamma(a) times the integral of e^(a w - x (e^w - 1))."""
    end = torch.minimum(torch.sqrt(2 * _DROP / x), torch.log1p(2 * _DROP / x) + 1)
    places, weights = _rule(x)
    w = end.unsqueeze(-1) * places
    terms = torch.exp(a.unsqueeze(-1) * w - x.unsqueeze(-1) * expm1(w)) * weights
    return torch.exp(a * x.log() - x - lgamma(a)) * end * terms.sum(-1)


def _rule(x):
    """Places between 0 and 1, and what each counts."""
    places, weights = np.polynomial.legendre.leggauss(64)
    numbers = 0.5 * (places + 1), 0.5 * weights
    return [torch.tensor(values.tolist(), dtype=torch.float64, device=x.device) for values in numbers]


REWRITES = {
    **dict.fromkeys([torch.igamma, torch.Tensor.igamma, torch.special.gammainc], _igamma),
    **dict.fromkeys([torch.igammac, torch.Tensor.igammac, torch.special.gammaincc], _igammac),
}
