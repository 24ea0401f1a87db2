"""Functions that torch's exporters do not know, or get wrong, written in those that they know.

Each has the value and the gradient of the original, at zeros and ties too.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites import bessel, error_function, incomplete_gamma, modified_bessel, special
from orttrainer.export.rewrites.kinks import flat_beyond, larger, slope_at_zero, smaller
from orttrainer.export.rewrites.precision import rounded_once
from orttrainer.export.rewrites.series import expm1

__all__ = ["REWRITES", "atan2", "functions", "kron", "sign_of"]


# ---------------------------------------------------------------- elementwise


def _fmax(input, other):
    return _numbers_first(_larger, input, other)


def _fmin(input, other):
    return _numbers_first(_smaller, input, other)


def _numbers_first(choose, input, other):
    """What is chosen of two numbers; where one is NaN, the other."""
    input, other = _of_one_dtype(input, other)
    return torch.where(other.isnan(), input, torch.where(input.isnan(), other, choose(input, other)))


if (
    slope_at_zero(lambda x: torch.fmax(x, x.detach())) == 0.5
):  # both have a share where they are equal, since torch 2.14
    _larger, _smaller = torch.maximum, torch.minimum
else:
    _larger, _smaller = larger, smaller


@rounded_once
def log_sigmoid(input):
    """Exporters write the logarithm of the sigmoid, which is infinite below -100."""
    threshold = (
        math.inf if input.dtype == torch.float64 else 20
    )  # beyond which softplus is taken for x: 2e-9 too little
    return -F.softplus(-input, threshold=threshold)


def _hypot(input, other):
    """In shares of the larger, whose square there may be no number for."""
    most = torch.maximum(input.abs(), other.abs())
    unit = stop_gradient(torch.where((most > 0) & (most < math.inf), most, 1.0))
    return unit * torch.sqrt((input / unit).square() + (other / unit).square())


def _log1p(input):
    """log(1 + x), and what 1 + x has lost of x, relative to it; the exporters leave that out."""
    total = 1 + input
    lost = (input - (total - 1)) / total
    return torch.log(total) + stop_gradient(torch.where((total > 0) & (total < math.inf), lost, 0.0))


def _sinc(input):
    """sin(pi x) / (pi x), with the slope 0 at 0, where the exporter's is NaN."""
    angle = math.pi * torch.where(input == 0, 1.0, input)
    return torch.where(input == 0, 1.0, torch.sin(angle) / angle)


def _copysign(input, other):
    """|input| with the sign of `other`, whose zeros have one too."""
    other = torch.as_tensor(other, dtype=input.dtype, device=input.device)
    return input.abs() * sign_of(other)


def sign_of(x):
    """1 or -1, -1 of -0."""
    return torch.where((x < 0) | (x.reciprocal() < 0), -1.0, 1.0).to(x.dtype)


def _signbit(input):
    """Whether it is negative, as -0 is, too."""
    return sign_of(input) < 0 if input.is_floating_point() else input < 0


def _heaviside(input, values):
    """0 and 1 around `values`; of NaN it is 0."""
    return torch.where(input == 0, values, (input > 0).to(values.dtype))


def atan2(input, other):
    """torch.atan2(y, x); the exporter's is -pi to the left where y is 0, and has no slope where x is. At (0, 0) the slope is 0."""
    dtype = torch.result_type(input, other)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    y, x = torch.broadcast_tensors(input.to(dtype), other.to(dtype))
    steep = y.abs() > x.abs()
    base = torch.where(steep, y, x)
    nothing = base == 0
    slope = torch.where(nothing, 0.0, torch.where(steep, x, y)) / torch.where(nothing, 1.0, base)
    turn = (sign_of(x) < 0).to(dtype) * math.pi
    return torch.where(steep, sign_of(y) * (math.pi / 2) - slope.atan(), slope.atan() + sign_of(y) * turn)


def _ldexp(input, other):
    """torch.ldexp, whose slope is a power of integers where the exponents are: 0 of negative ones and beyond their bits."""
    if not other.is_floating_point():
        exponent = other.to(torch.int64)
        if _NO_FRACTIONS and other.dtype != torch.bool:
            bits, constant = torch.iinfo(other.dtype).bits, stop_gradient(input)
            if other.dtype.is_signed and input.is_floating_point():  # the last of them is the sign
                input = torch.where((exponent == bits - 1) & input.isfinite(), 2 * constant - input, input)
            input = torch.where((exponent < 0) | (exponent >= bits), constant, input)
        other = exponent.to(torch.get_default_dtype())
    return input * torch.pow(2.0, other)


_NO_FRACTIONS = slope_at_zero(lambda x: torch.ldexp(x, torch.tensor(-1))) == 0.0


def _frexp(input):
    """mantissa * 2^exponent with a mantissa from 1/2 to 1, whose slope is 2^-exponent."""
    size = input.detach().double().abs()
    usual = (size > 0) & (size < math.inf)
    size = torch.where(usual, size, 0.5)
    exponent = torch.floor(torch.log2(size)) + 1
    mantissa = size * 2.0**-exponent  # log2 is rounded
    exponent = exponent + (mantissa >= 1).double() - (mantissa < 0.5).double()
    scaled = (input.double() * 2.0**-exponent).to(input.dtype)
    return torch.return_types.frexp((torch.where(usual, scaled, input), exponent.int()))


def _vecdot(x, y, *, dim=-1, out=None):
    """Of what is empty ONNX Runtime (1.31.1) gets the shape of a sum wrong, where the axis is counted from the last."""
    if x.is_complex() or y.is_complex():
        return torch.linalg.vecdot(x, y, dim=dim)
    product = x * y
    return product.sum(dim % product.dim())


def _vander(x, *, N=None):
    """torch.linalg.vander: the powers of each number from 0 to N - 1, each the one before times the number."""
    x = torch.atleast_1d(x)
    powers = [torch.ones_like(x)]
    for _ in range((x.shape[-1] if N is None else N) - 1):
        powers.append(powers[-1] * x)
    return torch.stack(powers, -1)


def _gcd(input, other, *, out=None):
    """torch.gcd, by as many steps of Euclid's, each to the remainder nearest to 0, as whole numbers of their size may need."""
    a, b = torch.broadcast_tensors(*(x.abs() for x in _of_one_dtype(input, other)))
    for _ in range(math.ceil(torch.iinfo(a.dtype).bits * math.log(2) / math.log(1 + math.sqrt(2)))):
        rest = a % torch.where(b == 0, 1, b)
        a, b = torch.where(b == 0, a, b), torch.where(b == 0, 0, torch.minimum(rest, b - rest))
    return a


def _lcm(input, other, *, out=None):
    """torch.lcm; 0 where either is."""
    a, b = _of_one_dtype(input, other)
    common = _gcd(a, b)
    return (torch.div(a, torch.where(common == 0, 1, common), rounding_mode="floor") * b).abs()


def kron(input, other, *, out=None):
    """torch.kron: each number of `input` times all of `other`; torch's own form has sizes of one batch."""
    rank = max(input.dim(), other.dim())
    x, y = (z[(None,) * (rank - z.dim())] for z in (input, other))
    for axis in range(rank):
        x, y = x.unsqueeze(2 * axis + 1), y.unsqueeze(2 * axis)
    product = x * y  # [x0, y0, x1, y1, ...]
    for axis in range(rank):
        product = product.flatten(axis, axis + 1)
    return product


# ---------------------------------------------------------------- covariance


def _cov(input, *, correction=1, fweights=None, aweights=None):
    """The covariance of the rows, whose observations may have weights."""
    x = input if input.dim() > 1 else input.reshape(1, -1)
    weights = [w.to(x.dtype) for w in (fweights, aweights) if w is not None]
    if not weights:
        total = x.size(1)
        centered = x - x.mean(1, keepdim=True)
        weighted, norm = centered, max(total - correction, 0)
    else:
        weight = math.prod(weights)
        total = weight.sum()
        centered = x - (x * weight).sum(1, keepdim=True) / total
        weighted = centered * weight
        lost = correction if aweights is None else correction * (weight * weights[-1]).sum() / total
        norm = (total - lost).clamp(min=0)
    return (torch.matmul(weighted, centered.t()) / norm).squeeze()


def _corrcoef(input):
    """Covariances over the deviations."""
    covariance = _cov(input)
    if not covariance.dim():
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation.unsqueeze(1) / deviation).clamp(-1, 1)


# ---------------------------------------------------------------- joined


def _hstack(tensors):
    tensors = [torch.atleast_1d(x) for x in tensors]
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1)


def _vstack(tensors):
    return torch.cat([torch.atleast_2d(x) for x in tensors], 0)


def _dstack(tensors):
    return torch.cat([torch.atleast_3d(x) for x in tensors], 2)


def _column_stack(tensors):
    return torch.cat([x.reshape(-1, 1) if x.dim() <= 1 else x for x in tensors], 1)


def _of_each(function):
    """`function` of several tensors, of which torch calls one of a list."""

    def applied(*tensors):
        several = tensors[0] if len(tensors) == 1 else tensors
        return tuple(map(function, several)) if isinstance(several, (tuple, list)) else function(several)

    return applied


def functions(**rewrites):
    """{torch.f: rewrite, torch.Tensor.f: rewrite} for each name."""
    found = {}
    for name, rewrite in rewrites.items():
        found |= {getattr(owner, name): rewrite for owner in (torch, torch.Tensor) if hasattr(owner, name)}
    return found


def _mean(input, dim=None, keepdim=False, **options):
    """torch.mean; the exporters take no None for all axes, unless nothing is said of axes."""
    if dim is None and not keepdim:
        return torch.mean(input, **options)
    return torch.mean(input, () if dim is None else dim, keepdim, **options)


def _xlogy(input, other):
    """torch.xlogy, x log y: 0 where x is, with the slope log y; 0 where there is no logarithm either, and so for y."""
    return _times_logarithm(input, other, torch.log, 0.0)


def _xlog1py(input, other):
    """torch.special.xlog1py, likewise."""
    return _times_logarithm(input, other, _log1p, -1.0)


def _times_logarithm(x, y, logarithm, pole):
    x, y = (v if isinstance(v, torch.Tensor) else torch.as_tensor(v, **_kind(w)) for v, w in ((x, y), (y, x)))
    x, y = _of_one_dtype(x, y)
    nothing = (x == 0) & (y <= pole)
    return x * logarithm(torch.where(nothing, pole + 1.0, y))


def _of_one_dtype(x, y):
    dtype = torch.result_type(x, y)
    return x.to(dtype), y.to(dtype)


def _kind(x):
    """dtype and device of a number beside `x`."""
    return {"dtype": x.dtype if x.is_floating_point() else torch.get_default_dtype(), "device": x.device}


def _histc(input, bins=100, min=0, max=0, *, out=None):
    """torch.histc; between the extrema of its input if the bounds are equal."""
    x, (low, high) = input.flatten(), (min, max) if min != max else (input.min(), input.max())
    width = torch.as_tensor(high - low, dtype=x.dtype, device=x.device)
    place = ((x - low) * bins / torch.where(width == 0, 1.0, width)).long().clamp(max=bins - 1)
    inside = (x >= low) & (x <= high)
    place = torch.where(inside, place, 0)
    if isinstance(low, torch.Tensor):  # all equal: they lie in the middle of a range of 2
        place = torch.where(width == 0, bins // 2, place)
    return x.new_zeros(bins).scatter_add(0, place, inside.to(x.dtype))


def _hardtanh(input, min_val=-1.0, max_val=1.0, inplace=False):
    """torch.nn.functional.hardtanh, which has slope 0 at its bounds; exporters write clamp, which has 1 there."""
    bounded = flat_beyond(input, min_val, max_val)
    return input.copy_(bounded) if inplace else bounded


def _relu6(input, inplace=False):
    return _hardtanh(input, 0.0, 6.0, inplace)


REWRITES = {
    **bessel.REWRITES,
    **error_function.REWRITES,
    **incomplete_gamma.REWRITES,
    **modified_bessel.REWRITES,
    **special.REWRITES,
    torch.linalg.vander: _vander,
    torch.linalg.vecdot: _vecdot,
    torch._C._nn.log_sigmoid: log_sigmoid,
    **{function: _of_each(function) for function in (torch.atleast_1d, torch.atleast_2d, torch.atleast_3d)},
    F.hardtanh: _hardtanh,
    F.relu6: _relu6,
    torch.special.xlogy: _xlogy,
    torch.special.xlog1py: _xlog1py,
    torch.special.expm1: expm1,
    torch.special.log1p: _log1p,
    torch.special.sinc: _sinc,
    **functions(
        arctan2=atan2,
        atan2=atan2,
        column_stack=_column_stack,
        copysign=_copysign,
        corrcoef=_corrcoef,
        cov=_cov,
        dstack=_dstack,
        expm1=expm1,
        fmax=_fmax,
        fmin=_fmin,
        frexp=_frexp,
        gcd=_gcd,
        heaviside=_heaviside,
        histc=_histc,
        hstack=_hstack,
        hypot=_hypot,
        kron=kron,
        ldexp=_ldexp,
        lcm=_lcm,
        log1p=_log1p,
        mean=_mean,
        signbit=_signbit,
        sinc=_sinc,
        vstack=_vstack,
        xlogy=_xlogy,
    ),
}
