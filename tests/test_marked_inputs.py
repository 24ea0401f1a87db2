"""Inputs that the caller marked, `x.requires_grad_()`, as physics-informed networks and forces do, are so in forward and loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer import IODescription, ModelDescription
from orttrainer.errors import UnsupportedModelError


class Forces(nn.Module):
    """Minus the derivatives of an energy by the places; another one where there are four and more."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def forward(self, places, charges):
        energy = (self.energy(places).squeeze(-1) * charges).sum(-1)
        if places.shape[1] >= 4:
            energy = energy.square()
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -forces


def of_both(prediction, label):
    return F.mse_loss(prediction[0], label[0]) + F.mse_loss(prediction[1], label[1])


def batch(rows, places, dice):
    x, charges = torch.randn(rows, places, 3, generator=dice), torch.rand(rows, places, generator=dice)
    return x.requires_grad_(), charges, (torch.rand(rows, generator=dice), torch.randn(rows, places, 3, generator=dice))


def check(module, twin):
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_each_batch_trains_as_in_pytorch():
    torch.manual_seed(0)
    module, dice = Forces(), torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
    trainer = orttrainer.trainer(module, of_both, torch.optim.SGD(module.parameters(), 0.05, momentum=0.9))
    for rows, places in ((5, 3), (2, 3), (3, 5)):
        *inputs, label = batch(rows, places, dice)
        loss, prediction = trainer.step(*inputs, label)
        optimizer.zero_grad()
        expected = twin(*inputs)
        of_both(expected, label).backward()
        optimizer.step()
        torch.testing.assert_close(loss, of_both(expected, label).detach())
        torch.testing.assert_close(prediction[1], expected[1].detach())
        assert inputs[0].requires_grad
    check(module, twin)
    *inputs, label = batch(2, 6, dice)
    torch.testing.assert_close(trainer.eval_step(*inputs, label)[0], of_both(module(*inputs), label).detach())


def residual(u, x):
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope - u).square().mean()


def test_a_loss_may_ask_by_an_input_that_is_described_by_one_name():
    def loss(u, label):
        x, y = label
        return residual(u, x) + F.mse_loss(u, y)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(module)
    inputs = [IODescription("x", ["n", 2]), IODescription("y", ["n", 1])]
    description = ModelDescription(inputs, [IODescription("loss", [])], arguments=("x",), label=("x", "y"))
    trainer = orttrainer.trainer(module, loss, torch.optim.SGD(module.parameters(), 0.1), model_desc=description)
    optimizer, dice = torch.optim.SGD(twin.parameters(), 0.1), torch.Generator().manual_seed(0)
    for rows in (5, 3):
        x, y = torch.randn(rows, 2, generator=dice).requires_grad_(), torch.randn(rows, 1, generator=dice)
        optimizer.zero_grad()
        expected = loss(twin(x), (x, y))
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, (x, y))[0], expected.detach())
    check(module, twin)


def test_one_tensor_in_two_places_is_refused_where_it_requires_grad():
    module = nn.Linear(2, 1)
    trainer = orttrainer.trainer(
        module, lambda u, label: residual(u, label[0]), torch.optim.SGD(module.parameters(), 0.1)
    )
    x = torch.randn(5, 2).requires_grad_()
    with pytest.raises(
        UnsupportedModelError, match=r"'input' and 'label_0' are one tensor that requires grad, .* one name"
    ):
        trainer.step(x, (x, torch.rand(5, 1)))
