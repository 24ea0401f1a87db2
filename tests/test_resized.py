"""Images that are resized by products train like in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import Loss, assert_trains_as_in_pytorch, described
from torch import nn

from orttrainer.export import export_module


class Resized(nn.Module):
    def __init__(self, mode, align_corners, antialias=True):
        super().__init__()
        self.options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
        self.scale = nn.Parameter(torch.rand(2, 9, 12) + 0.5)

    def forward(self, x):
        x = x * self.scale
        small = F.interpolate(x, scale_factor=(0.3, 1.7), **self.options)
        return torch.cat([part.flatten(1) for part in (F.interpolate(x, (4, 15), **self.options), small)], 1)


def images(step: int):
    return [torch.randn(2 + step, 2, 9, 12, generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_resized_with_antialias_trains_as_in_pytorch(mode, align_corners):
    assert_trains_as_in_pytorch(lambda: Resized(mode, align_corners), images, evaluates=True)


@pytest.mark.parametrize("align_corners", [False, True])
def test_a_cubic_one_is_two_products_and_trains_as_in_pytorch(align_corners):
    assert_trains_as_in_pytorch(lambda: Resized("bicubic", align_corners, antialias=False), images, evaluates=True)
    description = described(images(0))
    graph = export_module(Loss(Resized("bicubic", align_corners, antialias=False)), None, description, images(0))
    assert "Resize" not in {node.op_type for node in graph.model.graph}


class ResizedByValue(nn.Module):
    """Positions of a grid, resized with antialias to the size that a batch tells, as NaViT-like models do."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.rand(1, 2, 4, 4))

    def forward(self, x, sizes):
        height, width = sizes[0]
        resized = F.interpolate(self.positions, (height, width), mode="bilinear", antialias=True)
        return x * resized.flatten(2).square().sum(-1)


def test_one_resized_with_antialias_to_a_size_by_value_trains_as_in_pytorch():
    """Smaller than it is in one axis, larger in the other, and the other way round."""
    sizes = [[3, 6], [7, 2], [4, 5]]
    batch = lambda step: [torch.ones(2, 2) + step, torch.tensor([sizes[step % 3]] * 2)]  # noqa: E731
    assert_trains_as_in_pytorch(ResizedByValue, batch, evaluates=True)
