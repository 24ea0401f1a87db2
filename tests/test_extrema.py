"""Extrema that tie train as in PyTorch, which gives the gradient of some to the first of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch
from marks import slow
from torch import nn

FUNCTIONS = {  # of [n, 6]: whole numbers, of which there are few
    "max": lambda x: x.max(1)[0],
    "max over the batch": lambda x: torch.max(x, dim=0, keepdim=True).values,
    "min": lambda x: torch.min(x, -1, keepdim=True).values,
    "amax": lambda x: x.amax(1),
    "a window over all of the batch": lambda x: F.max_pool1d(x.T[None], x.shape[0])[0].T,
    "cdist": lambda x: torch.cdist(x, x.detach()[:3].round(), float("inf")),
    "maxima where no gradient flows": lambda x: x * x.detach().max(1, keepdim=True)[0],
    "the last layer's places": lambda x: x.gather(1, x.max(1, keepdim=True)[1]),
}


class Rounded(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return self.function(y + (y.round() - y).detach())  # with the slope of y


@pytest.mark.parametrize("name", [name if name.startswith("max") else slow(name) for name in FUNCTIONS])
def test_extrema_that_tie_train_as_in_pytorch(name):
    def batch(step):
        return [torch.randn(8 + step, 6, generator=torch.Generator().manual_seed(step))]

    assert_trains_as_in_pytorch(lambda: Rounded(FUNCTIONS[name]), batch, evaluates=False)
