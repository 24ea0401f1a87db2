"""What forward writes to what it has computed, where autograd does not see it, trains as in PyTorch; found by random programs."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from torch import nn

WRITES = {  # y of [rows, 6], and u of [3, 6], which are read afterwards
    "a detached copy": lambda y, u: y.detach().copy_(u[0]),
    "a row of what is detached": lambda y, u: y.detach().__setitem__(0, u[0]),
    "the data of a view": lambda y, u: y.view(-1).data.mul_(1.1),
    "a view of the data of a view": lambda y, u: y.view(-1).data.view(-1, 2)[:, 0].mul_(1.1),
    "the data of data": lambda y, u: y.data.data.tanh_(),
    "one of several views": lambda y, u: torch.relu_(u.unbind(0)[1]),
    "pieces": lambda y, u: [part.mul_(0.7) for part in y.split(2, dim=1)[1:]],
    "one after the other": lambda y, u: [row.neg_() for row in u],
    "detached, then something computed": lambda y, u: u.detach().neg_().sum() * u.repeat_interleave(2, 0),
}


class Writes(nn.Module):
    def __init__(self, write, enabled):
        super().__init__()
        self.linear, self.u, self.write, self.enabled = nn.Linear(4, 6), nn.Parameter(torch.randn(3, 6)), write, enabled

    def forward(self, x):
        y, u = self.linear(x), self.u * 2
        with torch.set_grad_enabled(self.enabled):
            self.write(y, u)
        return (y * y.cos()).sum(0, keepdim=True) + u * u


def batch(step: int) -> list[torch.Tensor]:
    return [torch.randn(4 + step, 4, generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize(
    "name", usual(WRITES, "a row of what is detached", "the data of a view", "one of several views")
)
def test_writes_under_no_grad_train_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Writes(WRITES[name], False), batch, evaluates=False)


@pytest.mark.parametrize("name", ["the data of a view", pytest.param("the data of data", marks=pytest.mark.slow)])
def test_writes_to_data_train_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Writes(WRITES[name], True), batch, evaluates=False)
