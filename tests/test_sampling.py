"""Volumes read at points between their voxels train like in PyTorch, whatever lies beyond their bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch
from marks import slow
from torch import nn

PADDINGS = ["zeros", "border", "reflection"]


class Warped(nn.Module):
    """A volume that is moved by a field, once for each padding: both are trained."""

    def __init__(self, mode, align_corners):
        super().__init__()
        self.options = {"mode": mode, "align_corners": align_corners}
        self.scale = nn.Parameter(torch.rand(2, 4, 5, 3) + 0.5)
        self.shift = nn.Parameter(torch.randn(3, 2, 4, 3))

    def forward(self, volume, points):
        volume, points = volume * self.scale, points + self.shift
        found = [F.grid_sample(volume, points, padding_mode=padding, **self.options) for padding in PADDINGS]
        return torch.cat(found, 1) + self.shift.mean()


def volumes(step: int):
    """Points far outside the volume, near its bounds, and in the middle of it."""
    generator = torch.Generator().manual_seed(step)
    volume = torch.randn(2 + step, 2, 4, 5, 3, generator=generator)
    return [volume, torch.randn(2 + step, 3, 2, 4, 3, generator=generator) * 0.8]


def has_cubic_volumes() -> bool:
    try:
        F.grid_sample(torch.zeros(1, 1, 1, 1, 1), torch.zeros(1, 1, 1, 1, 3), "bicubic", align_corners=True)
    except RuntimeError:
        return False
    return True


needs_cubic = pytest.mark.skipif(not has_cubic_volumes(), reason="PyTorch has it since 2.15")


@pytest.mark.parametrize("align_corners", [False, slow(True)])
@pytest.mark.parametrize("mode", ["bilinear", slow("nearest"), pytest.param("bicubic", marks=needs_cubic)])
def test_a_sampled_volume_trains_as_in_pytorch(mode, align_corners):
    assert_trains_as_in_pytorch(lambda: Warped(mode, align_corners), volumes, evaluates=True)


class AtCorners(nn.Module):
    """A volume and points where the slope jumps, both parameters."""

    def __init__(self, mode):
        super().__init__()
        self.options = {"mode": mode, "align_corners": True}
        self.volume = nn.Parameter(torch.randn(1, 1, 3, 3, 3, generator=torch.Generator().manual_seed(0)))
        points = [
            [-1.0, -1, -1],
            [1, 1, 1],
            [-1, 0, 1],
            [0, 0, 0],
            [0.5, -1, 0],
            [3, 1, -5],
            [-2, 2, 0.25],
            [9e9, 0, 0],
        ]
        self.points = nn.Parameter(torch.tensor(points).reshape(1, 1, 1, -1, 3))

    def forward(self, x):
        found = [F.grid_sample(self.volume, self.points, padding_mode=p, **self.options) for p in PADDINGS]
        return torch.cat(found) * x.mean()


@pytest.mark.parametrize("mode", ["bilinear", pytest.param("bicubic", marks=needs_cubic)])
def test_at_voxels_and_bounds_the_slope_is_pytorch_s(mode):
    assert_trains_as_in_pytorch(lambda: AtCorners(mode), lambda step: [torch.ones(2 + step, 1)], evaluates=False)


class Turned(nn.Module):
    """Images of some channels that are read at points of a trained field, several at one pixel."""

    def __init__(self, channels):
        super().__init__()
        self.scale, self.field = (
            nn.Parameter(torch.rand(channels, 4, 5) + 0.5),
            nn.Parameter(torch.randn(6, 7, 2) * 0.8),
        )

    def forward(self, images):
        grid = self.field.expand(images.shape[0], -1, -1, -1)
        return F.grid_sample(images.repeat(1, len(self.scale), 1, 1) * self.scale, grid, align_corners=False)


@pytest.mark.parametrize("channels, rows", [(8, True), (7, False)])
def test_many_channels_of_a_pixel_are_read_and_added_as_a_row(channels, rows):
    images = [torch.randn(2 + step, 1, 4, 5, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    trainer = assert_trains_as_in_pytorch(lambda: Turned(channels), lambda step: [images[step]], evaluates=False)
    scatters = [node for node in trainer.training_graph.graph.graph if node.op_type == "ScatterElements"]
    assert [node.attributes.get_int("axis") for node in scatters] == ([0] if rows else [2])
