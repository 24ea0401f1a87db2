"""Complex tensors by their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["by_parts", "is_complex", "parts"]


def is_complex(value) -> bool:
    """Whether `value` is complex, or a list with such a value in it."""
    if isinstance(value, (tuple, list)):
        return any(map(is_complex, value))
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def parts(value) -> tuple:
    """Real and imaginary part; of a real tensor or number the latter is 0."""
    if not isinstance(value, torch.Tensor):
        return value.real, value.imag
    if not value.is_complex():
        return value, torch.zeros_like(value)
    return (
        (value.real, -value.conj().imag) if value.is_conj() else (value.real, value.imag)
    )  # its own is a view of that


def _joined(real, imaginary):
    if isinstance(real, (tuple, list)):
        return (
            type(real)(map(_joined, real, imaginary))
            if type(real) in (tuple, list)
            else tuple(map(_joined, real, imaginary))
        )
    return torch.complex(real, imaginary)


def by_parts(function: Callable) -> Callable:
    """`function` moves elements about, or adds them: of each part by itself."""

    def applied(*args, **kwargs):
        def part(place):
            def of(value):
                if isinstance(value, (tuple, list)):
                    return type(value)(map(of, value))
                return parts(value)[place] if is_complex(value) else value

            return function(*map(of, args), **{name: of(value) for name, value in kwargs.items()})

        return _joined(part(0), part(1))

    return applied
