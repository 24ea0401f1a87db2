"""`torch.arange` of numbers that are not whole: as many elements as in PyTorch, and as exact, for any batch size."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from torch import nn

SERIES = {
    "of a fixed size": lambda n: torch.arange(0, 26, 1.3),  # 26 / 1.3 is 20 in float64, more in float32
    "by batch size": lambda n: torch.arange(0, n, 1.3),
    "long": lambda n: torch.arange(0, n, 0.001),  # whose steps, added up in float32, drift by 1e-4
    "from a broken start": lambda n: torch.arange(0.1, 25.1),
    "to a broken end": lambda n: torch.arange(n + 0.5),
    "downwards": lambda n: torch.arange(n, 0, -0.7),
    "of float64": lambda n: torch.arange(0, n, 0.1, dtype=torch.float64),
    "of whole numbers as floats": lambda n: torch.arange(0.0, n, 2.0),
}


class Series(nn.Module):
    def __init__(self, series):
        super().__init__()
        self.series, self.linear = series, nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x).mean(0)
        series = self.series(x.shape[0])
        return torch.cat((series[:5].float() * y[0], series[-1:].float() * y[1], (len(series) * y[2]).reshape(1))) / 10


def rows(step: int):
    return [torch.randn(25 + step, 6, generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize("name", usual(SERIES, "of a fixed size", "by batch size", "long", "from a broken start"))
def test_series_of_broken_numbers_are_those_of_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Series(SERIES[name]), rows, evaluates=True)
