"""Functions of complex tensors, by their real and imaginary parts: elementwise, along axes, products and Fourier transforms."""

from __future__ import annotations

import cmath
import functools
import itertools
import math
import string
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from orttrainer.errors import UnsupportedFeatureError
from orttrainer.export.forms.stop_gradient import stop_gradient
from orttrainer.export.rewrites import complex_arithmetic, complex_matrices
from orttrainer.export.rewrites.complex_arithmetic import mul
from orttrainer.export.rewrites.complex_matrices import matmul, product
from orttrainer.export.rewrites.complex_parts import by_parts, is_complex, parts
from orttrainer.export.rewrites.real_transforms import resized, several, sizes_of
from orttrainer.export.rewrites.spelled_out import atan2, kron, sign_of

__all__ = ["FUNCTIONS", "METHODS", "rewrites_of_others"]


# ---------------------------------------------------------------- elementwise


def _exp(z):
    size = z.real.exp()
    return torch.complex(size * z.imag.cos(), size * z.imag.sin())


def _expm1(z):
    """Where z is near 0, exp(z) - 1 would be the rounding of exp(z)."""
    a, b = parts(z)
    return torch.complex(a.expm1() * b.cos() - 2 * (b / 2).sin().square(), a.exp() * b.sin())


def _angle(z):
    return atan2(z.imag, z.real)


def _log(z, base=None):
    scale = 1 if base is None else 1 / math.log(base)
    return torch.complex(z.abs().log() * scale, _angle(z) * scale)


def _log1p(z):
    a, b = parts(z)
    return torch.complex((a * (2 + a) + b * b).log1p() / 2, atan2(b, 1 + a))


def _sqrt(z):
    size, angle = z.abs().sqrt(), _angle(z) / 2
    return torch.complex(size * angle.cos(), size * angle.sin())


def _sin(z):
    a, b = parts(z)
    return torch.complex(a.sin() * b.cosh(), a.cos() * b.sinh())


def _cos(z):
    a, b = parts(z)
    return torch.complex(a.cos() * b.cosh(), -(a.sin() * b.sinh()))


def _sinh(z):
    a, b = parts(z)
    return torch.complex(a.sinh() * b.cos(), a.cosh() * b.sin())


def _cosh(z):
    a, b = parts(z)
    return torch.complex(a.cosh() * b.cos(), a.sinh() * b.sin())


_FAR = 20.0  # exp(-2 * 20) is nothing beside 1, and exp(4 * 20) can still be computed with


def _tanh(z):
    """By sinh(a)^2 + cos(b)^2, which near a pole has all its digits; far out it is 1 or -1."""
    a, b = parts(z)
    a = a.clamp(-_FAR, _FAR)
    scale = 1 / (a.sinh().square() + b.cos().square())
    return torch.complex(a.sinh() * a.cosh() * scale, b.sin() * b.cos() * scale)


def _tan(z):
    """-i tanh(i z)."""
    return _turned(_tanh)(z)


def _sigmoid(z):
    a, b = parts(z)
    return 1 / (1 + _exp(torch.complex((-a).clamp(max=2 * _FAR), -b)))


def _inverse_sinh(z, cut=lambda a, b: (a, b)):
    """log(w + sqrt(w^2 + 1)) of w = z or -z, whichever lies to the right: there nothing cancels."""
    a, b = parts(z)
    side = sign_of(a)
    a, b = cut(a * side, b * side)
    c, d = parts(_sqrt(torch.complex((a - b) * (a + b) + 1, 2 * a * b)))
    e, f = parts(_log(torch.complex(a + c, b + d)))
    return torch.complex(e * side, f * side)


def _asinh(z):
    """On half of its cut PyTorch's slope is that of the other side, the negative one."""

    def cut(*w):
        turns, kept = (w[0] == 0) & (w[1] < -1), map(stop_gradient, w)
        return (torch.where(turns, k - (part - k), part) for k, part in zip(kept, w))

    return _inverse_sinh(z, cut)


def _acosh(z):
    """i acos(z) or -i acos(z), whichever lies to the right."""
    a, b = parts(_turned(_inverse_sinh)(z))  # of the arc sine
    side = sign_of(parts(z)[1])
    return torch.complex(b * side, (math.pi / 2 - a) * side)


def _atanh(z):
    a, b = parts(z)
    return (_log1p(z) - _log1p(torch.complex(-a, -b))) / 2


def _turned(function: Callable) -> Callable:
    """-i f(i z)."""

    def applied(z):
        a, b = parts(z)
        c, d = parts(function(torch.complex(-b, a)))
        return torch.complex(d, -c)

    return applied


_asin, _atan = _turned(_asinh), _turned(_atanh)


def _acos(z):
    a, b = parts(_asin(z))
    return torch.complex(math.pi / 2 - a, -b)


def _sgn(z):
    """z / |z|; 0 of 0."""
    size = z.abs()
    return z * torch.where(size > 0, 1 / torch.where(size > 0, size, torch.ones_like(size)), torch.zeros_like(size))


def _pow(z, exponent):
    if isinstance(exponent, (int, float, complex)) and exponent == 0:
        a, b = parts(z)
        return torch.complex(torch.ones_like(a), torch.zeros_like(b))  # of 0, too, which has no logarithm
    if isinstance(exponent, int) and 1 <= exponent <= 8:
        return functools.reduce(torch.mul, [z] * exponent)
    if not isinstance(z, torch.Tensor):
        logarithm = cmath.log(z)
        return _exp(mul(exponent, logarithm if logarithm.imag else logarithm.real))
    return _exp(mul(_log(z), exponent))


def _sinc(z):
    """sin(pi z) / (pi z), with the slope 0 at 0."""
    a, b = parts(z)
    nothing = (a == 0) & (b == 0)
    angle = torch.complex(torch.where(nothing, 1.0, a) * math.pi, b * math.pi)
    c, d = parts(_sin(angle) / angle)
    return torch.complex(torch.where(nothing, 1.0, c), torch.where(nothing, 0.0, d))


def _conjugated(z):
    a, b = parts(z)
    return torch.complex(a, -b)


def _isclose(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
    near = (input - other).abs() <= atol + rtol * other.abs()
    no_numbers = _either(torch.isnan)(input) & _either(torch.isnan)(other) if equal_nan else False
    return (near & _both(torch.isfinite)(input)) | _equal(input, other) | no_numbers


def _equal(x, y):
    if not isinstance(y, (torch.Tensor, int, float, complex)):
        return NotImplemented  # as None, which no tensor equals
    (a, b), (c, d) = parts(x), parts(y)
    return (a == c) & (b == d)


def _unequal(x, y):
    return NotImplemented if (equal := _equal(x, y)) is NotImplemented else ~equal


def _both(function: Callable) -> Callable:
    """Whether `function` holds of both parts."""
    return lambda z: function(z.real) & function(z.imag)


def _either(function: Callable) -> Callable:
    return lambda z: function(z.real) | function(z.imag)


def _lerp(start, end, weight):
    return start + mul(end - start, weight)


def _addcmul(input, tensor1, tensor2, *, value=1):
    return input + mul(tensor1 * tensor2, value)


def _addcdiv(input, tensor1, tensor2, *, value=1):
    return input + mul(tensor1 / tensor2, value)


# ---------------------------------------------------------------- along axes


def _var(input, *args, **kwargs):
    """That of one part and that of the other: it goes by the squared distance."""
    return torch.var(input.real, *args, **kwargs) + torch.var(input.imag, *args, **kwargs)


def _std(input, *args, **kwargs):
    return _var(input, *args, **kwargs).sqrt()


def _prod(input, dim=None, keepdim=False, *, dtype=None):
    input = input if dtype is None else input.to(dtype)
    if dim is None:
        return _prod(input.flatten(), 0)
    product = functools.reduce(torch.mul, by_parts(torch.unbind)(input, dim))
    return by_parts(torch.unsqueeze)(product, dim) if keepdim else product


def _cumprod(input, dim, *, dtype=None):
    input = input if dtype is None else input.to(dtype)
    return by_parts(torch.stack)(list(itertools.accumulate(by_parts(torch.unbind)(input, dim), torch.mul)), dim)


# ---------------------------------------------------------------- products


def _added(of_two: Callable) -> Callable:
    """torch.addmm and the like: beta * input + alpha * of_two(x, y)."""

    def applied(input, x, y, *, beta=1, alpha=1):
        return mul(input, beta) + mul(of_two(x, y), alpha)

    return applied


def _with_bias(convolution: Callable) -> Callable:
    """A convolution of complex images."""

    def applied(input, weight, bias=None, *args, **kwargs):
        result = product(lambda x, w: convolution(x, w, None, *args, **kwargs))(input, weight)
        return result if bias is None else result + by_parts(torch.reshape)(bias, (-1, *[1] * (weight.dim() - 2)))

    return applied


def _linear(input, weight, bias=None):
    product = matmul(input, by_parts(torch.t)(weight))
    return product if bias is None else product + bias


def _outer(x, y):
    unsqueeze = by_parts(torch.unsqueeze)
    return unsqueeze(x, 1) * unsqueeze(y, 0)


def _einsum(einsum: Callable, equation, *operands):
    """One of the parts, which are one axis more: x and [[Re w, Im w], [-Im w, Re w]], w the one of fewer axes."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    free = [letter for letter in string.ascii_letters if letter not in str(equation)]
    plain = len(operands) == 2 and isinstance(equation, str) and "->" in equation and all(map(is_complex, operands))
    if not plain or len(free) < 2:
        return _einsum_of_parts(einsum, equation, *operands)
    (left, right), result = equation.split("->")[0].split(","), equation.split("->")[1]
    (x, w), (inner, outer) = operands, free[:2]
    if len(left) < len(right):
        x, w, left, right = w, x, right, left
    a, b = parts(w)
    x, w = torch.stack(parts(x)), torch.stack((torch.stack((a, b)), torch.stack((-b, a))))
    return torch.complex(*einsum(f"{inner}{left},{inner}{outer}{right}->{outer}{result}", x, w).unbind(0))


def _einsum_of_parts(einsum: Callable, equation, *operands):
    """A sum over the parts of all factors: i for each imaginary one."""
    totals = [None, None]
    for chosen in itertools.product(*(((0, 1) if x.is_complex() else (0,)) for x in operands)):
        term = einsum(equation, *(parts(x)[part] if x.is_complex() else x for x, part in zip(operands, chosen)))
        imaginary = sum(chosen)
        term = -term if imaginary % 4 in (2, 3) else term
        totals[imaginary % 2] = term if totals[imaginary % 2] is None else totals[imaginary % 2] + term
    return torch.complex(*totals)


# ---------------------------------------------------------------- Fourier transforms


_resized = by_parts(resized)


def _transform(transform: Callable, real: bool) -> Callable:
    """A transform along one axis; `real`: its result is, and has n elements of half as many."""

    def applied(input, n=None, dim=-1, norm=None):
        if n is not None:
            input = _resized(input, {dim: n // 2 + 1 if real else n})
        return transform(input, n if real else None, dim, norm)

    return applied


def _transforms(transform: Callable, real: bool, dims: tuple[int, ...] | None) -> Callable:
    """A transform along several axes, of which the last one is halved where its result is `real`."""

    def applied(input, s=None, dim=dims, norm=None):
        s, dim = several(s), several(dim)
        if s is None:
            return transform(input, s, dim, norm)
        dim = tuple(range(-len(s), 0)) if dim is None else dim
        sizes = sizes_of(s, dim)
        if real and dim[-1] in sizes:
            sizes[dim[-1]] = s[-1] // 2 + 1
        input = _resized(input, sizes)
        return transform(input, s if real else None, dim, norm)

    return applied


def _istft(
    input, n_fft, hop_length=None, win_length=None, window=None, center=True, normalized=False, onesided=None, length=None,
    return_complex=False,
):  # fmt: skip
    """torch.istft of a real signal: the frames, each times the window, are added up, and divided by what the windows add up to."""
    if return_complex:
        raise UnsupportedFeatureError("torch.istft with return_complex=True has no ONNX form: make two real signals.")
    if input.dim() == 2:
        one = by_parts(torch.unsqueeze)(input, 0)
        return _istft(one, n_fft, hop_length, win_length, window, center, normalized, onesided, length)[0]
    win_length = n_fft if win_length is None else win_length
    hop = win_length // 4 if hop_length is None else hop_length
    window = torch.ones(win_length, device=input.device) if window is None else window
    left = (n_fft - win_length) // 2
    window = torch._C._nn.pad(window, [left, n_fft - win_length - left])
    half = by_parts(torch.narrow)(input, 1, 0, n_fft // 2 + 1)  # which PyTorch takes of the whole, too
    frames = torch.fft.irfft(half, n_fft, 1, "ortho" if normalized else None)
    frames = frames * window[:, None]  # [batch, n_fft, frames]
    squares = window.square()[None, :, None].expand(1, n_fft, frames.shape[2])
    total, start = n_fft + hop * (frames.shape[2] - 1), n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    signal, envelope = (
        F.fold(x, (1, total), (1, n_fft), stride=(1, hop))[:, 0, 0, start:end] for x in (frames, squares)
    )
    signal = signal / envelope
    return signal if length is None else torch._C._nn.pad(signal, [0, length - signal.shape[1]])


# ---------------------------------------------------------------- which is which

FUNCTIONS = {  # of `torch` and methods of tensors, by name
    **complex_arithmetic.FUNCTIONS,
    "exp": _exp, "exp2": lambda z: _exp(z * math.log(2)), "expm1": _expm1, "log": _log, "log2": lambda z: _log(z, 2),
    "log10": lambda z: _log(z, 10), "log1p": _log1p, "sqrt": _sqrt, "rsqrt": lambda z: 1 / _sqrt(z), "sin": _sin, "cos": _cos,
    "angle": _angle, "tan": _tan, "sinh": _sinh, "cosh": _cosh, "tanh": _tanh, "sigmoid": _sigmoid, "sgn": _sgn, "pow": _pow, "sinc": _sinc,
    "conj_physical": _conjugated,
    "asin": _asin, "acos": _acos, "atan": _atan, "asinh": _asinh, "acosh": _acosh, "atanh": _atanh,
    "arcsin": _asin, "arccos": _acos, "arctan": _atan, "arcsinh": _asinh, "arccosh": _acosh, "arctanh": _atanh,
    "square": lambda z: z * z, "eq": _equal, "ne": _unequal, "isclose": _isclose, "isfinite": _both(torch.isfinite), "isnan": _either(torch.isnan),
    "isinf": _either(torch.isinf), "lerp": _lerp, "addcmul": _addcmul, "addcdiv": _addcdiv,
    "var": _var, "std": _std, "prod": _prod, "cumprod": _cumprod,
    "matmul": matmul, "bmm": matmul, "mm": matmul, "mv": matmul, "dot": matmul, "outer": _outer,
    "chain_matmul": complex_matrices.chain, "cross": product(torch.cross), "dist": complex_matrices.distance,
    "inner": product(torch.inner), "kron": product(kron), "tensordot": product(torch.tensordot),
    "vdot": lambda x, y: (x.conj() * y).sum(),
    "addmm": _added(matmul), "addmv": _added(matmul), "baddbmm": _added(matmul), "addr": _added(_outer),
}  # fmt: skip
METHODS = {
    **complex_arithmetic.METHODS,
    "__matmul__": matmul,
    "__pow__": _pow,
    "__rpow__": lambda exponent, z: _pow(z, exponent),
    "__eq__": _equal,
    "__ne__": _unequal,
}
_CONVOLUTIONS = [getattr(torch, f"conv{transposed}{rank}d") for transposed in ("", "_transpose") for rank in (1, 2, 3)]


def rewrites_of_others(others: Mapping[Callable, Callable]) -> dict[Callable, Callable]:
    """Those of functions that are no methods of tensors; `others` are the rewrites of real ones."""
    fft = torch.fft
    return {
        torch._C._nn.linear: _linear,
        **{convolution: _with_bias(others.get(convolution, convolution)) for convolution in _CONVOLUTIONS},
        **complex_matrices.rewrites_of_others(others),
        torch.linalg.cross: product(others.get(torch.linalg.cross, torch.linalg.cross)),
        torch.einsum: functools.partial(_einsum, others.get(torch.einsum, torch.einsum)),
        torch.istft: _istft,
        torch.Tensor.istft: _istft,
        **{transform: _transform(transform, real=False) for transform in (fft.fft, fft.ifft)},
        **{transform: _transform(transform, real=True) for transform in (fft.irfft, fft.hfft)},
        **{transform: _transforms(transform, False, (-2, -1)) for transform in (fft.fft2, fft.ifft2)},
        **{transform: _transforms(transform, False, None) for transform in (fft.fftn, fft.ifftn)},
        fft.irfft2: _transforms(fft.irfft2, True, (-2, -1)),
        fft.irfftn: _transforms(fft.irfftn, True, None),
    }
