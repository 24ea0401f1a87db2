"""A model of which each test says by what its loss is multiplied, and batches whose sum every other one has below 0."""

from __future__ import annotations

import copy

import torch
from in_step import check_equal, step
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE = 0.05


class Said(nn.Module):
    """loss of a layer by `factor(x)`."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 2), factor

    def forward(self, x):
        return self.layer(x).square().mean() * self.factor(x)


def engine_of(module):
    x = IODescription("x", ["n", 3], module.layer.weight.dtype)
    description = ModelDescription([x], [IODescription("loss", [])])
    return Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())


def batch(number, rows=4):
    dice = torch.Generator().manual_seed(number)
    return {"x": torch.rand(rows, 3, generator=dice) * (-1) ** number}


def train(factor, batches):
    """Compare each step with PyTorch's; how many ways there are at the end."""
    torch.manual_seed(0)
    ours = Said(factor).to(batches[0]["x"].dtype)
    twin, engine = copy.deepcopy(ours), engine_of(ours)
    for feeds in batches:
        step(engine, twin, feeds, RATE)
    check_equal(ours, twin)
    return len(engine._ways.known)
