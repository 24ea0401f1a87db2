"""Bessel functions of the first kind, modified and not, of order 0 and 1, which ONNX has not.

Up to 15 by their power series; beyond by Hankel's asymptotic one. In float64, as they stand: so their derivatives are those
of the series. The terms of the modified ones are all positive; of the others, whose signs alternate, they leave 1e-11.
"""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites.series import float_of, in_float64, polynomial

__all__ = ["REWRITES"]

_FAR = 15.0


def _near_series(order, terms):
    """Of (x / 15)^2: ONNX Runtime takes x + c for x where float32 has no such small c."""
    factorials = [math.factorial(k) * math.factorial(k + order) for k in range(terms)]
    return [(_FAR / 2) ** (2 * k) / factorials[k] for k in reversed(range(terms))]


# I(x) = (x/2)^order sum_k (x^2/4)^k / (k! (k + order)!), of which 26 terms leave out less than 1e-12 up to 15.
_NEAR_SERIES = [_near_series(order, 26) for order in (0, 1)]
# J(x) is the same with -x^2/4 for x^2/4, and smaller: 36 terms leave out less than 1e-15.
_NEAR_ALTERNATING = [_near_series(order, 36) for order in (0, 1)]


def _far_series(order, terms):
    return [math.prod(((2 * j - 1) ** 2 - 4 * order**2) / (8 * j) for j in range(1, k + 1)) for k in range(terms)]


# I(x) = e^x / sqrt(2 pi x) sum_k c_k / x^k, c_k = c_{k-1} ((2k - 1)^2 - 4 order^2) / 8k: 12 terms leave out less than 1e-10.
_FAR_SERIES = [_far_series(order, 12)[::-1] for order in (0, 1)]
# J(x) = sqrt(2 / pi x) (P cos a + Q sin a), a = x - (2 order + 1) pi/4; P has the even powers, Q the odd ones, with alternating
# signs: 24 terms leave out less than 1e-11.
_FAR_EVEN, _FAR_ODD = (
    [[(-1) ** k * c for k, c in enumerate(_far_series(order, 24)[start::2])][::-1] for order in (0, 1)]
    for start in (0, 1)
)


def _modified_bessel(order, scaled):
    """torch.special.i0 and i1; with `scaled` times e^-|x|, as i0e and i1e."""

    def call(input, *, out=None):
        x = in_float64(input)
        magnitude = x.abs()
        far = magnitude > _FAR
        small, large = torch.where(far, 0.0, x), torch.where(far, magnitude, _FAR)
        near = polynomial(_NEAR_SERIES[order], (small / _FAR).square()) * (small / 2 if order else 1.0)
        near = near * torch.exp(-small.abs()) if scaled else near
        beyond = polynomial(_FAR_SERIES[order], 1 / large) / torch.sqrt(2 * math.pi * large)
        beyond = beyond if scaled else beyond * torch.exp(large)
        beyond = beyond * torch.where(x < 0, -1.0, 1.0) if order else beyond
        return torch.where(far, beyond, near).to(float_of(input))

    return call


def _bessel(order):
    """torch.special.bessel_j0 and bessel_j1."""

    def call(input, *, out=None):
        x = in_float64(input)
        magnitude = x.abs()
        far = magnitude > _FAR
        small, large = torch.where(far, 0.0, x), torch.where(far, magnitude, _FAR)
        near = polynomial(_NEAR_ALTERNATING[order], -(small / _FAR).square()) * (small / 2 if order else 1.0)
        angle, squares = large - (2 * order + 1) * math.pi / 4, 1 / (large * large)
        even, odd = polynomial(_FAR_EVEN[order], squares), polynomial(_FAR_ODD[order], squares) / large
        beyond = torch.sqrt(2 / (math.pi * large)) * (even * torch.cos(angle) + odd * torch.sin(angle))
        beyond = beyond * torch.where(x < 0, -1.0, 1.0) if order else beyond
        return torch.where(far, beyond, near).to(float_of(input))

    return call


def _as_differentiable(original, rewritten):
    """`rewritten`, with a gradient if `original` has one, as these have since torch 2.15."""
    with torch.inference_mode(False), torch.enable_grad():
        if original(torch.ones((), requires_grad=True, device="cpu")).requires_grad:
            return rewritten
    return lambda input, *, out=None: rewritten(stop_gradient(input))


_I0, _I1 = (_modified_bessel(order, scaled=False) for order in (0, 1))
_LATER_DIFFERENTIABLE = {
    torch.special.bessel_j0: _bessel(0),
    torch.special.bessel_j1: _bessel(1),
    torch.special.modified_bessel_i0: _I0,
    torch.special.modified_bessel_i1: _I1,
}

REWRITES = {
    **dict.fromkeys([torch.i0, torch.Tensor.i0, torch.special.i0], _I0),
    torch.special.i0e: _modified_bessel(0, scaled=True),
    torch.special.i1: _I1,
    torch.special.i1e: _modified_bessel(1, scaled=True),
    **{original: _as_differentiable(original, rewritten) for original, rewritten in _LATER_DIFFERENTIABLE.items()},
}
