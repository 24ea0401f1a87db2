"""Networks whose running statistics other networks' are made of, in forward, as those of a mean teacher or BYOL's target are."""

from __future__ import annotations

import copy

import pytest
import torch
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, vectors
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription

CHANGES = {
    "copied": lambda target, online: target.copy_(online),
    "averaged": lambda target, online: target.copy_(online) if online.dim() == 0 else target.lerp_(online, 0.4),
    "averaged by arithmetic": lambda target, online: (
        target.mul_(0.5).add_(online, alpha=0.5) if online.dim() else target
    ),
    "copied and doubled": lambda target, online: target.copy_(online * 2),
}


class Target(nn.Module):
    """The statistics of the target change before or after the online network has moved its own."""

    def __init__(self, change, first: bool, calls: int):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.change, self.first, self.calls = change, first, calls

    def forward(self, x):
        y = self.online(x) if self.first else 0.0
        with torch.no_grad():
            for target, online in zip(self.target.buffers(), self.online.buffers()):
                self.change(target, online)
            z = sum(self.target(x * (k + 1)) for k in range(self.calls))
        for k in range(self.first, self.calls):
            y = y + self.online(x * (k + 2))
        return y - z


CASES = [
    pytest.param(change, first, calls, id=f"{name}, {'after' if first else 'before'}, {calls}", marks=marks)
    for k, (name, change) in enumerate(CHANGES.items())
    for first in (False, True)
    for calls in (1, 2)
    for marks in [() if (first, calls) == (k // 2, k % 2 + 1) else pytest.mark.slow]
]


@pytest.mark.parametrize(("change", "first", "calls"), CASES)
def test_running_statistics_made_of_others_train_and_evaluate_as_in_pytorch(change, first, calls):
    assert_trains_as_in_pytorch(lambda: Target(change, first, calls), vectors, evaluates=True)


def test_running_statistics_made_of_others_evaluate_at_sizes_that_are_fixed():
    """Where the correction for the bias of a batch's variance is a constant."""
    module = Loss(Target(CHANGES["copied and doubled"], True, 2))
    trainer = make(
        module,
        loss_fn=None,
        desc=ModelDescription([IODescription("x", [8, 6])], [IODescription("loss", []), IODescription("y", [8, 6])]),
    )
    trainer.train_step(*vectors(0), RATE)
    expected = copy.deepcopy(module).eval()(*vectors(0))[1].detach()
    torch.testing.assert_close(trainer.eval_step(*vectors(0))[1], expected, rtol=1e-4, atol=1e-5)
