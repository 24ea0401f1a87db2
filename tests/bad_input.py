"""What the tests of bad input share: a small trainer, errors by their texts, and whether its state is as before."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, ORTTrainer

RATE = IODescription("Learning_Rate", [1], torch.float32)
X = IODescription("x", ["batch", 4], torch.float32)
LABEL = IODescription("label", ["batch", 2], torch.float32)
LOSS, OUTPUT = IODescription("loss", [], torch.float32), IODescription("output", ["batch", 2], torch.float32)
WEIGHTS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def describe(inputs=(X, LABEL), outputs=(LOSS, OUTPUT)) -> ModelDescription:
    return ModelDescription(list(inputs), list(outputs))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def make(
    model=None,
    loss_fn=nn.functional.mse_loss,
    desc=None,
    name="AdamOptimizer",
    attributes=None,
    rate=RATE,
    device="cpu",
    **options,
):
    model, desc = net() if model is None else model, describe() if desc is None else desc
    return ORTTrainer(model, loss_fn, desc, name, attributes, rate, device, **options)


def batch(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


x, y = batch()


def raises(error: type, text: str):
    """`text` is literal, but for ... which stands for anything."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, text.split("..."))))


def snapshot(trainer) -> dict:
    return {"current_step": trainer.current_step, "global_step": trainer.global_step_} | trainer.state_dict()


def assert_untouched(trainer, before: dict) -> None:
    now = snapshot(trainer)
    assert now.keys() == before.keys()
    assert not [name for name in now if not np.array_equal(now[name], before[name])]


def cases(table: dict):
    return pytest.mark.parametrize("case", table.values(), ids=table)
