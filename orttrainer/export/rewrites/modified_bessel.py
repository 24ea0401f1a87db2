"""Functions that ONNX has not, and of which torch has no derivative: modified Bessel functions of the second kind, order 0 and 1.

Up to 1 by their power series; beyond as the integral of e^(-x (cosh t - 1)) cosh(order t), which is e^x times them, by a sum of
equal steps: so smooth an integrand leaves 1e-15. In float64. With them the spherical Bessel function of order 0.
"""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.series import expm1, float_of, in_float64, polynomial

__all__ = ["REWRITES"]

_STEPS, _TERMS, _DROP = 32, 12, 38.0
_HARMONIC = [sum(1 / j for j in range(1, k + 1)) for k in range(_TERMS + 1)]
# I(x) = (x/2)^order sum_k (x^2/4)^k / (k! (k + order)!), and K(x) has -log(x/2) times it, but for the sign where the order is 1, and
# the same sum with the mean of two harmonic numbers beside each term, less Euler's constant.
_NEAR = [[1 / (math.factorial(k) * math.factorial(k + order)) for k in range(_TERMS)] for order in (0, 1)]
_NEAR_HARMONIC = [
    [c * ((_HARMONIC[k] + _HARMONIC[k + order]) / 2 - 0.5772156649015329) for k, c in enumerate(_NEAR[order])]
    for order in (0, 1)
]


def _second_kind(order, scaled):
    """torch.special.modified_bessel_k0 and k1; with `scaled` times e^x."""

    def call(input, *, out=None):
        x = stopped(in_float64(input))
        near = x <= 1
        small, large = torch.where(near & (x > 0), x, 1.0), torch.where(near, 1.0, x)
        square = small * small / 4
        series = polynomial(_NEAR_HARMONIC[order][::-1], square) - (small / 2).log() * polynomial(
            _NEAR[order][::-1], square
        )
        series = 1 / small - small / 2 * series if order else series
        beyond = _integral(order, large)
        value = torch.where(
            near, series * small.exp() if scaled else series, beyond if scaled else beyond * (-large).exp()
        )
        value = torch.where(x == 0, math.inf, torch.where(x == math.inf, 0.0, value))
        return torch.where((x < 0) | x.isnan(), math.nan, value).to(float_of(input))

    return call


def _integral(order, x):
    """Over t from 0 to where nothing counts any more."""
    most = _DROP / x
    step = torch.log(1 + most + torch.sqrt(most * (most + 2))) / _STEPS
    total = 0.5 * torch.ones_like(x)
    for k in range(1, _STEPS + 1):
        half = k * step / 2
        above = (expm1(half) * (1 + torch.exp(-half))).square() / 2  # cosh(t) - 1 = 2 sinh(t / 2)^2
        total = total + torch.exp(-x * above) * (1 + above if order else 1.0)
    return step * total


def _spherical_bessel_j0(input, *, out=None):
    """sin(x) / x."""
    x = stopped(in_float64(input))
    usual = (x != 0) & (x.abs() < math.inf)
    known = torch.where(usual, x, 1.0)
    value = torch.where(usual, known.sin() / known, torch.where(x == 0, 1.0, 0.0))
    return torch.where(x.isnan(), math.nan, value).to(float_of(input))


REWRITES = {
    torch.special.modified_bessel_k0: _second_kind(0, scaled=False),
    torch.special.modified_bessel_k1: _second_kind(1, scaled=False),
    torch.special.scaled_modified_bessel_k0: _second_kind(0, scaled=True),
    torch.special.scaled_modified_bessel_k1: _second_kind(1, scaled=True),
    torch.special.spherical_bessel_j0: _spherical_bessel_j0,
}
