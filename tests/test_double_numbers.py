"""Numbers that Python takes of float64 tensors, and those of layers that a trace writes down, are not rounded to float32."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from exported import without_dynamo
from fidelity import RATE, Loss, described, vectors
from small import make
from torch import nn


def assert_trains_to_the_last_digits(module):
    """Three steps of SGD, with the losses, outputs, parameters and buffers of PyTorch."""
    ours, batch = copy.deepcopy(module), lambda step: [x.double() for x in vectors(step)]
    trainer = make(ours, loss_fn=None, desc=described(batch(0)))
    for step in range(3):
        found, expected = trainer.train_step(*batch(step), RATE), module(*batch(step))
        module.zero_grad()
        expected[0].backward()
        with torch.no_grad():
            for parameter in (p for p in module.parameters() if p.grad is not None):
                parameter.sub_(RATE * parameter.grad)
        torch.testing.assert_close(list(found), [y.detach() for y in expected], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dict(ours.state_dict()), dict(module.state_dict()), rtol=1e-12, atol=1e-13)


class Layer(nn.Module):
    """loss = mean(y^2) + mean(sin(y)), y = function(module, linear(x))."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.function = nn.Linear(6, 6), nn.BatchNorm1d(6), function
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("warmth", torch.tensor(1.0))

    def forward(self, x):
        self.steps += 1
        self.warmth *= 1.1
        y = self.function(self, self.linear(x))
        return y.square().mean() + y.sin().mean(), y


def of_numbers(m, y):
    warm = min(1.0, m.steps.item() / 3) + 0.5 * (1 + math.cos(math.pi * m.steps.item() / 10))
    y = y * warm + F.leaky_relu(y, m.warmth.item() / 7) / np.sqrt(m.steps.item())
    return torch.addmm(y, y, m.linear.weight, alpha=1 / m.warmth.item()) / max(y.detach().abs().max().item(), 1e-3)


def test_numbers_of_tensors():
    assert_trains_to_the_last_digits(Layer(of_numbers).double())


def test_a_number_beyond_float32_is_not_infinite():
    assert_trains_to_the_last_digits(Layer(lambda m, y: y * torch.where((y * 1e100).isinf(), 2.0, 3.0)).double())


def test_a_layer_of_two_names_beside_buffers_that_forward_changes():
    module = Layer(lambda m, y: F.leaky_relu(m.both(y), 0.1))
    module.both = nn.Sequential(module.norm, nn.Tanh(), module.norm)
    assert_trains_to_the_last_digits(module.double())


def test_a_tensor_made_of_a_size():
    assert_trains_to_the_last_digits(Layer(lambda m, y: y + y.new_full((2, len(y), 6), 1 / 3).cumsum(0)[1]).double())


def test_a_gradient_of_ones_that_are_float32():
    def slope(m, y):
        x = y.detach().requires_grad_()
        (found,) = torch.autograd.grad(m.linear(x).tanh(), x, torch.ones(y.shape[0], 6), create_graph=True)
        return y + found

    assert_trains_to_the_last_digits(Layer(slope).double())


def test_a_trace_to_torchscript(monkeypatch):
    without_dynamo(monkeypatch)
    module = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6, eps=1e-3), nn.LeakyReLU(0.1), nn.ELU(0.7), nn.LayerNorm(6)
    )
    assert_trains_to_the_last_digits(Loss(module).double())


BOUNDED = [
    lambda x: x.clamp(0.25, 0.5),
    lambda x: x.clamp(min=0.25),
    lambda x: torch.clip(x, max=0.5),
    lambda x: torch.clamp_min(x, 0.25),
    lambda x: x.relu().clamp(max=0.5),
]


def test_slopes_at_bounds():
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([-1.0, 0.0, 0.25, 0.375, 0.5, 2.0]))

        def forward(self, x):
            y = torch.stack([function(self.scale * x[:1]) for function in BOUNDED])
            return (y * torch.arange(1, 6)[:, None, None]).sum(), y

    ones = [torch.ones(2, 6, dtype=torch.float64)]
    module, ours = Bounded().double(), Bounded().double()
    make(ours, loss_fn=None, desc=described(ones)).train_step(*ones, 1.0)
    module(*ones)[0].backward()
    torch.testing.assert_close(ours.scale, module.scale - module.scale.grad, rtol=0, atol=1e-14)


def test_tensors_made_without_a_dtype_where_the_default_is_float64():
    def made(m, y):
        filled = torch.zeros(len(y), 6).index_add(0, torch.arange(len(y)), y) + torch.ones(len(y), 1) / 7
        return filled * torch.full((6,), 1 / 3) * torch.scalar_tensor(0.7)

    torch.set_default_dtype(torch.float64)
    try:
        assert_trains_to_the_last_digits(Layer(made))
    finally:
        torch.set_default_dtype(torch.float32)
