"""A model of which each test says what it decides by the values of tensors."""

from __future__ import annotations

import torch
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE = 0.1


class Decides(nn.Module):
    """loss of two heads, of which `decide(module, x, h)` says what becomes of them."""

    def __init__(self, decide):
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.limit = nn.Buffer(torch.zeros(()))
        self.decide = decide

    def forward(self, x):
        return self.decide(self, x, self.body(x).tanh()).square().mean()


def batch(step):
    """Every third has a negative mean."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) + (1 if step % 3 else -1)


def description():
    return ModelDescription([IODescription("x", ["n", 4])], [IODescription("loss", [])])


def engine_of(module, optimizer="SGDOptimizer", **settings):
    return Engine(module, None, description(), OptimizerChoice(optimizer, clip=False), Settings(**settings))
