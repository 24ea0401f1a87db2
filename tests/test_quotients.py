"""Whole quotients and what they leave are those of PyTorch, of numbers that go into each other but for a rounding, too."""

from __future__ import annotations

import pytest
import torch
from exported import Model
from fidelity import assert_trains_as_in_pytorch
from torch import nn


def whole(x):
    return (x * 10).round().long()


def large(x):
    return whole(x) * (2**40 + 77)


def both_signs(a, b):
    """All that torch has of quotients and of what they leave."""
    results = a // b, a.floor_divide(b), a % b, torch.remainder(a, b), torch.fmod(a, b)
    divided = torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc")
    return sum((k + 1) * result for k, result in enumerate((*results, *divided)))


QUOTIENTS = {  # of tenths, and what a layer makes of them
    "floats by a number": lambda x, y: x // 0.1 + x // -0.3,
    "a number by floats": lambda x, y: 7 // (x + 0.05),
    "floats by floats": lambda x, y: x // torch.tensor([0.1, -0.1, 0.2, -0.3]),
    "floor of floats": lambda x, y: torch.div(x, 0.1, rounding_mode="floor"),
    "by zero": lambda x, y: torch.nan_to_num(x // 0.0, 0.5, 2.0, -3.0) + torch.nan_to_num(x // x.relu(), 1, 2, 3),
    "what floats leave": lambda x, y: x % 0.1 + x % -0.3 + 7 % (x + 0.05) + y.remainder(1),
    "what a layer leaves": lambda x, y: y % 0.25 + y % (x + 0.15) + (3 * y) % (y.tanh() - 2),
    "whole numbers by a number": lambda x, y: whole(x) // 3 + whole(x) // -3 + whole(x) // 2.5,
    "a number by whole numbers": lambda x, y: 90 // (2 * whole(x) + 1) + -7.5 // (2 * whole(x) + 1),
    "whole numbers of both signs": lambda x, y: (
        both_signs(whole(x), -2) + both_signs(whole(x), whole(x.roll(1)) * 2 + 1)
    ),
    "floats of both signs": lambda x, y: both_signs(x, -0.5) + both_signs(x, x.roll(1) + 0.05),
    "large whole numbers": lambda x, y: torch.div(large(x), whole(x) + 50, rounding_mode="floor") % 10,
    "large whole numbers towards 0": lambda x, y: torch.div(large(x), whole(x) + 50, rounding_mode="trunc") % 10,
}


def tenths(step: int) -> list[torch.Tensor]:
    return [torch.randint(-20, 20, (8 + step, 4), generator=torch.Generator().manual_seed(step)) / 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_whole_quotients_and_what_they_leave_train_as_in_pytorch(name, dtype):
    def call(m, x):
        y = m.linear(x)
        return y * QUOTIENTS[name](x, y) / 10

    def layer():
        return Model(call, linear=nn.Linear(4, 4)).to(dtype)

    assert_trains_as_in_pytorch(layer, lambda step: [x.to(dtype) for x in tenths(step)], evaluates=True)
