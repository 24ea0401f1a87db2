"""Sigmoid where its logarithm is taken: losses and gradients are PyTorch's where ONNX Runtime's operator is 0."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fidelity import described
from small import make
from torch import nn

FAR = [-80.0, -60.0, -30.0, -20.0, -18.5, -17.0, -16.0, -10.0, -1.0, 0.0, 5.0, 16.0]
LOSSES = {  # of scores that are far from their labels
    "logarithm": lambda x: -torch.log(torch.sigmoid(x)),
    "binary cross-entropy": lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x), reduction="none"),
    "with an epsilon": lambda x: -torch.log(torch.sigmoid(x) + 1e-10),
    "clamped": lambda x: -torch.sigmoid(x).clamp(min=2.0**-40).log(),
    "focal": lambda x: -((1 - torch.sigmoid(x)) ** 2) * torch.where(x < 4, torch.sigmoid(x), 1.0).log(),
    "reshaped": lambda x: -torch.stack([torch.sigmoid(x), torch.sigmoid(x) * 0.5]).view(2, 3, 4)[0].flatten().log(),
    "share": lambda x: torch.sigmoid(x.clamp(max=3)) / torch.sigmoid(x.flip(0) / 4 - 10),
    "root": lambda x: torch.sigmoid(x) ** 0.5,
    "of what is left": lambda x: -torch.log(1 - torch.sigmoid(x.clamp(max=10))),
}


class Far(nn.Module):
    def __init__(self, loss, dtype=torch.float32):
        super().__init__()
        self.scores, self.loss = nn.Parameter(torch.tensor(FAR, dtype=dtype)), loss

    def forward(self, x):
        each = self.loss(self.scores + x)
        return each.sum(), each


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_small_sigmoids_and_their_gradients_are_those_of_pytorch(loss, dtype):
    module, x = Far(loss, dtype), torch.zeros(12, dtype=dtype)
    trainer = make(Far(loss, dtype), loss_fn=None, desc=described([x]))
    expected, each = module(x)
    expected.backward()
    found = trainer.train_step(x, 1e-3)
    torch.testing.assert_close(found[1], each.detach(), rtol=1e-5, atol=torch.finfo(dtype).eps)
    after = module.scores.detach() - 1e-3 * module.scores.grad
    torch.testing.assert_close(trainer.state_dict()["scores"], after, rtol=1e-6, atol=1e-7)


def test_a_prediction_keeps_the_operator():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 1)

        def forward(self, x):
            prediction = torch.sigmoid(self.linear(x))
            return F.binary_cross_entropy(prediction, torch.ones_like(prediction)), prediction

    trainer = make(Classifier(), loss_fn=None, desc=described([torch.zeros(3, 12)]))
    trainer.train_step(torch.zeros(3, 12), 0.1)
    operators = [node.op_type for node in trainer.training_graph.graph.graph]
    assert operators.count("Sigmoid") == 1 and "Exp" in operators
    plain = nn.Sequential(nn.Linear(12, 12), nn.SiLU())
    trainer = make(Wrapped(plain), loss_fn=None, desc=described([torch.zeros(3, 12)]))
    trainer.train_step(torch.zeros(3, 12), 0.1)
    assert "Exp" not in [node.op_type for node in trainer.training_graph.graph.graph]


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        y = self.module(x)
        return (y * math.pi).square().mean(), y
