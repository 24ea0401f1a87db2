"""What the special functions share: they are polynomials, evaluated in float64."""

from __future__ import annotations

import torch

__all__ = ["expm1", "float_of", "in_float64", "polynomial"]


def float_of(input):
    """The dtype of a special function of `input`."""
    return input.dtype if input.is_floating_point() else torch.float32


def in_float64(input):
    """`input` in float64; integers by way of float32, as torch takes them."""
    return input.double() if input.is_floating_point() else input.float().double()


def polynomial(coefficients, x):
    """By Horner's rule, the coefficient of the highest power first."""
    total = torch.zeros_like(x)
    for coefficient in coefficients:
        total = total * x + coefficient
    return total


def expm1(input):
    """exp(x) - 1, near 0 by tanh(x / 2) (exp(x) + 1), which has all digits."""
    near = input.clamp(-0.5, 0.5)
    exact = torch.tanh(near / 2) * (torch.exp(near) + 1)
    return torch.where(input == near, exact, torch.exp(input) - 1)
