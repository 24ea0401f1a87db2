"""What the code of gradients reads, of Functions, operators and hooks, is followed as what forward reads is."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from pairs import Pair
from torch import library, nn

strength = 1.0
settings = types.SimpleNamespace(strength=1.0)


def scaled(g):
    return g * strength


def of_a_hook(g):
    return scaled(g)


class Named(torch.autograd.Function):
    """Of a global variable, by a function that is named."""

    @staticmethod
    def forward(ctx, x, layer):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return scaled(g), None


class OfClass(Named):
    strength = 1.0

    @staticmethod
    def backward(ctx, g):
        return OfClass.halved(g), None

    @staticmethod
    def halved(g):
        return g * OfClass.strength / 2


class OfObject(Named):
    @staticmethod
    def backward(ctx, g):
        return g * settings.strength, None


def doubled(backward):
    @functools.wraps(backward)
    def decorated(ctx, g):
        g, none = backward(ctx, g)
        return 2 * g, none

    return decorated


class OfLayer(torch.autograd.Function):
    """Of an attribute of the layer that `ctx` keeps; its forward has no `ctx`."""

    @staticmethod
    def forward(x, layer):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.layer = inputs[1]

    @staticmethod
    @doubled
    def backward(ctx, g):
        return g * ctx.layer.strength, None


@library.custom_op("orttrainer_tests::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, g: scaled(g))


class Layers(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between, self.strength = nn.Linear(4, 5), nn.Linear(5, 3), between, 1.0

    def forward(self, x):
        return self.second(self.between(self, self.first(x)))


def hooked(_, x):
    if x.requires_grad:
        x.register_hook(of_a_hook)
    return x


def change(monkeypatch, pair, value):
    monkeypatch.setitem(globals(), "strength", value)
    monkeypatch.setattr(OfClass, "strength", value)
    monkeypatch.setattr(settings, "strength", value)
    monkeypatch.setattr(SCALES, "factor", value)
    pair.change(lambda module: setattr(module, "strength", value))


BETWEEN = {
    "a function that backward names": lambda layer, x: Named.apply(x, layer),
    "an attribute of a class": lambda layer, x: OfClass.apply(x, layer),
    "an attribute of an object": lambda layer, x: OfObject.apply(x, layer),
    "an attribute of a layer, behind a decorator": lambda layer, x: OfLayer.apply(x, layer),
    "a custom_op": lambda layer, x: same(x),
    "a hook of what forward computes": hooked,
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_a_backward_reads_is_followed(between, monkeypatch, exports):
    pair = Pair(Layers(between), optimizer="SGD with momentum")
    pair.steps(2)
    for value in (3.0, 1.0, 3.0):
        change(monkeypatch, pair, value)
        pair.steps(2)
    assert len(exports) == 2


class Scales:
    """A hook that is an object."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, *values):
        return values[-1] * self.factor


SCALES = Scales()

HOOKS = {
    "of a parameter": lambda module: module.first.weight.register_hook(of_a_hook),
    "of a parameter, that reads a layer": lambda module: module.first.weight.register_hook(
        lambda g: g * module.strength
    ),
    "of a parameter, an object": lambda module: module.first.weight.register_hook(SCALES),
    "of a layer, by an object": lambda module: module.first.register_forward_hook(
        lambda layer, of_inputs, result: SCALES(result)
    ),
    "of a layer, an object": lambda module: module.first.register_forward_hook(SCALES),
    "of a layer": lambda module: module.second.register_full_backward_hook(lambda layer, of_inputs, _: (scaled(of_inputs[0]),)),
    "of a layer, before its backward": lambda module: module.second.register_full_backward_pre_hook(
        lambda layer, of_outputs: (scaled(of_outputs[0]),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_what_a_hook_reads_is_followed(register, monkeypatch, exports):
    pair = Pair(Layers(lambda layer, x: x.tanh()), optimizer="SGD with momentum")
    pair.change(register)
    pair.steps(2)
    for value in (3.0, 1.0, 3.0):
        change(monkeypatch, pair, value)
        pair.steps(2)
    assert len(exports) == 2


def test_what_neither_reads_costs_no_export(monkeypatch, exports):
    pair = Pair(Layers(lambda layer, x: x.tanh()), optimizer="SGD with momentum")
    for value in (1.0, 3.0):
        change(monkeypatch, pair, value)
        pair.steps(1)
    assert len(exports) == 1
