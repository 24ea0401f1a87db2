"""Programs that `exec` runs in a dict without `__name__`: their classes say that they are of `builtins`, or have no module at all."""

from __future__ import annotations

import pytest
import torch
from pairs import Pair
from small import batch, description

from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.errors import UnsupportedModelError

PROGRAM = """
import torch
from torch import nn

class Config:
    base = 1.0
    def __init__(self):
        self.scale = 1.0
    def turned(self, y):
        return y

class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, dy):
        return dy

config = Config()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        y = self.layer(x) + 0.1 * Rounded.apply(3 * self.layer(x))
        return config.turned(y) * config.scale * Config.base

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        Config.base += 1
        return self.layer(x) * Config.base
"""
# A statement gives a class the module of Python's own, `type` none.
CALLED = """
Config = type("Config", (), {"base": 1.0, "__init__": lambda self: setattr(self, "scale", 1.0), "turned": lambda self, y: y})
Rounded = type("Rounded", (torch.autograd.Function,), {name: staticmethod(vars(Rounded)[name].__func__) for name in ("forward", "backward")})
config = Config()
"""
PROGRAMS = pytest.mark.parametrize("program", [PROGRAM, PROGRAM + CALLED], ids=["stated", "called"])
CHANGES = "config.scale = 0.5", "Config.base = 0.25", "Config.turned = lambda self, y: torch.tanh(y)"


@PROGRAMS
def test_what_a_program_without_a_name_changes_is_followed(program):
    names = {}
    exec(program, names)
    pair = Pair(names["Net"](), optimizer="SGD with momentum")
    pair.steps(1)
    for change in CHANGES:
        exec(change, names)
        pair.steps(1)


@PROGRAMS
def test_a_count_of_a_program_without_a_name_is_refused_by_name(program):
    names = {}
    exec(program, names)
    x, y = batch(0)
    engine = Engine(
        names["Counts"](), torch.nn.CrossEntropyLoss(), description(), OptimizerChoice("SGDOptimizer"), Settings()
    )
    with pytest.raises(UnsupportedModelError, match=r"forward changes '\S*Config\.base' and computes with it"):
        engine.train_step({"x": x, "label": y}, 0.1)
