"""Dropout of a rate of 1, which ONNX's operator does not have: expected are PyTorch's outputs, losses and weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from torch import nn

import orttrainer

RATE = 0.1


def loss_of(y, factor):
    return (y.square() + y).mean() * factor.mean()


class Dropped(nn.Module):
    """What each of some functions leaves of h, by its training flag, in one axis; h is larger than 0."""

    def __init__(self, functions):
        super().__init__()
        self.linear, self.functions = nn.Linear(4, 6), functions

    def forward(self, x):
        h = self.linear(x).exp()
        return torch.stack([function(h, self.training) for function in self.functions])


class Layered(nn.Module):
    """A layer of several parts, between which all is dropped."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)[0]


def images(dropout, axes=2):
    return lambda h, trains: (
        dropout(h.view(-1, 6, *[1] * axes).expand(-1, 6, *[2] * axes), 1.0, trains).flatten(2).sum(2)
    )


def attention(h, trains):
    return F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=1.0 if trains else 0.0)[0]


FUNCTIONS = [
    lambda h, trains: F.dropout(h, 1.0, trains),
    lambda h, trains: F.dropout(h * 2, 1, trains, inplace=True),
    lambda h, trains: h * F.dropout(h.mean(), 1.0, trains),
    lambda h, trains: torch.native_dropout(h, 1.0, None if trains else False)[0],
    lambda h, trains: h * torch.native_dropout(h, 1.0, trains)[1],
    lambda h, trains: F.alpha_dropout(h, 1.0, trains),
    images(F.dropout1d, 1),
    images(F.dropout2d),
    images(F.dropout3d, 3),
    images(F.feature_alpha_dropout),
    attention,
]
MODELS = {
    "functions": lambda: Dropped(FUNCTIONS),
    "attention": lambda: Layered(nn.MultiheadAttention(4, 2, dropout=1.0)),
    "LSTM": lambda: Layered(nn.LSTM(4, 4, 2, dropout=1.0)),
    "GRU": lambda: Layered(nn.GRU(4, 4, 3, dropout=1.0, bidirectional=True)),
}


@pytest.mark.parametrize("name", ["functions", slow("attention"), "LSTM", slow("GRU")])
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_what_drops_everything_trains_and_evaluates_as_in_pytorch(name):
    torch.manual_seed(0)
    module = MODELS[name]()
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(m.parameters(), RATE, weight_decay=0.5) for m in (module, twin)]
    trainer = orttrainer.trainer(module, loss_of, optimizers[0])
    for rows in (3, 5):
        x = torch.randn(2, rows, 4) if name != "functions" else torch.randn(rows, 4)
        factor, expected = torch.rand(x.shape[-2]), twin(x)
        loss = loss_of(expected, factor)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(trainer.step(x, factor), (loss.detach(), expected.detach()))
    torch.testing.assert_close(module.state_dict(), twin.state_dict())
    twin.eval()
    torch.testing.assert_close(trainer.eval_step(x, factor)[1], twin(x).detach())


def test_a_rate_may_become_1_and_less_again():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    trainer = orttrainer.trainer(module, loss_of, torch.optim.SGD(module.parameters(), RATE))
    x = torch.randn(50, 4)
    for rate in (0.5, 1.0, 0.5, 1.0):
        module[1].p = rate
        before = module[0].weight.clone()
        kept = module[0](x).detach() / (1.0 - rate) if rate < 1.0 else torch.zeros(50, 4)
        _, y = trainer.step(x, torch.ones(50))
        torch.testing.assert_close(y, kept * (y != 0))
        assert (y == 0).any() and (y != 0).any() == (rate < 1.0)
        assert torch.equal(module[0].weight, before) == (rate == 1.0)
