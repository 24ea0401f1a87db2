"""The logarithm of the gamma function with its derivatives, and the zeta function of Hurwitz, which ONNX has not.

By Stirling's series at 8 and above, which leaves out less than 1e-11, or of float64 at 16 and above; smaller arguments are
moved there by gamma(x + 1) = x gamma(x), and negative ones are reflected. In float64, for the terms cancel.
"""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.series import float_of, in_float64, polynomial

__all__ = ["REWRITES", "lgamma"]

_LGAMMA_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_DIGAMMA_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760)


def _shift(input):
    """Where Stirling's series is as exact as the dtype."""
    return 16 if input.dtype == torch.float64 else 8


def lgamma(input):
    """log |gamma(x)|; infinite at 0, -1, -2, ..."""
    x, mirrored, z, small, w = _shifted(input, _shift(input))
    value = (w - 0.5) * w.log() - w + 0.5 * math.log(2 * math.pi) + _series(_LGAMMA_SERIES, w) / w
    product = torch.ones_like(z)
    for step in range(_shift(input)):
        product = product * torch.where(small, z + step, 1.0)
    value = value - product.log()
    reflected = math.log(math.pi) - _angle(x, mirrored).sin().abs().log() - value
    return torch.where(mirrored, reflected, value).to(float_of(input))


def _digamma(input):
    """The derivative of lgamma; -inf at 0, NaN at -1, -2, ..."""
    x, mirrored, z, small, w = _shifted(input, _shift(input))
    value = w.log() - 0.5 / w - _series(_DIGAMMA_SERIES, w) / (w * w)
    for step in range(_shift(input)):
        value = value - torch.where(small, 1.0 / torch.where(small, z + step, 1.0), 0.0)
    angle = _angle(x, mirrored)
    value = value - torch.where(mirrored, math.pi * angle.cos() / angle.sin(), 0.0)
    value = torch.where((x < 0) & (x == x.floor()), math.nan, value)
    return torch.where(x == 0, -math.inf, value).to(float_of(input))


def _shifted(input, shift):
    """x; whether it is reflected; z, which is x or 1 - x; whether z is small; w >= shift, which is z or z + shift."""
    x = in_float64(input)
    mirrored = x < 0.5
    z = torch.where(mirrored, 1.0 - x, x)
    small = z < shift
    return x, mirrored, z, small, torch.where(small, z + shift, z)


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
    return lgamma(input.unsqueeze(-1) - halves).sum(-1) + p * (p - 1) / 4 * math.log(math.pi)


def _polygamma(n, input):
    """The derivative of order n of digamma; infinite at 0, -1, -2, ..."""
    if n == 0:
        return _digamma(input)
    shift = _shift(input) + n
    x, mirrored, z, small, w = _shifted(input, shift)
    series = [coefficient * math.perm(2 * k + n + 1, n) for k, coefficient in enumerate(_DIGAMMA_SERIES)]
    total = w**-n * (math.factorial(n - 1) + math.factorial(n) / 2 / w + _series(series, w) / (w * w))
    for step in range(shift):
        total = total + torch.where(small, math.factorial(n) * torch.where(small, z + step, 1.0) ** -(n + 1), 0.0)
    angle = _angle(x, mirrored)
    reflected = -total - math.pi ** (n + 1) * polynomial(_cotangent(n), angle.cos() / angle.sin())
    return torch.where(mirrored, reflected, total if n % 2 else -total).to(float_of(input))


def _cotangent(n):
    """The derivative of order n of the cotangent c, in powers of c, the highest first: c' = -1 - c^2."""
    powers = [0, 1]
    for _ in range(n):
        slope = [k * coefficient for k, coefficient in enumerate(powers)][1:]
        powers = [-(a + b) for a, b in zip([*slope, 0, 0], [0, 0, *slope])]
    return powers[::-1]


# The numbers of Bernoulli B_2, B_4, ..., of Euler and Maclaurin's sum.
_BERNOULLI = (
    1 / 6,
    -1 / 30,
    1 / 42,
    -1 / 30,
    5 / 66,
    -691 / 2730,
    7 / 6,
    -3617 / 510,
    43867 / 798,
    -174611 / 330,
    854513 / 138,
)


def _zeta(input, other, *, out=None):
    """torch.special.zeta: the sum of (q + k)^-x over k; with a gradient for q alone, as in torch.

    Ten terms, and the others by Euler and Maclaurin's sum. NaN for q below 0, where torch knows it of integers x.
    """
    x, q = (torch.as_tensor(z) for z in (input, other))
    dtype = torch.result_type(x, q)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    x, q = torch.broadcast_tensors(stopped(in_float64(x.to(dtype))), in_float64(q.to(dtype)))
    inside = (x > 1) & (q > 0)
    s, p = torch.where(inside, x, 2.0).clamp(max=1e6), torch.where(inside, q, 1.0)
    value = sum(torch.pow(p + k, -s) for k in range(9))
    w = p + 9
    last, factor, square = torch.pow(w, -s), s, 1 / (w * w)
    value = value + last * (w / (s - 1) + 0.5)
    power = last / w
    for k, bernoulli in enumerate(_BERNOULLI):
        value = value + bernoulli / math.factorial(2 * k + 2) * factor * power
        factor, power = factor * (s + (2 * k + 1)) * (s + (2 * k + 2)), power * square
    pole = (x == 1) | ((x > 1) & (q <= 0) & (q == q.floor()))
    return torch.where(inside, value, torch.where(pole, math.inf, math.nan)).to(dtype)


REWRITES = {
    torch.special.zeta: _zeta,
    torch.lgamma: lgamma,
    torch.Tensor.lgamma: lgamma,
    torch.special.gammaln: lgamma,
    torch.digamma: _digamma,
    torch.Tensor.digamma: _digamma,
    torch.special.digamma: _digamma,
    torch.special.psi: _digamma,
    torch.mvlgamma: _mvlgamma,
    torch.Tensor.mvlgamma: _mvlgamma,
    torch.special.multigammaln: _mvlgamma,
    torch.polygamma: _polygamma,
    torch.special.polygamma: _polygamma,
    torch.Tensor.polygamma: lambda input, n: _polygamma(n, input),
}
