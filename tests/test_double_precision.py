"""Modules of float64 train in it: Python's numbers in forward are not rounded to float32 on the way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fidelity import described
from small import make
from torch import nn

from orttrainer.errors import ExecutionError

FUNCTIONS = {
    "product": lambda x: x * 0.1,
    "sum": lambda x: x + 0.1,
    "difference": lambda x: 0.1 - x,
    "quotient": lambda x: x / math.pi,
    "power": lambda x: x**0.1,
    "clamped": lambda x: x.clamp(0.3, 0.7),
    "chosen": lambda x: torch.where(x > 0.5, x, 0.1),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.1),
    "full": lambda x: x * torch.full((2,), 0.1, dtype=x.dtype),
    "like": lambda x: x * torch.full_like(x, 0.1) + x.new_full((2,), 0.3),
    "huber": lambda x: F.huber_loss(x, 1 - x, delta=0.1, reduction="none"),
    "smoothed": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), label_smoothing=0.1, reduction="none"),
    "normalized": lambda x: F.normalize(x, eps=0.1),
}


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterDict({name: torch.zeros(3, 2, dtype=torch.float64) for name in FUNCTIONS})

    def forward(self, x):
        each = {name: function(x + self.shifts[name]) for name, function in FUNCTIONS.items()}
        total = sum((y + 1).square().sum() for y in each.values())
        return total, torch.cat([y.flatten() for y in each.values()])


def test_numbers_of_pythons_are_not_rounded_to_float32():
    x = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module, ours = Double(), Double()
    loss, values = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=described([x])).train_step(x, 1.0)
    torch.testing.assert_close(found[1], values.detach(), rtol=1e-13, atol=1e-14)
    for name, shift in ours.shifts.items():
        torch.testing.assert_close(
            shift, -module.shifts[name].grad, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_operator_that_the_runtime_has_in_float32_only_is_named():
    class Smooth(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            y = F.gelu(self.linear(x))
            return y.square().mean(), y

    x = torch.ones(2, 3, dtype=torch.float64)
    module = Smooth()
    with pytest.raises(ExecutionError, match=r"an implementation for Erf.* by model\.float\(\) where it is of float64"):
        make(module, loss_fn=None, desc=described([x])).train_step(x, 0.1)
    make(module.float(), loss_fn=None, desc=described([x.float()])).train_step(x.float(), 0.1)
