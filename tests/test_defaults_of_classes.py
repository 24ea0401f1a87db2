"""Attributes that an object has from its class, or not at all where forward asks by `getattr`: one set between two steps is followed."""

from __future__ import annotations

import argparse

import pytest
import torch
from pairs import Pair
from torch import nn


class Config:
    scale = 1.0

    def turned(self, y):
        return y


class Narrow(Config):
    pass


class Net(nn.Module):
    """Of a configuration that reads as it likes."""

    def __init__(self, config, ask):
        super().__init__()
        self.layer, self.config, self.ask = nn.Linear(4, 3), config, ask

    def forward(self, x):
        y = self.layer(x)
        if self.ask == "getattr":
            return y * getattr(self.config, "gain", 1.0)
        if self.ask == "hasattr":
            return torch.tanh(y) if hasattr(self.config, "squash") else y
        return self.config.turned(y) if self.ask == "method" else y * self.config.scale


CASES = {
    "of the object": (Narrow, "scale", lambda config: setattr(config, "scale", 2.0)),
    "of its class": (Narrow, "scale", lambda config: setattr(Narrow, "scale", 2.0)),
    "of a class above": (Narrow, "scale", lambda config: setattr(Config, "scale", 2.0)),
    "a class for an object": (lambda: Narrow, "scale", lambda config: setattr(Config, "scale", 2.0)),
    "a method of the object": (Narrow, "method", lambda config: setattr(config, "turned", torch.tanh)),
    "a default of getattr": (argparse.Namespace, "getattr", lambda config: setattr(config, "gain", 2.0)),
    "what hasattr asks for": (Narrow, "hasattr", lambda config: setattr(config, "squash", None)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_attribute_that_the_object_had_not_is_followed(case, exports, monkeypatch):
    make, ask, change = CASES[case]
    monkeypatch.setattr(Config, "scale", 1.0)
    try:
        pair = Pair(Net(make(), ask), optimizer="SGD with momentum")
        pair.steps(2)
        pair.change(lambda module: change(module.config))
        pair.steps(2)
        pair.change(lambda module: setattr(module.config, "unread", 1))
        pair.steps(1)
    finally:
        for name in ("scale", "unread"):
            if name in vars(Narrow):
                delattr(Narrow, name)
    assert len(exports) == 2
