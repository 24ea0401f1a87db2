"""Whole models of float64 train step for step as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from marks import usual
from torch import nn

import orttrainer


class SmallCNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2, groups=4), nn.BatchNorm2d(8), nn.SiLU(), nn.AvgPool2d(2, 1, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.down = self._block(1, 4), self._block(4, 8)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), self._block(12, 4)
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def _block(given, made):
        return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(2, made), nn.GELU())

    def forward(self, x):
        first = self.first(x)
        deep = self.down(F.avg_pool2d(first, 2))
        wide = F.interpolate(deep, size=x.shape[-2:], mode="bilinear", align_corners=False)[:, :4]
        return self.head(self.last(torch.cat([first, self.up(deep), wide], 1)))


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.convolutions = nn.ModuleList(nn.Conv1d(6, 4, size) for size in (2, 3, 4))
        self.head = nn.Linear(12, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        return self.head(torch.cat([F.relu(c(x)).amax(-1) for c in self.convolutions], 1))


class Residual(nn.Module):
    def __init__(self, given, made, stride):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(given, made, 3, stride, 1, bias=False),
            nn.Conv2d(made, made, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(made), nn.BatchNorm2d(made)])
        passed = nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made)
        self.passed = nn.Sequential(*passed) if stride > 1 or given != made else nn.Identity()

    def forward(self, x):
        y = self.norms[1](self.two(self.norms[0](self.one(x)).relu()))
        return (y + self.passed(x)).relu()


class ResNet18(nn.Sequential):
    """With an eighth of its channels."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            Residual(8, 8, 1), Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1),
            Residual(16, 32, 2), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip


class Physics(nn.Module):
    """u'' + sin u of a network, whose activations have their kernels in float32 only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x):
        u = x = x.requires_grad_()
        for layer, function in zip(self.layers, (torch.atan, torch.asinh, lambda y: torch.cosh(y) * torch.tan(y / 4))):
            u = function(layer(u))
        u = self.layers[-1](u)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return bend + torch.sin(u)


def images(channels, side):
    return lambda g, rows: torch.randn(rows, channels, side, side, generator=g, dtype=torch.float64)


def classes(count):
    return lambda g, rows: torch.randint(0, count, (rows,), generator=g)


def points(g, rows):
    return torch.rand(rows, 1, generator=g, dtype=torch.float64)


MODELS = {
    "small CNN": (SmallCNN, F.cross_entropy, images(3, 16), classes(5)),
    "U-Net": (UNet, F.mse_loss, images(1, 16), images(1, 16)),
    "text CNN": (TextCNN, F.cross_entropy, lambda g, rows: torch.randint(0, 20, (rows, 9), generator=g), classes(3)),
    "ResNet-18": (ResNet18, F.cross_entropy, images(3, 64), classes(5)),
    "physics": (Physics, F.mse_loss, points, points),
}


@pytest.mark.parametrize("name", usual(MODELS, "small CNN", "text CNN", "physics"))
def test_models_train_as_in_pytorch(name):
    make, loss_fn, inputs, labels = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    reference = copy.deepcopy(model)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=2**-5, momentum=0.5) for m in (model, reference))
    trainer, generator = orttrainer.trainer(model, loss_fn, optimizer), torch.Generator().manual_seed(1)
    for rows in (4, 4, 4, 3):
        x, y = inputs(generator, rows), labels(generator, rows)
        expected.zero_grad()
        loss = loss_fn(reference(x), y)
        loss.backward()
        expected.step()
        torch.testing.assert_close(trainer.step(x, y)[0], loss.detach(), rtol=1e-11, atol=0)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-10, atol=1e-12)
    right = loss_fn(reference.eval()(x), y).detach()
    torch.testing.assert_close(trainer.eval_step(x, y)[0], right, rtol=1e-11, atol=0)
