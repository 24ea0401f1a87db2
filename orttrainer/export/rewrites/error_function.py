"""The inverse of the error function and that of the normal distribution; the logarithm of the latter; erfc, with and without its decay."""

from __future__ import annotations

import math

import torch

from orttrainer.export.forms import double_erf
from orttrainer.export.forms.stop_gradient import stopped
from orttrainer.export.rewrites.series import float_of, in_float64, polynomial

__all__ = ["REWRITES"]

# For w = -log(1 - x^2) below 5, and above: Giles, "Approximating the erfinv function", 2010, for float32.
_ERFINV_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
# Above 16, where 1 - x is below float32's rounding of 1 but may be given as such; from values of 60 digits, to 1e-7.
_ERFINV_FAR = (
    1.2648039e-08, -9.23718645e-08, 2.99164038e-07, -1.32571868e-06, 6.02568626e-06, 5.49692244e-06, -0.000512504352,
    1.00859618, 6.8690196,
)  # fmt: skip


def _erfinv(input):
    """y with erf(y) = x, to a few roundings of the dtype; infinite at -1 and 1."""
    still = stopped(in_float64(input))
    inside = still.abs() < 1
    x = torch.where(inside, still, 0.0)
    y = _erfinv_of(x, -torch.log1p(-(x**2)))
    y = _refined(y, x.abs(), 1 - x.abs()) if input.dtype == torch.float64 else y
    moved = _moved(y, math.sqrt(math.pi) / 2 * (y * y).exp(), 2 * y, in_float64(input) - still)
    return _beyond(input, moved, inside, (still + 1) / 2)


def _ndtri(input):
    """y with P(Y < y) = p for a normal Y; -inf at 0, inf at 1."""
    still = stopped(in_float64(input))
    inside = (still > 0) & (still < 1)
    p = torch.where(inside, still, 0.5)
    y = _erfinv_of(2 * p - 1, -torch.log(4 * p * (1 - p)))
    y = _refined(y, (2 * p - 1).abs(), 2 * torch.minimum(p, 1 - p)) if input.dtype == torch.float64 else y
    y = y * math.sqrt(2)
    moved = _moved(y, math.sqrt(2 * math.pi) * (y * y / 2).exp(), y, in_float64(input) - still)
    return _beyond(input, moved, inside, still)


def _erfinv_of(x, w):
    center, tail, far = (
        polynomial(c, at)
        for c, at in ((_ERFINV_CENTER, w - 2.5), (_ERFINV_TAIL, w.sqrt() - 3), (_ERFINV_FAR, w.sqrt() - 7))
    )
    return torch.where(w < 5, center, torch.where(w < 16, tail, far)) * x


def _refined(y, x, rest):
    """y nearer to where erf(|y|) is x, or where x is near 1, erfc(|y|) is 1 - x: by a step of Halley's, of cubic order."""
    z = y.abs()
    off = (
        torch.where(x < 0.5, torch.erf(z) - x, rest - torch.special.erfc(z)) * (math.sqrt(math.pi) / 2) * (z * z).exp()
    )
    return torch.sign(y) * (z - off / (1 + off * z))


def _moved(y, slope, k, change):
    """y, with y' = slope and y'' = k y'^2, `change` farther, which is 0: so derivatives up to the second one are these."""
    step = slope * change
    return y + step + step * step * (k / 2)


def _beyond(input, y, inside, p):
    """y where that is; where p is 0 or 1 it is infinite."""
    end = torch.where(p == 0, -math.inf, torch.where(p == 1, math.inf, math.nan))
    return torch.where(inside, y, end).to(float_of(input))


# log(erfc(z) e^(z^2)) - log(t), t = 1 / (1 + z / 2), in powers of 2 t - 1: from values of 60 digits, to 4e-10.
_LOG_ERFCX = (
    -8.9115203e-06, 2.0713265e-05, 4.45759271e-05, -0.000154602837, -7.50429318e-05, 0.000657916559, -0.000153493219,
    -0.00233925641, 0.00176040676, 0.00882355236, -0.00987282329, -0.0468954815, 0.0473433104, 0.672643221, -0.671794084,
)  # fmt: skip


def _log_erfcx(z, dtype):
    """log(erfc(z) e^(z^2)) for z >= 0, as exact as `dtype`."""
    if dtype == torch.float64:
        return _erfcx_of(z).log()
    t = 1 / (1 + z / 2)
    return t.log() + polynomial(_LOG_ERFCX, 2 * t - 1)


def _erfcx_of(z):
    """erfc(z) e^(z^2) for z >= 0, by Cody's rational functions."""
    first, second = double_erf.BOUNDS
    center = torch.where(z < first, z, 0.0)
    far = z.clamp(min=second)
    inverse = 1 / (far * far)
    tail = (1 / math.sqrt(math.pi) - inverse * _quotient(double_erf.FAR, inverse)) / far
    middle = torch.where(z > second, tail, _quotient(double_erf.MIDDLE, z.clamp(first, second)))
    return torch.where(z < first, (center * center).exp() * torch.special.erfc(center), middle)


def _quotient(polynomials, x):
    numerator, denominator = (polynomial(coefficients, x) for coefficients in polynomials)
    return numerator / denominator


def _log_ndtr(input, *, out=None):
    """log P(Y < x) for a normal Y."""
    x = in_float64(input)
    z = torch.where(x < 0, -x, x) / math.sqrt(2)
    less = _log_erfcx(z, input.dtype) - z * z - math.log(2)  # that of -|x|
    value = torch.where(x < 0, less, torch.log1p(-less.exp()))
    return value.to(float_of(input))


def _erfc(input, *, out=None):
    """1 - erf(x) without cancellation: of float32 that has no digit from 4 on, and torch's exporters write it so."""
    return torch.special.erfc(in_float64(input)).to(float_of(input))


def _erfcx(input, *, out=None):
    """erfc(x) e^(x^2), where the one may be 0 and the other infinite."""
    x = in_float64(input)
    right = _log_erfcx(torch.where(x < 0, -x, x), input.dtype).exp()
    left = torch.where(x < 0, x, 0.0)
    value = torch.where(x < 0, 2 * (left * left).exp() - right, right)
    return value.to(float_of(input))


REWRITES = {
    **dict.fromkeys([torch.erfinv, torch.Tensor.erfinv, torch.special.erfinv], _erfinv),
    torch.special.ndtri: _ndtri,
    torch.special.log_ndtr: _log_ndtr,
    **dict.fromkeys([torch.erfc, torch.Tensor.erfc, torch.special.erfc], _erfc),
    torch.special.erfcx: _erfcx,
}
