"""Attributes and buffers that are NaN, as what is not known yet often is: two NaNs are the same, and what follows is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pairs import Pair
from small import batch
from torch import nn

import orttrainer

NAN = float("nan")
KINDS = {
    "a number": lambda value: value,
    "a tensor": torch.tensor,
    "tensors": lambda value: torch.tensor([value, 1.0, value]),
    "an array": lambda value: np.array([value, 2.0, value], dtype=np.float32),
    "a list": lambda value: [value, torch.tensor(value)],
}


class Scaled(nn.Module):
    """Adds its offset to the scores, where that is known."""

    def __init__(self, offset):
        super().__init__()
        self.layer, self.offset = nn.Linear(4, 3), offset

    def forward(self, x):
        offset = self.offset[1] if isinstance(self.offset, list) else self.offset
        return self.layer(x) * (1 + torch.as_tensor(offset).nan_to_num(nan=0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_that_is_nan_at_first_is_followed_to_other_values(kind, caplog):
    pair = Pair(Scaled(KINDS[kind](NAN)))
    pair.steps(2)
    assert caplog.text == ""  # such as that forward or backward write there
    pair.change(lambda module: setattr(module, "offset", KINDS[kind](3.0)))
    pair.steps(2)
    assert caplog.text.count("'offset") == 1  # exported once more


def test_an_attribute_tensor_that_is_nan_is_followed_in_place():
    pair = Pair(Scaled(torch.tensor(NAN)))
    pair.steps(1)
    pair.change(lambda module: module.offset.fill_(3.0))
    pair.steps(1)


def test_running_statistics_that_a_first_batch_makes_nan_are_not_said_to_be_written_by_the_backward(caplog):
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), 0.1))
    x, label = batch()
    with pytest.warns(orttrainer.errors.NonFiniteLossWarning):
        trainer.step(x * NAN, label)
    assert caplog.text == ""
