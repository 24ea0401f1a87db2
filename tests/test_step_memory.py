"""What the session of a step lets ONNX Runtime plan of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer import phase


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.linear = nn.Conv2d(16, 16, 3), nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(self.image(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("module", "shape", "planned"),
    [(Images, (8, 16, 16, 16), False), (lambda: nn.Linear(6, 4), (8, 6), True)],
    ids=["images", "rows"],
)
def test_the_reuse_of_buffers_is_planned_where_there_are_no_images(module, shape, planned, monkeypatch):
    """What is planned holds what is dead in the forward pass for the backward pass (`docs/performance.md`)."""
    found, options_of = [], phase.options_of
    monkeypatch.setattr(phase, "options_of", lambda *args: found.append(options_of(*args)) or found[-1])
    module = module()
    trainer = orttrainer.trainer(module, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1))
    trainer.step(torch.randn(shape), torch.randn(8, 4))
    assert [options.enable_mem_reuse for options in found] == [planned]
