"""Convolution networks with many weights, and of signals."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from steps.families import Residual, family, head, images


class ResidualBlock(nn.Module):
    """That of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.last = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.last(self.second(F.relu(self.norm(self.first(x))))) + self.shortcut(x))


def _resnet_18():
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    sizes = [(inputs, width, width // inputs) for inputs, width in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *(ResidualBlock(*size) for size in sizes), *head(512, 100))


@family
def resnet_18():
    return _resnet_18(), F.cross_entropy, images(32, 3, 64, 100)


@family
def resnet_18_of_larger_images():
    return _resnet_18(), F.cross_entropy, images(8, 3, 128, 100)


@family
def vgg_11():
    layers, inputs = [], 3
    for width in (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"):
        if width == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return module, F.cross_entropy, images(16, 3, 32, 10)


@family
def alexnet():
    layers = [
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(192, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    ]  # fmt: skip
    module = nn.Sequential(*layers, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 100))
    return module, F.cross_entropy, images(8, 3, 128, 100)


@family
def residual_signals():
    def block(width):
        layers = [
            nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2), nn.BatchNorm1d(width),
        ]  # fmt: skip
        return [Residual(nn.Sequential(*layers)), nn.ReLU()]

    module = nn.Sequential(
        nn.Conv1d(8, 64, 7, padding=3), *block(64), *block(64), nn.MaxPool1d(2), nn.Conv1d(64, 128, 1), *block(128),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip
    return module, F.cross_entropy, lambda: (torch.randn(16, 8, 256), torch.randint(0, 5, (16,)))


@family
def spoken_words():
    """M5, on a second of sound at 8 kHz."""
    layers, inputs = [], 1
    for width, kernel, stride in ((32, 80, 8), (32, 3, 1), (64, 3, 1), (64, 3, 1)):
        layers += [nn.Conv1d(inputs, width, kernel, stride), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
        inputs = width
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 35))
    return module, F.cross_entropy, lambda: (torch.randn(16, 1, 8000), torch.randint(0, 35, (16,)))


class _VolumeUNet(nn.Module):
    """One step down and up again, between two convolutions each; `kernel`: of all."""

    def __init__(self, kernel: int):
        super().__init__()

        def pair(inputs, outputs):
            layers = []
            for width in (inputs, outputs):
                conv = nn.Conv3d(width, outputs, kernel, padding=kernel // 2, bias=False)
                layers += [conv, nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU()]
            return nn.Sequential(*layers)

        self.first, self.inner, self.last = pair(1, 16), pair(16, 32), pair(32, 16)
        self.up, self.out = nn.ConvTranspose3d(32, 16, 2, 2), nn.Conv3d(16, 3, 1)

    def forward(self, x):
        x = self.first(x)
        return self.out(self.last(torch.cat([self.up(self.inner(F.max_pool3d(x, 2))), x], 1)))


def _labelled_volumes(images: int, side: int):
    return lambda: (torch.randn(images, 1, side, side, side), torch.randint(0, 3, (images, side, side, side)))


@family
def volume_unet():
    return _VolumeUNet(3), F.cross_entropy, _labelled_volumes(2, 32)


@family
def volume_unet_of_wide_kernels():
    return _VolumeUNet(5), F.cross_entropy, _labelled_volumes(2, 16)


class VideoBlock(ResidualBlock):
    """The same in time too."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        nn.Module.__init__(self)
        self.first, self.norm = nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm3d(outputs)
        self.second, self.last = nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm3d(outputs)
        shortcut = [nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs)]
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()


@family
def video_resnet():
    stem = [nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(32), nn.ReLU()]
    blocks = [VideoBlock(32, 32, 1), VideoBlock(32, 64, 2), VideoBlock(64, 128, 2)]
    end = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 10)]
    return (
        nn.Sequential(*stem, *blocks, *end),
        F.cross_entropy,
        lambda: (torch.randn(2, 3, 8, 56, 56), torch.randint(0, 10, (2,))),
    )
