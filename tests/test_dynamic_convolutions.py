"""Convolutions by kernels that each sample has of its own, as many groups as the batch, train as in PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from torch import nn


def convolved(axes: int, kernel: tuple, **options):
    """The samples in turn as groups of one sample, of kernels [batch * 6, 3, *kernel]."""

    def function(m, x):
        weight = m.kernels(x, 6, 3, kernel)
        convolution = getattr(F, f"conv{axes}d")
        y = convolution(x.reshape(1, -1, *x.shape[2:]), weight, groups=x.shape[0], **options)
        return y.reshape(x.shape[0], 6, *y.shape[2:])

    return axes, kernel, function


def transposed(axes: int, kernel: tuple, **options):
    def function(m, x):
        weight = m.kernels(x, 6, 3, kernel).reshape(-1, 6, *kernel)
        convolution = getattr(F, f"conv_transpose{axes}d")
        y = convolution(x.reshape(1, -1, *x.shape[2:]), weight, groups=x.shape[0], **options)
        return y.reshape(x.shape[0], 6, *y.shape[2:])

    return axes, kernel, function


def with_biases(m, x):
    biases = x.mean((2, 3)).repeat(1, 2).flatten()
    return convolved(2, (3, 3), bias=biases)[2](m, x)


def each_channel(m, x):
    """A kernel for each channel of each sample, as for filters of images."""
    weight = m.kernels(x, 3, 1, (3, 3))
    y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight, padding=1, groups=x.shape[0] * x.shape[1])
    return y.reshape(x.shape)


def without_a_batch(m, x):
    return F.conv2d(x.flatten(0, 1), m.kernels(x, 6, 3, (3, 3)), groups=x.shape[0]).unflatten(0, (-1, 6))


def modulated(m, x):
    """StyleGAN2's (https://arxiv.org/abs/1912.04958): one kernel, scaled by each sample's style, at norm one."""
    weight = m.weight * x.mean((2, 3))[:, None, :, None, None]
    weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
    y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), padding=1, groups=x.shape[0])
    return y.reshape(x.shape[0], 6, *y.shape[2:])


FUNCTIONS = {  # of x [batch, 3, sizes]
    "a plane": convolved(2, (3, 2)),
    "a plane, with strides": convolved(2, (3, 3), stride=(2, 3), padding=(1, 2)),
    "a plane, with dilation": convolved(2, (3, 2), dilation=2, padding="same"),
    "a plane, of one tap": convolved(2, (1, 1), stride=2),
    "a line": convolved(1, (4,), stride=2, padding=1),
    "a volume": convolved(3, (2, 3, 2), padding=(1, 0, 1)),
    "a plane up": transposed(2, (4, 4), stride=2, padding=1),
    "a plane up, by more than the kernel": transposed(2, (2, 2), stride=3, output_padding=(1, 2)),
    "a plane up, padded by more than it spans": transposed(2, (2, 3), padding=(2, 1)),
    "a line up, with dilation": transposed(1, (3,), stride=2, dilation=2),
    "a volume up": transposed(3, (2, 2, 2), stride=(2, 1, 2)),
    "with_biases": (2, (3, 3), with_biases),
    "each_channel": (2, (3, 3), each_channel),
    "without_a_batch": (2, (3, 3), without_a_batch),
    "modulated": (2, (3, 3), modulated),
}


class Dynamic(nn.Module):
    def __init__(self, function, numbers: int):
        super().__init__()
        self.function, self.head = function, nn.Linear(3, numbers)
        self.weight, self.gain = nn.Parameter(torch.randn(6, 3, 3, 3) / 5), nn.Parameter(torch.ones(()))

    def kernels(self, x, rows: int, columns: int, kernel: tuple) -> torch.Tensor:
        """[batch * rows, columns, *kernel] of the means of each sample."""
        numbers = rows * columns * torch.Size(kernel).numel()
        return self.head(x.flatten(2).mean(2))[:, :numbers].reshape(-1, columns, *kernel)

    def forward(self, x):
        return self.function(self, x * self.gain) + self.weight.mean() * self.head.bias.mean()


@pytest.mark.parametrize("name", usual(FUNCTIONS, "a plane up", "modulated"))
def test_kernels_of_each_sample_train_as_in_pytorch(name):
    axes, kernel, function = FUNCTIONS[name]

    def images(step: int):
        return [torch.randn(2 + step, 3, *(7, 6, 5)[:axes], generator=torch.Generator().manual_seed(step))]

    make = functools.partial(Dynamic, function, 18 * torch.Size(kernel).numel())
    trainer = assert_trains_as_in_pytorch(make, images, evaluates=True)
    operators = [node.op_type for node in trainer.training_graph.graph.graph]
    assert operators.count("Col2Im") == (axes < 3), "what the taps read is added up at once"
