"""Methods that are replaced between two steps: in a class, by a class, in a class between. The steps behind it run the new ones."""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import sys

import pytest
import torch
from pairs import Pair
from small import batch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act, self.head, self.helper = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), Helper()

    def forward(self, x):
        return self.act(self.layer(x))

    def squashed(self, y):
        return torch.tanh(y)

    @property
    def gain(self):
        return 2.0

    @staticmethod
    def shifted(y):
        return y + 1


class Net(Base):
    def forward(self, x):
        y = self.shifted(self.squashed(super().forward(x))) * self.gain
        return Halved.apply(times(self.helper(self.head(y))))


class Other(Net):
    def forward(self, x):
        return 3 * super().forward(x)


class Helper:
    """An object that is no layer."""

    def __call__(self, y):
        return self.scaled(y)

    def scaled(self, y):
        return y * 0.7


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 0.5


def times(y, factor=1.5):
    return y * factor


def doubled(module, x):
    return module.head(2 * module.act(module.layer(x)))


def sine(module, y):
    return torch.sin(y)


def unchanged_but_for_its_line(module, y):
    return torch.tanh(y)


CHANGES = {
    "forward": lambda m, patch: patch.setattr(Net, "forward", doubled),
    "forward of a class below": lambda m, patch: patch.setattr(Base, "forward", lambda m, x: torch.sin(m.layer(x))),
    "the code of forward": lambda m, patch: patch.setattr(Base.forward, "__code__", (lambda m, x: m.layer(x)).__code__),
    "the class": lambda m, patch: setattr(m, "__class__", Other),
    "the class of a layer of torch's": lambda m, patch: setattr(m.act, "__class__", nn.Tanh),
    "forward of a class of torch's": lambda m, patch: patch.setattr(nn.ReLU, "forward", sine),
    "a method": lambda m, patch: patch.setattr(Base, "squashed", sine),
    "a method in a class above": lambda m, patch: patch.setattr(Net, "squashed", sine, raising=False),
    "a property": lambda m, patch: patch.setattr(Base, "gain", property(lambda m: 5.0)),
    "a number in the place of a property": lambda m, patch: patch.setattr(Net, "gain", 4.0),
    "a static method": lambda m, patch: patch.setattr(Base, "shifted", staticmethod(lambda y: y - 3)),
    "a method of an object": lambda m, patch: patch.setattr(Helper, "scaled", lambda m, y: 3 * y),
    "the call of an object": lambda m, patch: patch.setattr(Helper, "__call__", lambda m, y: 4 * y),
    "the backward of a Function": lambda m, patch: patch.setattr(Halved, "backward", staticmethod(lambda ctx, dy: dy)),
    "the code of a function": lambda m, patch: patch.setattr(times, "__code__", (lambda y, factor: -y).__code__),
    "the defaults of a function": lambda m, patch: patch.setattr(times, "__defaults__", (3.0,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_in_a_class_is_followed(name, monkeypatch, exports):
    pair = Pair(Net(), optimizer="SGD with momentum")
    pair.steps(2)
    pair.change(lambda module: CHANGES[name](module, monkeypatch))
    pair.steps(2)
    assert len(exports) == 2
    x, y = batch(5)
    pair.reference.eval()
    found = pair.engine.eval_step({"x": x, "label": y})[1]
    torch.testing.assert_close(found, pair.reference(x).detach(), rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def by_c():
    with cProfile.Profile() as profiler:
        yield (names := set())
    names |= {function for _, _, function in pstats.Stats(profiler).stats}


@contextlib.contextmanager
def by_python():
    before, names = sys.getprofile(), set()
    sys.setprofile(lambda frame, *_: names.add(frame.f_code.co_name))
    try:
        yield names
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("profiled", [by_c, by_python])
@pytest.mark.parametrize("name", ["a property", "a method of an object", "the code of a function"])
def test_a_first_step_that_somebody_profiles_sees_as_much(name, profiled, monkeypatch):
    """There is one place for who looks on, and it is back to theirs behind the export."""
    pair = Pair(Net(), optimizer="SGD with momentum")
    with profiled() as names:
        pair.steps(1)
        squared(2.0)
    assert "squared" in names
    pair.change(lambda module: CHANGES[name](module, monkeypatch))
    pair.steps(2)


def squared(x):
    return x * x


def test_a_loss_is_followed_too(monkeypatch):
    def loss(scores, label):
        return nn.functional.cross_entropy(scores, label)

    pair = Pair(Net(), loss)
    pair.reference_loss = loss  # not a copy
    pair.steps(2)
    loss.__code__ = (lambda scores, label: 3 * nn.functional.cross_entropy(scores, label)).__code__
    pair.steps(2)


def test_a_class_whose_text_is_run_once_more_changes_nothing_until_it_says_something_else(monkeypatch, exports):
    """As a notebook that reloads what was edited does it."""
    pair = Pair(Net(), optimizer="SGD with momentum")
    pair.steps(1)
    for change in (unchanged_but_for_its_line, unchanged_but_for_its_line, sine):
        monkeypatch.setattr(Base.squashed, "__code__", change.__code__)
        pair.steps(2)
    assert len(exports) == 3


class Squashed(nn.Sequential):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def other_function(module):
    for node in module.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.sin
    module.recompile()


def test_the_code_that_a_graph_module_is_given_anew_is_followed():
    pair = Pair(torch.fx.symbolic_trace(Squashed(nn.Linear(4, 3))))
    pair.steps(2)
    pair.change(other_function)
    pair.steps(2)


def test_what_forward_does_not_run_costs_nothing(monkeypatch, exports):
    pair = Pair(Net())
    pair.steps(1)
    monkeypatch.setattr(Net, "plot", sine, raising=False)
    monkeypatch.setattr(Base, "extra_repr", lambda module: "", raising=False)
    monkeypatch.setattr(nn.Sigmoid, "forward", sine)  # of a layer that it has not
    pair.steps(1)
    assert len(exports) == 1
