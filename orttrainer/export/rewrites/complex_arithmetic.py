"""Sums, products and quotients with complex numbers of Python's, and of tensors of several precisions.

The exporters know those of complex tensors, and of such with real ones, of one precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from orttrainer.export.rewrites.complex_parts import parts

__all__ = ["FUNCTIONS", "METHODS", "mul"]


def _known(value, dtype: torch.dtype):
    """`value` as the exporters know it in a function whose result has this dtype."""
    if isinstance(value, torch.Tensor):
        if value.dtype in (dtype, dtype.to_real()):
            return value
        return torch.complex(*(part.to(dtype.to_real()) for part in parts(value)))
    if isinstance(value, complex):
        return torch.complex(*(torch.full((), part, dtype=dtype.to_real()) for part in parts(value)))
    return value


def _alike(function: Callable) -> Callable:
    """`function` of two tensors or numbers of one precision; of those of others where it is given them."""

    def applied(x, y, **kwargs):
        dtype = torch.result_type(x, y)
        return function(_known(x, dtype), _known(y, dtype), **kwargs)

    return applied


def _in_place(function: Callable) -> Callable:
    """`function` writes its result into the first of them, whatever the precision of the other one."""
    return lambda self, other, *, alpha=1, **kwargs: function(self, _known(_times(other, alpha), self.dtype), **kwargs)


def _times(y, alpha):
    """y times the `alpha` of a sum."""
    if isinstance(alpha, int) and alpha == 1:
        return y
    return mul(y, alpha) if isinstance(y, torch.Tensor) else y * alpha


_sum, _difference, _whole_product = _alike(torch.add), _alike(torch.sub), _alike(torch.mul)


def _add(x, y, *, alpha=1):
    return _sum(x, _times(y, alpha))


def _sub(x, y, *, alpha=1):
    return _difference(x, _times(y, alpha))


def _rsub(x, y, *, alpha=1):
    return _sub(y, x, alpha=alpha)


def mul(x, y):
    """A product of which one factor may be a complex number of Python's."""
    x, y = (x, y) if isinstance(x, torch.Tensor) else (y, x)
    if isinstance(y, torch.Tensor) or (x.is_complex() and not isinstance(y, complex)):
        return _whole_product(x, y)
    (a, b), (c, d) = (parts(x) if x.is_complex() else (x, None)), parts(complex(y))
    return torch.complex(a * c, a * d) if b is None else torch.complex(a * c - b * d, a * d + b * c)


_div = _alike(torch.div)


FUNCTIONS = {  # of `torch` and methods of tensors, by name
    "add": _add, "mul": mul, "multiply": mul, "rsub": _rsub, **dict.fromkeys(["sub", "subtract"], _sub),
    **dict.fromkeys(["div", "divide", "true_divide"], _div),
}  # fmt: skip
METHODS = {
    "__add__": _add,
    "__radd__": _add,
    "__sub__": _sub,
    "__rsub__": _rsub,
    "__mul__": mul,
    "__rmul__": mul,
    "__truediv__": _div,
    "__rtruediv__": lambda self, other: mul(self.reciprocal(), other),
    **{
        name: _in_place(getattr(torch.Tensor, f"{operation}_"))
        for operation in ("add", "sub", "mul", "div")
        for name in (f"{operation}_", f"__i{'truediv' if operation == 'div' else operation}__")
    },
}
