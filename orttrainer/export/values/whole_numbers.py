"""What Python has of whole numbers and torch's symbols, or its exporter, have not, in sums, products and remainders of theirs.

n << 2          4 * n           n & 6           n % 8 - n % 2           ~n          -1 - n
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from unittest import mock

import torch

__all__ = ["spelled_out"]


@contextlib.contextmanager
def spelled_out() -> Iterator[None]:
    """Within the block, symbols have it."""
    common = torch.SymInt.__and__
    operators = {
        "and": lambda a, b: _and(a, b, common),
        "or": lambda a, b: a + b - (a & b),
        "xor": lambda a, b: a + b - 2 * (a & b),
        "lshift": lambda a, b: a * _power(b),
        "rshift": lambda a, b: a // _power(b),
    }
    methods = {
        **dict.fromkeys(("__floor__", "__ceil__", "__trunc__"), lambda n: n),
        "__invert__": lambda n: -1 - n,
        "bit_count": lambda n: operator.index(n).bit_count(),
        **dict.fromkeys(("real", "numerator"), property(lambda n: n)),
        "imag": property(lambda n: 0),
        "denominator": property(lambda n: 1),
    }
    for name, function in operators.items():
        methods[f"__{name}__"], methods[f"__r{name}__"] = _of(function), _of(lambda b, a, f=function: f(a, b))
    with contextlib.ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(torch.SymInt, name, method, create=True))
        yield


def _of(function: Callable) -> Callable:
    def method(number, other):
        return function(number, other) if isinstance(other, (int, torch.SymInt)) else NotImplemented

    return method


def _and(a, b, common: Callable):
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return common(a, b)
    number, mask = (a, int(b)) if isinstance(a, torch.SymInt) else (b, int(a))
    if mask < 0:
        return number - (number & ~mask)
    return sum(number % 2 ** (place + 1) - number % 2**place for place in range(mask.bit_length()) if mask >> place & 1)


def _power(places):
    """2 to this power; ValueError where that is no whole number."""
    if places < 0:
        operator.lshift(1, -1)
    return 2**places
