"""Changes that make no difference when they come, and those behind them that do."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from pairs import Pair
from torch import nn
from torch.nn import functional


class Idle(nn.Module):
    """Of its attributes most have no effect as long as others are as they are."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.weighted, self.calibrated, self.table = False, False, torch.ones(3)
        self.config = types.SimpleNamespace(factor=1.0, shift=torch.zeros(3), large=torch.zeros(99, 99))
        self.act = leaky(0.1)

    def forward(self, x):
        y = self.head(self.act(self.layer(x))) * self.config.factor
        if self.calibrated:
            y = self.scaled(y)
        return y * self.table + self.config.shift + self.config.large.sum() if self.weighted else y

    def scaled(self, y):
        return y if self.gain == 1.0 else self.gain * y

    gain = 1.0


def leaky(slope):
    return functools.partial(functional.leaky_relu, negative_slope=slope)


def table(value):
    return lambda m: setattr(m, "table", torch.full((3,), value))


def weighted(m):
    m.weighted = not m.weighted


def written(m):
    m.table[0] = 9.0


def calibrated(m):
    m.calibrated = True


def in_config(name, value):
    return lambda m: setattr(m.config, name, value)


def act(slope):
    return lambda m: setattr(m, "act", leaky(slope))


LATER = {
    "a tensor": [table(2.0), weighted, written],
    "a tensor that had an effect before": [weighted, lambda m: (weighted(m), table(3.0)(m)), table(4.0), weighted],
    "what code reads that was not run before": [calibrated, lambda m: setattr(m, "gain", 5.0)],
    "a number beside a tensor": [in_config("shift", torch.ones(3)), in_config("factor", 3.0), weighted, in_config("shift", torch.ones(3))],
    "a tensor that is no small one": [in_config("large", torch.zeros(99, 99)), weighted, in_config("large", torch.ones(99, 99))],
    "a function": [act(0.1), act(0.9)],
    "a number and a tensor at once": [
        lambda m: (calibrated(m), table(2.0)(m)), table(3.0), lambda m: setattr(m, "gain", 2.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", LATER)
def test_what_another_change_makes_matter_is_seen(kind):
    pair = Pair(Idle())
    pair.steps(1)
    for change in LATER[kind]:
        pair.change(change)
        pair.steps(1)


def test_a_tensor_that_is_another_in_each_step_to_no_effect_is_looked_at_once(exports):
    pair = Pair(Idle())
    pair.steps(1)
    for step in range(3):
        pair.change(table(2.0 + step))
        pair.change(in_config("shift", torch.full((3,), 1.0 + step)))
        pair.steps(1)
    assert len(exports) == 2
    for step in range(3):
        pair.change(in_config("factor", 2.0) if step == 0 else table(2.0 + step))
        pair.steps(1)
    assert len(exports) == 4
    pair.change(in_config("factor", 1.0))  # for which there is a graph
    pair.steps(1)
    assert len(exports) == 4
