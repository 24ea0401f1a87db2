"""Modified Bessel functions of the first kind, of order 0 and 1, which ONNX has not.

Up to 15 by their power series, whose terms are all positive; beyond by Hankel's asymptotic one. In float64, as they stand:
so their derivatives are those of the series.
"""

from __future__ import annotations

import math

import torch

from orttrainer.export.rewrites.series import float_of, in_float64, polynomial

__all__ = ["REWRITES"]

_FAR = 15.0
# I(x) = (x/2)^order sum_k (x^2/4)^k / (k! (k + order)!), of which 26 terms leave out less than 1e-12 up to 15.
_NEAR_SERIES = [[1 / (math.factorial(k) * math.factorial(k + order)) for k in reversed(range(26))] for order in (0, 1)]
# I(x) = e^x / sqrt(2 pi x) sum_k c_k / x^k, c_k = c_{k-1} ((2k - 1)^2 - 4 order^2) / 8k: 12 terms leave out less than 1e-10.
_FAR_SERIES = [
    [math.prod(((2 * j - 1) ** 2 - 4 * order**2) / (8 * j) for j in range(1, k + 1)) for k in reversed(range(12))]
    for order in (0, 1)
]


def _modified_bessel(order, scaled):
    """torch.special.i0 and i1; with `scaled` times e^-|x|, as i0e and i1e."""

    def call(input, *, out=None):
        x = in_float64(input)
        magnitude = x.abs()
        far = magnitude > _FAR
        small, large = torch.where(far, 0.0, x), torch.where(far, magnitude, _FAR)
        near = polynomial(_NEAR_SERIES[order], small * small / 4) * (small / 2 if order else 1.0)
        near = near * torch.exp(-small.abs()) if scaled else near
        beyond = polynomial(_FAR_SERIES[order], 1 / large) / torch.sqrt(2 * math.pi * large)
        beyond = beyond if scaled else beyond * torch.exp(large)
        beyond = beyond * torch.where(x < 0, -1.0, 1.0) if order else beyond
        return torch.where(far, beyond, near).to(float_of(input))

    return call


_I0 = _modified_bessel(0, scaled=False)

REWRITES = {
    **dict.fromkeys([torch.i0, torch.Tensor.i0, torch.special.i0], _I0),
    torch.special.i0e: _modified_bessel(0, scaled=True),
    torch.special.i1: _modified_bessel(1, scaled=False),
    torch.special.i1e: _modified_bessel(1, scaled=True),
}
