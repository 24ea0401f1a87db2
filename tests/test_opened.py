"""What `torch.nn.functional` makes of its arguments, or drops, where a TorchFunctionMode looks on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer

LOSSES = {
    "mean": lambda y, label: F.l1_loss(y, label, weight=label.abs()),
    "sum": lambda y, label: F.l1_loss(y, label, None, None, "sum", label.abs() + 1),
    "each": lambda y, label: (F.l1_loss(y, label, reduction="none", weight=label.abs()) * label).mean(),
    "alike": lambda y, label: F.l1_loss(y, label, weight=None),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("in_forward", [False, True])
def test_an_absolute_error_is_weighted(name, in_forward):
    """torch.nn.functional.l1_loss does not give its weight to a mode."""
    torch.manual_seed(0)
    model = Scored(LOSSES[name]) if in_forward else nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    trainer = orttrainer.trainer(model, None if in_forward else LOSSES[name], optimizers[0])
    for rows in (4, 3, 4):
        x, label = torch.randn(rows, 3), torch.randn(rows, 2)
        optimizers[1].zero_grad()
        expected = twin(x, label) if in_forward else LOSSES[name](twin(x), label)
        expected.backward()
        optimizers[1].step()
        loss, *_ = trainer.step((x, label)) if in_forward else trainer.step(x, label)
        torch.testing.assert_close(loss, expected.detach())
    for found, parameter in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(found, parameter)


class Scored(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(3, 2), loss

    def forward(self, x, label):
        return self.loss(self.linear(x), label)
