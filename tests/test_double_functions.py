"""Functions of float64 that are spelled out for an exporter have PyTorch's values and slopes, to the last digits."""

from __future__ import annotations

import pytest
import torch
from marks import usual
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription

FUNCTIONS = {  # and the ends of a range
    "erfinv": (torch.erfinv, -1 + 1e-9, 1 - 1e-9),
    "ndtri": (torch.special.ndtri, 1e-9, 1 - 1e-9),
    "log_ndtr": (torch.special.log_ndtr, -30, 7),
    "erfcx": (torch.special.erfcx, -4, 30),
    "lgamma": (torch.lgamma, -6.03, 40),
    "digamma": (torch.digamma, 0.03, 40),
    "atan2": (lambda x: torch.atan2(x, x.flip(0) / 3), -6, 7),
    "angle": (lambda x: torch.atan2(torch.full_like(x, 0.1), x), -6, 7),
}
SLOPES = {"digamma": 2e-9}  # torch's own trigamma is that exact


@pytest.mark.parametrize("name", usual(FUNCTIONS, *[*FUNCTIONS][::2]))
def test_spelled_out_functions_are_exact_in_float64(name):
    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(300, dtype=torch.float64))

        def forward(self, x):
            y = function(x + self.shift)
            return y.sum(), y

    function, low, high = FUNCTIONS[name]
    x, module, ours = torch.linspace(low, high, 300, dtype=torch.float64), Function(), Function()
    desc = ModelDescription(
        [IODescription("x", [300], torch.float64)], [IODescription("loss", []), IODescription("y", [300])]
    )
    loss, y = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=desc).train_step(x, 1.0)[1]
    torch.testing.assert_close(found, y.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ours.shift, -module.shift.grad, rtol=SLOPES.get(name, 1e-12), atol=1e-14)
