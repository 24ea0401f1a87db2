"""What forward writes, unseen by autograd, to what it has computed changes values, and leaves gradients as they were."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import in_turn
from torch import nn


class Overwritten(nn.Linear):
    """Sigmoid and softmax of what `change` has left of a linear function, of which nothing but the values is another."""

    def __init__(self, change, grad):
        super().__init__(6, 6)
        self.change, self.grad = change, grad

    def forward(self, x):
        y = super().forward(x)
        with torch.set_grad_enabled(self.grad):
            y = self.change(y)
        return y.sigmoid() + y.softmax(-1)


def late(y):
    """The rows past the eighth, of which the first batch of `vectors` has none."""
    return (torch.arange(len(y)) > 7).unsqueeze(1)


def changed(change):
    """`change`, and its argument."""

    def of(y):
        change(y)
        return y

    return of


BY_DATA = {
    "data": changed(lambda y: y.data.clamp_(-0.5, 0.5)),
    "data by a mask": changed(lambda y: y.data.masked_fill_(late(y), -1.0)),
    "data by an infinity": changed(lambda y: y.data.masked_fill_(torch.eye(len(y), 6) > 0, -torch.inf)),
    "elements of data": changed(lambda y: y.data.__setitem__((slice(None), 0), 0.5)),
    "a view of data": changed(lambda y: y.data[:, 1].mul_(2.0)),
    "data assigned": changed(lambda y: setattr(y, "data", y.data * 2.0)),
    "detached": changed(lambda y: y.detach().mul_(2.0)),
    "twice": changed(lambda y: (y.data[:, 1].mul_(2.0), y.data.clamp_(-0.5, 0.5))),
}
UNDER_NO_GRAD = {
    "all": changed(lambda y: y.mul_(2.0)),
    "what is returned": lambda y: y.clamp_(-0.5, 0.5),
    "by an operator": changed(lambda y: y.__imul__(2.0)),
    "by a mask": changed(lambda y: y.__setitem__(late(y).expand_as(y), -1.0)),
    "elements": changed(lambda y: y.__setitem__((slice(None), 0), 0.5)),
    "a view": changed(lambda y: y[:, 1].mul_(2.0)),
    "a view of a view": changed(lambda y: y.t()[1].copy_(y[:, 2])),
}


@pytest.mark.parametrize("change", in_turn(BY_DATA))
def test_what_is_written_by_way_of_data_trains_as_in_pytorch(change):
    assert_trains_as_in_pytorch(lambda: Overwritten(change, True), vectors, evaluates=True)


@pytest.mark.parametrize("change", UNDER_NO_GRAD.values(), ids=UNDER_NO_GRAD)
def test_what_is_written_under_no_grad_trains_as_in_pytorch(change):
    assert_trains_as_in_pytorch(lambda: Overwritten(change, False), vectors, evaluates=True)


def shown_by_its_data(change):
    """What is written to y, by what shows its memory without a gradient."""

    def of(y):
        data, part = y.detach(), y[:, 1:3].data
        change(y)
        return y * data.sum(1, keepdim=True) + part.mul(2.0).sum()

    return of


SHOWN = {
    "all": lambda y: y.mul_(2.0),
    "by a mask": lambda y: y.masked_fill_(late(y), -1.0),
    "a view": lambda y: y[:, 2].exp_(),
    "elements": lambda y: y.__setitem__((slice(None), 1), y[:, 0].clone()),
    "other data": lambda y: y.data[:, 2].mul_(3.0),
    "data assigned": lambda y: setattr(y, "data", y.data * 2.0),
    "another form": lambda y: y.unsqueeze_(0).squeeze_(0),
}


@pytest.mark.parametrize("change", in_turn(SHOWN))
def test_data_shows_what_is_written_behind_it_as_in_pytorch(change):
    assert_trains_as_in_pytorch(lambda: Overwritten(shown_by_its_data(change), True), vectors, evaluates=True)
