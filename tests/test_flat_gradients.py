"""Parameters that the loss reaches in steps only have zeros for a gradient, as in PyTorch, and not none."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.errors import NoGradientWarning

STEPS = {
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round": torch.round,
    "round to digits": lambda w: torch.round(w, decimals=1),
    "sign": torch.sign,
    "sgn": lambda w: w.tanh().sgn(),
    "trunc": torch.trunc,
    "whole quotient": lambda w: torch.div(w, 0.3, rounding_mode="floor"),
    "quotient without its rest": lambda w: torch.div(w, 0.3, rounding_mode="trunc"),
}
NOTHING = {
    "compared": lambda w: (w > 0).float(),
    "detached": lambda w: w.detach().round(),
    "whole": lambda w: w.long().float(),
    "chosen by": lambda w: torch.where(w.round() > 0, 1.0, 2.0),
    "largest": lambda w: w.argmax().float(),
}


class Steps(nn.Module):
    """Weights of which the loss sees no slope, beside some of which it does."""

    def __init__(self, functions):
        super().__init__()
        torch.manual_seed(0)
        self.functions, self.linear = functions, nn.Linear(3, 3)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in functions)
        self.both = nn.Parameter(torch.randn(3))

    def forward(self, x):
        found = sum(function(w) for function, w in zip(self.functions, self.weights))
        return self.linear(x) * found + self.both * self.both.round()


def trained(functions, choose):
    model = Steps(functions)
    reference = copy.deepcopy(model)
    expected, loss = choose(reference.parameters()), nn.MSELoss()
    trainer = orttrainer.trainer(model, loss, choose(model.parameters()))
    for step in range(3):
        x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(step))
        expected.zero_grad()
        loss(reference(x), y).backward()
        expected.step()
        trainer.step(x, y)
    return model, reference


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("choose", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weight_decay_moves_what_the_loss_reaches_in_steps(choose):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoGradientWarning)
        model, reference = trained([*STEPS.values()], choose)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
    assert all(w.grad is not None for w in reference.weights)


@pytest.mark.parametrize("choose", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_has_no_gradient_stays_as_it_is(choose):
    with pytest.warns(NoGradientWarning, match=r"'weights\.0', .*'weights\.4' to the loss"):
        model, reference = trained([*NOTHING.values()], choose)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)
    assert all(w.grad is None for w in reference.weights)
