"""Buffers that take the shape of each batch, and hold nothing that a later call reads."""

from __future__ import annotations

import copy

import pytest
import torch
from fidelity import RATE, Loss, described, vectors
from small import make
from torch import nn

from orttrainer.errors import UnsupportedModelError


class Spiking(nn.Module):
    """Neurons that leak and fire, over a few times, with their charge in a buffer; `begin(self, x)` is called first."""

    def __init__(self, begin):
        super().__init__()
        self.linear, self.begin = nn.Linear(6, 6), begin
        self.register_buffer("charge", torch.zeros(0))

    def forward(self, x):
        self.begin(self, x)
        total = 0
        for _ in range(3):
            if self.charge.shape != x.shape:
                self.charge = torch.zeros_like(x)
            self.charge = 0.9 * self.charge + self.linear(x)
            total = total + torch.sigmoid(5 * (self.charge - 1))
        return total


def empty(self, x):
    self.charge = torch.zeros(0)


def zero(self, x):
    self.charge = torch.zeros_like(x)


def repeated(self, x):
    """One number in the memory of all."""
    self.charge = torch.zeros(1, 1).expand_as(x)


@pytest.mark.parametrize(
    "begin", [empty, zero, repeated], ids=["made in the call", "given the batch's shape", "repeated"]
)
def test_what_no_later_call_reads_is_not_kept(begin, caplog):
    torch.manual_seed(0)
    module = Loss(Spiking(begin))
    ours = copy.deepcopy(module)
    trainer = make(ours, loss_fn=None, desc=described(vectors(0)))
    for step in range(3):  # each of another size
        loss, _ = module(*vectors(step))
        torch.testing.assert_close(trainer.train_step(*vectors(step), RATE)[0], loss.detach(), rtol=1e-5, atol=1e-6)
        module.zero_grad()
        loss.backward()
        for parameter in module.parameters():
            parameter.data.sub_(RATE * parameter.grad)
    torch.testing.assert_close(ours.layer.linear.weight, module.layer.linear.weight, rtol=1e-4, atol=1e-6)
    assert ours.layer.charge.shape == (0,)
    assert "'layer.charge'" in caplog.text


def goes_on(self, x):
    pass


def grows(self, x):
    self.charge = torch.cat([self.charge.reshape(-1, 6)[-2 * len(x) :], x])[-len(x) :] + self.charge.sum()


@pytest.mark.parametrize("begin", [goes_on, grows])
def test_what_a_later_call_reads_is_refused(begin):
    module = Loss(Spiking(begin))
    with pytest.raises(
        UnsupportedModelError, match=r"the shape of 'layer.charge' from \[0\] to \[8, 6\].* run one batch"
    ):
        make(module, loss_fn=None, desc=described(vectors(0))).train_step(*vectors(0), RATE)
    assert module.layer.charge.shape == (0,)
