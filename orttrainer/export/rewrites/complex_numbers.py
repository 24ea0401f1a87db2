"""Functions of complex tensors that no exporter knows, by their real and imaginary parts.

The exporters know fft, sums, products, matmul, conj, abs, angle, cat, slices with steps and reshape; these stay.
"""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Callable, Mapping

import torch

from orttrainer.export.rewrites import linear_algebra

__all__ = ["rewrites"]


def _is_complex(value) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_complex, value))
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _parts(value):
    """Real and imaginary part; of a real tensor or number the latter is 0."""
    if isinstance(value, torch.Tensor):
        return (value.real, value.imag) if value.is_complex() else (value, torch.zeros_like(value))
    return value.real, value.imag


def _joined(real, imaginary):
    if isinstance(real, (tuple, list)):
        return (
            type(real)(map(_joined, real, imaginary))
            if type(real) in (tuple, list)
            else tuple(map(_joined, real, imaginary))
        )
    return torch.complex(real, imaginary)


# ---------------------------------------------------------------- part by part


def _by_parts(function: Callable) -> Callable:
    """`function` moves elements about, or adds them: of each part by itself."""

    def applied(*args, **kwargs):
        def part(place):
            def of(value):
                if isinstance(value, (tuple, list)):
                    return type(value)(map(of, value))
                return _parts(value)[place] if _is_complex(value) else value

            return function(*map(of, args), **{name: of(value) for name, value in kwargs.items()})

        return _joined(part(0), part(1))

    return applied


def _where(condition, input, other):
    (a, b), (c, d) = _parts(input), _parts(other)
    return torch.complex(torch.where(condition, a, c), torch.where(condition, b, d))


def _masked_fill(input, mask, value):
    (a, b), (c, d) = _parts(input), _parts(value)
    return torch.complex(a.masked_fill(mask, c), b.masked_fill(mask, d))


def _written(self, *parts):
    """Both parts at once: into one after the other, exporters scatter element by element."""
    torch.view_as_real(self).copy_(torch.stack(parts, -1))
    return self


def _set_item(self, index, value):
    parts = [part.clone() for part in _parts(self)]
    for part, new in zip(parts, _parts(value)):
        part[index] = new
    _written(self, *parts)


def _copy_(self, src, non_blocking=False):
    return _written(self, *(part.expand(self.shape) for part in _parts(src)))


def _fill_(self, value):
    return _written(self, *(torch.full_like(self.real, part) for part in _parts(value)))


def _zero_(self):
    return _fill_(self, 0.0)


def _to(z, *args, **kwargs):
    """z.to(dtype); a real dtype takes the real part, and what names none leaves z where it is."""
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), z.dtype)
    real, imaginary = (part.to(dtype.to_real()) for part in _parts(z))
    return torch.complex(real, imaginary) if dtype.is_complex else real


# ---------------------------------------------------------------- new tensors


def _filled(function: Callable, *args, dtype=None, **kwargs):
    """zeros, full and the like, of a complex dtype: that which is asked for, or that of an argument."""
    if dtype is None:
        dtype = next(
            (x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_complex()), torch.get_default_dtype()
        )
    dtype = dtype.to_real()

    def part(place):
        def of(value):
            return _parts(value)[place] if _is_complex(value) else value

        return function(*map(of, args), dtype=dtype, **{name: of(value) for name, value in kwargs.items()})

    real, filled = part(0), any(isinstance(value, complex) for value in (*args, *kwargs.values()))
    return torch.complex(real, part(1) if filled else torch.zeros_like(real))


# ---------------------------------------------------------------- functions


def _exp(z):
    size = z.real.exp()
    return torch.complex(size * z.imag.cos(), size * z.imag.sin())


def _log(z):
    return torch.complex(z.abs().log(), z.angle())


def _sqrt(z):
    size, angle = z.abs().sqrt(), z.angle() / 2
    return torch.complex(size * angle.cos(), size * angle.sin())


def _sin(z):
    a, b = _parts(z)
    return torch.complex(a.sin() * b.cosh(), a.cos() * b.sinh())


def _cos(z):
    a, b = _parts(z)
    return torch.complex(a.cos() * b.cosh(), -(a.sin() * b.sinh()))


def _tanh(z):
    a, b = (2 * part for part in _parts(z))
    scale = 1 / (a.cosh() + b.cos())
    return torch.complex(a.sinh() * scale, b.sin() * scale)


def _pow(z, exponent):
    if isinstance(exponent, int) and 1 <= exponent <= 8:
        return functools.reduce(torch.mul, [z] * exponent)
    return _exp(_mul(_log(z), exponent))


def _mul(x, y):
    """A product of which one factor may be a complex number of Python's; of tensors the exporters know it."""
    x, y = (x, y) if isinstance(x, torch.Tensor) else (y, x)
    if isinstance(y, torch.Tensor) or (x.is_complex() and not isinstance(y, complex)):
        return x * y
    (a, b), (c, d) = (_parts(x) if x.is_complex() else (x, None)), _parts(complex(y))
    return torch.complex(a * c, a * d) if b is None else torch.complex(a * c - b * d, a * d + b * c)


def _matmul(x, y):
    """Of two matrices the exporters know it, of more they do not."""
    (a, b), (c, d) = _parts(x), _parts(y)
    return torch.complex(a @ c - b @ d, a @ d + b @ c)


def _linear(input, weight, bias=None):
    product = _matmul(input, _by_parts(torch.t)(weight))
    return product if bias is None else product + bias


def _by_blocks(function: Callable) -> Callable:
    """`function` of matrices, an inverse or a power series: that of A + iB is read off that of the real [[A, -B], [B, A]]."""

    def applied(z):
        (a, b), n = _parts(z), z.shape[-1]
        result = function(torch.cat((torch.cat((a, -b), -1), torch.cat((b, a), -1)), -2))
        return torch.complex(result[..., :n, :n], result[..., n:, :n])

    return applied


def _lerp(start, end, weight):
    return start + _mul(end - start, weight)


def _outer(x, y):
    unsqueeze = _by_parts(torch.unsqueeze)
    return unsqueeze(x, 1) * unsqueeze(y, 0)


def _norm(norm):
    """A norm of vectors, which goes by the absolute values; those of matrices but Frobenius' do not."""

    def of_vectors(z, ord=None, *args, **kwargs):
        by_elements = norm is not torch.linalg.norm or ord in (None, "fro")
        return norm(z.abs() if by_elements else z, *([] if ord is None else [ord]), *args, **kwargs)

    return of_vectors


def _einsum(einsum: Callable, equation, *operands):
    """One of the parts, which are one axis more: x and [[Re w, Im w], [-Im w, Re w]]."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    free = [letter for letter in string.ascii_letters if letter not in str(equation)]
    plain = len(operands) == 2 and isinstance(equation, str) and "->" in equation and all(map(_is_complex, operands))
    if not plain or len(free) < 2:
        return _einsum_of_parts(einsum, equation, *operands)
    (left, right), result = equation.split("->")[0].split(","), equation.split("->")[1]
    (x, w), (inner, outer) = operands, free[:2]
    a, b = _parts(w)
    x, w = torch.stack(_parts(x)), torch.stack((torch.stack((a, b)), torch.stack((-b, a))))
    return torch.complex(*einsum(f"{inner}{left},{inner}{outer}{right}->{outer}{result}", x, w).unbind(0))


def _einsum_of_parts(einsum: Callable, equation, *operands):
    """A sum over the parts of all factors: i for each imaginary one."""
    totals = [None, None]
    for chosen in itertools.product(*(((0, 1) if x.is_complex() else (0,)) for x in operands)):
        term = einsum(equation, *(_parts(x)[part] if x.is_complex() else x for x, part in zip(operands, chosen)))
        imaginary = sum(chosen)
        term = -term if imaginary % 4 in (2, 3) else term
        totals[imaginary % 2] = term if totals[imaginary % 2] is None else totals[imaginary % 2] + term
    return torch.complex(*totals)


_BY_PARTS = [
    "chunk",
    "cumsum",
    "diag_embed",
    "diagonal",
    "expand",
    "gather",
    "index_select",
    "mean",
    "movedim",
    "permute",
    "repeat",
    "repeat_interleave",
    "select",
    "split",
    "squeeze",
    "take_along_dim",
    "tensor_split",
    "tile",
    "tril",
    "triu",
    "unbind",
    "unflatten",
    "unsqueeze",
]
_FUNCTIONS = {
    "exp": _exp, "log": _log, "sqrt": _sqrt, "sin": _sin, "cos": _cos, "tanh": _tanh, "pow": _pow, "where": _where,
    "masked_fill": _masked_fill, "mul": _mul, "outer": _outer,
    "matmul": _matmul, "bmm": _matmul, "mm": _matmul, "vdot": lambda x, y: (x.conj() * y).sum(), "square": lambda z: z * z,
    "lerp": _lerp, "lerp_": lambda start, end, weight: _copy_(start, _lerp(start, end, weight)),
}  # fmt: skip
_METHODS = {
    "__mul__": _mul,
    "__rmul__": _mul,
    "__matmul__": _matmul,
    "__pow__": _pow,
    "__setitem__": _set_item,
    "copy_": _copy_,
    "fill_": _fill_,
    "to": _to,
    "zero_": _zero_,
}
_NEW = (
    "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros",
    "zeros_like",
)  # fmt: skip


def rewrites(others: Mapping[Callable, Callable]) -> dict[Callable, Callable]:
    """What is called where an argument is complex; else what `others` have in the function's place."""
    found: dict[Callable, Callable] = {}

    def add(function: Callable, rewrite: Callable) -> None:
        other = others.get(function, function)

        @functools.wraps(function, assigned=("__name__",), updated=())
        def chosen(*args, **kwargs):
            is_complex = _is_complex([args, tuple(kwargs.values())]) or getattr(
                kwargs.get("dtype"), "is_complex", False
            )
            return (rewrite if is_complex else other)(*args, **kwargs)

        found[function] = chosen

    for owner in (torch, torch.Tensor):
        for name in _BY_PARTS:
            if function := getattr(owner, name, None):
                add(function, _by_parts(function))
        for name, rewrite in {**_FUNCTIONS, **(_METHODS if owner is torch.Tensor else {})}.items():
            if function := getattr(owner, name, None):
                add(function, rewrite)
        for name in _NEW:
            if function := getattr(owner, name, None):
                add(function, functools.partial(_filled, function))
    add(torch.Tensor.__getitem__, _by_parts(torch.Tensor.__getitem__))
    add(torch._C._nn.pad, _by_parts(torch._C._nn.pad))
    add(torch._C._nn.linear, _linear)
    for function in linear_algebra.OF_A_MATRIX:
        add(function, _by_blocks(others[function]))
    add(torch._C._nn.pad_sequence, _by_parts(torch._C._nn.pad_sequence))
    for norm in (torch.norm, torch.Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm):
        add(norm, _norm(norm))
    add(torch.einsum, functools.partial(_einsum, others.get(torch.einsum, torch.einsum)))
    return found
