"""Functions and classes of libraries that a program holds, and exchanges between two steps; buffers that come later."""

from __future__ import annotations

import functools
import types
import warnings

import pytest
import torch
from pairs import Pair
from torch import nn
from torch.nn import functional

squash = functional.relu


class Layer(nn.Module):
    """All that it computes with but its layers it has from elsewhere."""

    Act = nn.Tanh

    def __init__(self):
        super().__init__()
        self.layer, self.head, self.steps = nn.Linear(4, 6), nn.Linear(6, 3), Steps()
        self.config = types.SimpleNamespace(act=torch.tanh, leaky=leaky(0.1), reduced=torch.Tensor.sum)
        self.register_buffer("temperature", None)

    def forward(self, x):
        y = self.steps.chosen(squash(self.config.act(self.layer(x))))
        y = self.Act()(self.config.leaky(y)) + self.config.reduced(y, 1, keepdim=True)
        y = self.head(y) if self.temperature is None else self.head(y) / self.temperature
        return y if getattr(self, "shift", None) is None else y + self.shift


class Steps:
    """An object that holds a method of its own."""

    def __init__(self):
        self.chosen = self.once

    def once(self, y):
        return y

    def twice(self, y):
        return 2 * y


def leaky(slope):
    return functools.partial(functional.leaky_relu, negative_slope=slope)


EXCHANGED = {
    "a function of C": lambda m: setattr(m.config, "act", torch.sigmoid),
    "a partial": lambda m: setattr(m.config, "leaky", leaky(0.9)),
    "a method of tensors": lambda m: setattr(m.config, "reduced", torch.Tensor.mean),
    "a method": lambda m: setattr(m.steps, "chosen", m.steps.twice),
    "a global": lambda m: globals().update(squash=functional.gelu),
    "of a class": lambda m: setattr(Layer, "Act", nn.Sigmoid),
    "a buffer that was None": lambda m: setattr(m, "temperature", torch.tensor([0.5, 1.0, 2.0])),
    "a new buffer": lambda m: m.register_buffer("shift", torch.tensor([0.5, 1.0, -2.0])),
}


@pytest.mark.parametrize("change", EXCHANGED.values(), ids=EXCHANGED)
def test_what_is_exchanged_is_followed(change, monkeypatch, exports):
    monkeypatch.setitem(globals(), "squash", functional.relu)  # which are put back behind the test
    monkeypatch.setattr(Layer, "Act", nn.Tanh)
    pair = Pair(Layer(), optimizer="SGD with momentum")
    pair.steps(2)
    pair.change(change)
    pair.steps(2)
    assert len(exports) == 2


class Loss:
    def __init__(self):
        self.function = functional.cross_entropy

    def __call__(self, scores, label):
        return self.function(scores, label)


def test_the_function_of_a_loss_is_followed():
    loss = Loss()
    pair = Pair(nn.Linear(4, 3), loss=loss)
    pair.reference_loss = loss  # not a copy
    pair.steps(2)
    loss.function = functional.multi_margin_loss
    pair.steps(2)


class Warns(nn.Linear):
    def forward(self, x):
        warnings.warn("of an older form", stacklevel=2)
        return super().forward(x)


def test_warnings_that_are_recorded_around_each_step_cost_no_export(exports):
    pair = Pair(Warns(4, 3))
    for _ in range(3):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            pair.steps(1)
    assert len(exports) == 1
