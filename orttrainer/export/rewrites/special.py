"""The logarithm of the gamma function with its derivative, and the inverse of the error function, which ONNX has not.

The first two by Stirling's series at 8 and above, which leaves out less than 1e-11; smaller arguments are moved there by
gamma(x + 1) = x gamma(x), and negative ones are reflected. In float64, for the terms cancel.
"""

from __future__ import annotations

import math

import torch

from orttrainer.export.stop_gradient import stopped

__all__ = ["REWRITES"]

_SHIFT = 8
_LGAMMA_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760)


def _lgamma(input):
    """log |gamma(x)|; infinite at 0, -1, -2, ..."""
    x, mirrored, z, small, w = _shifted(input)
    value = (w - 0.5) * w.log() - w + 0.5 * math.log(2 * math.pi) + _series(_LGAMMA_SERIES, w) / w
    product = torch.ones_like(z)
    for step in range(_SHIFT):
        product = product * torch.where(small, z + step, 1.0)
    value = value - product.log()
    reflected = math.log(math.pi) - _angle(x, mirrored).sin().abs().log() - value
    return torch.where(mirrored, reflected, value).to(input.dtype)


def _digamma(input):
    """The derivative of lgamma; -inf at 0, NaN at -1, -2, ..."""
    x, mirrored, z, small, w = _shifted(input)
    value = w.log() - 0.5 / w - _series(_DIGAMMA_SERIES, w) / (w * w)
    for step in range(_SHIFT):
        value = value - torch.where(small, 1.0 / torch.where(small, z + step, 1.0), 0.0)
    angle = _angle(x, mirrored)
    value = value - torch.where(mirrored, math.pi * angle.cos() / angle.sin(), 0.0)
    value = torch.where((x < 0) & (x == x.floor()), math.nan, value)
    return torch.where(x == 0, -math.inf, value).to(input.dtype)


def _shifted(input):
    """x; whether it is reflected; z, which is x or 1 - x; whether z is small; w >= 8, which is z or z + 8."""
    x = input.double() if input.is_floating_point() else input.float().double()
    mirrored = x < 0.5
    z = torch.where(mirrored, 1.0 - x, x)
    small = z < _SHIFT
    return x, mirrored, z, small, torch.where(small, z + _SHIFT, z)


def _angle(x, mirrored):
    """pi x, from the nearest integer: exporters round pi to float32, which there is felt least."""
    return torch.where(mirrored, x - x.round(), 0.5) * math.pi


def _series(coefficients, w):
    """c0 + c1 / w^2 + c2 / w^4 + ..."""
    square, total = 1.0 / (w * w), 0.0
    for coefficient in reversed(coefficients):
        total = total * square + coefficient
    return total


def _mvlgamma(input, p):
    """log of the multivariate gamma function: a sum of lgamma(x - j / 2)."""
    halves = torch.arange(p, device=input.device, dtype=input.dtype) / 2
    return _lgamma(input.unsqueeze(-1) - halves).sum(-1) + p * (p - 1) / 4 * math.log(math.pi)


# For -log(1 - x^2) below 5, and above: Giles, "Approximating the erfinv function", 2010, for float32.
_ERFINV_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def _erfinv(input):
    """y with erf(y) = x, to a few float32 roundings, and the slope that this has; infinite at -1 and 1."""
    still = stopped(input)
    x = still.double()
    w = -torch.log1p(-(torch.where(x.abs() < 1, x, 0.0) ** 2))
    center, tail = (_polynomial(c, at) for c, at in ((_ERFINV_CENTER, w - 2.5), (_ERFINV_TAIL, w.sqrt() - 3)))
    y = torch.where(w < 5, center, tail) * x
    slope = (math.sqrt(math.pi) / 2 * (y * y).exp()).to(input.dtype)
    y = torch.where(x.abs() < 1, y, torch.where(x.abs() == 1, x * math.inf, math.nan))
    return y.to(input.dtype) + (input - still) * slope


def _polynomial(coefficients, x):
    total = torch.zeros_like(x)
    for coefficient in coefficients:
        total = total * x + coefficient
    return total


REWRITES = {
    **dict.fromkeys([torch.erfinv, torch.Tensor.erfinv, torch.special.erfinv], _erfinv),
    torch.lgamma: _lgamma,
    torch.Tensor.lgamma: _lgamma,
    torch.special.gammaln: _lgamma,
    torch.digamma: _digamma,
    torch.Tensor.digamma: _digamma,
    torch.special.digamma: _digamma,
    torch.special.psi: _digamma,
    torch.mvlgamma: _mvlgamma,
    torch.Tensor.mvlgamma: _mvlgamma,
    torch.special.multigammaln: _mvlgamma,
}
