"""Hooks on gradients: of parameters and of what forward computes."""

from __future__ import annotations

import pytest
import torch
from exported import Model
from fidelity import RATE, assert_trains_as_in_pytorch, described, vectors
from small import make
from test_custom_gradients import layer
from torch import nn


def hooked(*hooks):
    def make_layer():
        made = layer(lambda m, x: m.linear(x).tanh() * m.bias)
        for hook in hooks:
            made.linear.weight.register_hook(hook)
        return made

    return make_layer


def rows_kept(gradient):
    gradient = gradient.clone()
    gradient[:2] = 0
    return gradient


def in_place(gradient):
    gradient.mul_(0.5)


HOOKS = {
    "scaled": [lambda g: 2 * g],
    "changed, but not in the first batch": [lambda g: torch.where(g.abs().max() > 0.25, g, 3 * g)],  # it has 0.28
    "rows": [rows_kept],
    "in place, and another": [in_place, lambda g: g / (1 + g.norm())],
    "of numbers": [lambda g: g * float(torch.tensor(3.0))],
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_parameter_trains_by_what_its_hooks_make_of_the_gradient(name):
    assert_trains_as_in_pytorch(hooked(*HOOKS[name]), vectors, evaluates=True)


def test_a_hook_on_a_recurrent_layer_and_on_a_tied_weight():
    def make_layer():
        made = Model(
            lambda m, x: m.first(m.rnn(m.second(m.first(x)).expand(3, -1, -1))[0][2]), first=nn.Linear(6, 6), second=nn.Linear(6, 6),
            rnn=nn.LSTM(6, 6),
        )  # fmt: skip
        made.second.weight = made.first.weight
        made.first.weight.register_hook(lambda g: g * 2)
        made.rnn.weight_hh_l0.register_hook(lambda g: -g)
        return made

    assert_trains_as_in_pytorch(make_layer, vectors, evaluates=True)


def test_what_forward_computes_may_have_a_hook():
    def call(m, x):
        h = m.linear(x)
        h.register_hook(lambda g: g / (g.norm() + 1e-3))
        return h.tanh()

    assert_trains_as_in_pytorch(lambda: layer(call), vectors, evaluates=False)


def test_a_hook_that_looks_on_leaves_nothing_of_the_trace_behind():
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(6, 6), None

        def keep(self, gradient):
            self.seen = gradient

        def forward(self, x):
            h = self.linear(x)
            h.register_hook(self.keep)
            return h.square().mean()

    module = Activations()
    description = described(vectors(0))
    description.outputs_ = description.outputs_[:1]
    trainer = make(module, loss_fn=None, desc=description)
    trainer.train_step(*vectors(0), RATE)
    assert module.seen is None or type(module.seen) is torch.Tensor
