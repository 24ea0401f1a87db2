"""Modules of float64 train in it: Python's numbers in forward are not rounded to float32 on the way."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from fidelity import described
from small import make
from torch import nn

import orttrainer
from orttrainer.errors import ExecutionError

FUNCTIONS = {
    "product": lambda x: x * 0.1,
    "sum": lambda x: x + 0.1,
    "difference": lambda x: 0.1 - x,
    "quotient": lambda x: x / math.pi,
    "power": lambda x: x**0.1,
    "clamped": lambda x: x.clamp(0.3, 0.7),
    "chosen": lambda x: torch.where(x > 0.5, x, 0.1),
    "masked": lambda x: x.masked_fill(x > 0.5, 0.1),
    "full": lambda x: x * torch.full((2,), 0.1, dtype=x.dtype),
    "like": lambda x: x * torch.full_like(x, 0.1) + x.new_full((2,), 0.3),
    "huber": lambda x: F.huber_loss(x, 1 - x, delta=0.1, reduction="none"),
    "smoothed": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), label_smoothing=0.1, reduction="none"),
    "normalized": lambda x: F.normalize(x, eps=0.1),
}


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterDict({name: torch.zeros(3, 2, dtype=torch.float64) for name in FUNCTIONS})

    def forward(self, x):
        each = {name: function(x + self.shifts[name]) for name, function in FUNCTIONS.items()}
        total = sum((y + 1).square().sum() for y in each.values())
        return total, torch.cat([y.flatten() for y in each.values()])


def test_numbers_of_pythons_are_not_rounded_to_float32():
    x = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module, ours = Double(), Double()
    loss, values = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=described([x])).train_step(x, 1.0)
    torch.testing.assert_close(found[1], values.detach(), rtol=1e-13, atol=1e-14)
    for name, shift in ours.shifts.items():
        torch.testing.assert_close(
            shift, -module.shifts[name].grad, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_operator_that_the_runtime_has_in_float32_only_is_named():
    class Smooth(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            y = F.gelu(self.linear(x))
            return y.square().mean(), y

    x = torch.ones(2, 3, dtype=torch.float64)
    module = Smooth()
    with pytest.raises(ExecutionError, match=r"an implementation for Erf.* by model\.float\(\) where it is of float64"):
        make(module, loss_fn=None, desc=described([x])).train_step(x, 0.1)
    make(module.float(), loss_fn=None, desc=described([x.float()])).train_step(x.float(), 0.1)


class Recurrent(nn.Module):
    def __init__(self, kind, options, packed):
        super().__init__()
        self.layer, self.packed = kind(6, 3, **options), packed
        self.head = nn.Linear(self.layer.all_weights[-1][1].shape[1] * (1 + self.layer.bidirectional), 2)

    def forward(self, x, lengths):
        x = x.transpose(0, 1)
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, last = self.layer(x)
        y = nn.utils.rnn.pad_packed_sequence(y)[0] if self.packed else y
        return self.head(y).mean(0) + sum(state.sum() for state in (last if isinstance(last, tuple) else [last]))


RECURRENT = {  # layer, its options, whether its batches are packed
    "LSTM": (nn.LSTM, {}, False),
    "two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, False),
    "projected": (nn.LSTM, {"proj_size": 2}, False),
    "packed": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, True),
    "GRU": (nn.GRU, {"bidirectional": True}, False),
    "packed GRU": (nn.GRU, {}, True),
    "RNN": (nn.RNN, {"nonlinearity": "relu", "bias": False}, False),
}


@pytest.mark.parametrize("kind, options, packed", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_that_the_runtime_has_in_float32_only_train_as_in_pytorch(kind, options, packed):
    torch.manual_seed(0)
    model = Recurrent(kind, options, packed).double()
    reference = copy.deepcopy(model)
    # A rate that float32, in which it is fed, has exactly.
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=2**-7) for m in (model, reference))
    trainer = orttrainer.trainer(model, F.mse_loss, optimizer)
    for batch in (4, 4, 3):
        x, y = torch.randn(batch, 5, 6, dtype=torch.float64), torch.randn(batch, 2, dtype=torch.float64)
        lengths = torch.tensor([5, 2, 4, 3][:batch])
        right = F.mse_loss(reference(x, lengths), y)
        torch.testing.assert_close(trainer.eval_step(x, lengths, y)[0], right.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(trainer.step(x, lengths, y)[0], right.detach(), rtol=1e-12, atol=0)
        expected.zero_grad()
        right.backward()
        expected.step()
    for mine, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
