"""Random numbers that the backward of a `torch.autograd.Function` draws for itself, other ones in each step."""

from __future__ import annotations

import copy

import pytest
import torch
from fidelity import vectors
from torch import nn
from torch.autograd import Function

import orttrainer
from orttrainer.errors import UnsupportedModelError


class Shaken(Function):
    """Shake-Shake regularization: a mean of two by random weights, forward and backward by others."""

    @staticmethod
    def forward(ctx, a, b):
        weight = torch.rand(len(a), 1)
        return weight * a + (1 - weight) * b

    @staticmethod
    def backward(ctx, dy):
        weight = torch.rand(len(dy), 1)
        return weight * dy, (1 - weight) * dy


class Dropped(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return nn.functional.dropout(dy, 0.5)


class Branches(nn.Module):
    def __init__(self, join):
        super().__init__()
        self.a, self.b, self.join = nn.Linear(6, 6), nn.Linear(6, 6), join

    def forward(self, x):
        return self.join(self.a(x), self.b(x))


def test_a_backward_draws_its_own_numbers():
    """Those of each step are found again: the gradient of a bias is their sum over the rows of dy, of which there are few."""
    torch.manual_seed(0)
    module, x, label = Branches(Shaken.apply), torch.randn(4, 6), torch.randn(4, 6)
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=1.0))
    before, drawn = copy.deepcopy(module.state_dict()), []
    for _ in range(40):
        _, y = trainer.step(x, label)
        dy = 2 * (y - label) / y.numel()
        of_a, of_b = (before[f"{name}.bias"] - getattr(module, name).bias.detach() for name in "ab")
        torch.testing.assert_close(of_a + of_b, dy.sum(0))
        weights = torch.linalg.lstsq(dy.T, of_a.unsqueeze(1)).solution
        torch.testing.assert_close(dy.T @ weights, of_a.unsqueeze(1), rtol=1e-3, atol=1e-5)
        shown = (y - module_of(before, "b", x)) / (module_of(before, "a", x) - module_of(before, "b", x))
        assert not torch.allclose(weights, shown[:, :1], atol=1e-2)  # which forward drew
        drawn.append(weights)
        module.load_state_dict(before)
    drawn = torch.cat(drawn)
    assert -1e-3 < drawn.min() < 0.1 and 0.9 < drawn.max() < 1.001
    assert abs(drawn.mean() - 0.5) < 0.1 and len(drawn.round(decimals=4).unique()) > 150


def module_of(state, name, x):
    return nn.functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def test_a_dropout_in_a_backward_is_refused():
    module = Branches(lambda a, b: Dropped.apply(a) + b)
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=1.0))
    with pytest.raises(UnsupportedModelError, match=r"the backward.*calls a dropout"):
        trainer.step(*vectors(0), *vectors(0))
