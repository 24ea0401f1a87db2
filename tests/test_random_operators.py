"""Random numbers besides dropout: drawn anew at each step, never shared, constants for the gradient."""

from __future__ import annotations

import logging

import torch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription


class TwoDraws(nn.Module):
    """loss = mean((a - b)^2) w over two independent draws; d loss / d w is its factor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        scaled = x * self.w
        a, b = torch.randn_like(scaled), torch.randn_like(scaled)
        return ((a - b) ** 2).mean() * self.w.sum(), a, b


def test_two_equal_draws_stay_two_and_differ_from_step_to_step(caplog):
    outputs = [IODescription("loss", []), IODescription("a", ["batch", 50]), IODescription("b", ["batch", 50])]
    description = ModelDescription([IODescription("x", ["batch", 50], torch.float32)], outputs)
    module = TwoDraws()
    trainer = make(module, loss_fn=None, desc=description)
    with caplog.at_level(logging.WARNING):
        loss, a, b = trainer.train_step(torch.zeros(40, 50), 0.01)
    assert "draws random numbers besides dropout" in caplog.text
    factor = ((a - b) ** 2).mean()  # about 2
    assert 1.7 < factor < 2.3
    torch.testing.assert_close(loss, factor)
    torch.testing.assert_close(module.w.detach(), 1 - 0.01 * factor.reshape(1))
    assert not torch.equal(a, trainer.train_step(torch.zeros(40, 50), 0.01)[1])
