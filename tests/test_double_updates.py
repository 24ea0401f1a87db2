"""The update of float64 parameters is float64 throughout: rates, betas, norms and means over batches."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import orttrainer

OPTIMIZERS = {
    "SGD": lambda k: torch.optim.SGD(groups(k), 0.1, momentum=0.9, weight_decay=0.03),
    "Adam": lambda k: torch.optim.Adam(groups(k), 0.1, betas=(0.87, 0.93)),
    "AdamW": lambda k: torch.optim.AdamW(groups(k), 0.1, weight_decay=0.3),
}


def groups(module):
    return [{"params": [p], **({"lr": 0.07} if p.dim() < 2 else {})} for p in module.parameters()]


def pair(optimizer, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    reference = copy.deepcopy(module)
    ours, theirs = OPTIMIZERS[optimizer](module), OPTIMIZERS[optimizer](reference)
    return orttrainer.trainer(module, nn.functional.mse_loss, ours, **options), module, ours, reference, theirs


def batch(step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    return x, scale * torch.randn(5, 3, generator=generator, dtype=torch.float64)


def assert_parameters_close(module, reference):
    for own, expected in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rates_and_betas_are_not_rounded_to_float32(optimizer):
    trainer, module, ours, reference, theirs = pair(optimizer)
    for step in range(6):
        if step == 3:  # as schedulers do; betas that have changed are fed
            for group in itertools.chain(ours.param_groups, theirs.param_groups):
                group["lr"] *= 0.7
                group |= {"betas": (0.83, 0.91)} if "betas" in group else {"momentum": 0.83}
        trainer.step(*batch(step))
        theirs.zero_grad()
        nn.functional.mse_loss(reference(batch(step)[0]), batch(step)[1]).backward()
        theirs.step()
    assert_parameters_close(module, reference)


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # where norms are small, what PyTorch adds to them is much
def test_means_over_batches_are_clipped_as_clip_grad_norm_does(scale):
    trainer, module, _, reference, theirs = pair("SGD", max_grad_norm=0.1 * scale, gradient_accumulation_steps=3)
    for one in (module, reference):
        nn.init.zeros_(one[2].weight)
        nn.init.zeros_(one[2].bias)
    for step in range(9):
        x, y = batch(step, scale)
        trainer.step(x, y)
        (nn.functional.mse_loss(reference(x), y) / 3).backward()
        if step % 3 == 2:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1 * scale)
            torch.testing.assert_close(trainer.last_grad_norm, norm, rtol=1e-13, atol=0)
            theirs.step()
            theirs.zero_grad()
    assert_parameters_close(module, reference)


class Undefined(nn.Module):
    """The gradient of one weight is NaN, the loss is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.first * x).sum() + (self.second * 0 * x).sqrt().sum()


def test_a_norm_that_is_nan_makes_all_gradients_nan_as_clip_grad_norm_does():
    module = Undefined()
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1), max_grad_norm=1.0)
    reference = copy.deepcopy(module)
    trainer.step(torch.ones(3))
    reference(torch.ones(3)).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for own, expected in zip(module.parameters(), reference.parameters()):
        assert own.isnan().all() and expected.grad.isnan().all()
