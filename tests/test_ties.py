"""Where topk chooses among equal values PyTorch leaves open which it takes, and ONNX takes the first ones."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.errors import ExportMismatchError

WAY_OUT = r"torch\.sort\(x, stable=True, dim=dim, descending=True\)"


class Experts(nn.Module):
    """Four experts of which each row is sent to two; rows of zeros are sent to any."""

    def __init__(self, start: float = 1.0):
        super().__init__()
        self.route, self.experts = nn.Linear(5, 4, bias=False), nn.Parameter(torch.randn(4, 5, 3))
        self.bias = nn.Parameter(torch.randn(4, 3))
        with torch.no_grad():
            self.route.weight.mul_(start)

    def chosen(self, scores):
        return scores.topk(2, dim=-1)

    def forward(self, x):
        weights, places = self.chosen(self.route(x).softmax(-1))
        rows = torch.einsum("bi,bkij->bkj", x, self.experts[places]) + self.bias[places]
        return (weights.unsqueeze(-1) * rows).sum(1)


class InOrder(Experts):
    def chosen(self, scores):
        values, places = torch.sort(scores, stable=True, dim=-1, descending=True)
        return values[:, :2], places[:, :2]


def of_rows(output, label):
    """The loss of the rows that are no padding, whose label is not 0."""
    return (((output - label) ** 2).mean(-1) * (label[:, 0] != 0)).sum()


def batch(rows: int, padded: int):
    generator = torch.Generator().manual_seed(rows)
    x, label = torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)
    return x * (torch.arange(rows) < rows - padded)[:, None], label * (torch.arange(rows) < rows - padded)[:, None]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def assert_trains_as_in_pytorch(model, batches):
    """Losses and weights; returns the trainer."""
    expected, ours = model, copy.deepcopy(model)
    optimizer, trainer = sgd(expected), orttrainer.trainer(ours, of_rows, sgd(ours))
    for x, label in batches:
        optimizer.zero_grad()
        loss = of_rows(expected(x), label)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.step(x, label)[0], loss.detach(), rtol=1e-5, atol=1e-6)
    for found, wanted in zip(ours.parameters(), expected.parameters()):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    return trainer


def test_ties_in_padding_that_no_loss_sees_train_and_are_told_of(caplog):
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, "orttrainer"):
        assert_trains_as_in_pytorch(Experts(), [batch(6, 2), batch(6, 2), batch(4, 1), batch(6, 3)])
    (told,) = [record.getMessage() for record in caplog.records if "equal values" in record.getMessage()]
    assert "test_ties.py" in told and "'output'" in told and "loss" in told


def test_ties_that_the_loss_sees_are_refused_with_a_way_out():
    model = Experts(start=0.0)
    with pytest.raises(ExportMismatchError, match=rf"equal values \(topk at .*test_ties.py:.*'loss'.*{WAY_OUT}") as e:
        orttrainer.trainer(model, of_rows, sgd(model)).step(*batch(6, 0))
    assert "report" not in str(e.value)


def test_the_way_out_of_ties_trains_as_in_pytorch(caplog):
    torch.manual_seed(0)
    assert_trains_as_in_pytorch(InOrder(start=0.0), [batch(6, 2), batch(6, 0), batch(4, 1), batch(6, 3)])
    assert not [record for record in caplog.records if "equal values" in record.getMessage()]
