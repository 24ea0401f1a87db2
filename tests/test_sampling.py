"""Images and volumes read at points between their pixels train like in PyTorch, whatever lies beyond their bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch
from marks import slow
from torch import nn

import orttrainer

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


class Nearest(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.rand(1, 2, 2, 2, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, volumes):
        return F.grid_sample(volumes, self.points, mode="nearest", align_corners=False).sum()


def test_weight_decay_moves_points_whose_gradient_is_0():
    points = Nearest()
    start = points.points.detach().clone()
    optimizer = torch.optim.SGD(points.parameters(), lr=0.5, weight_decay=0.5)
    trainer = orttrainer.trainer(points, lambda y, label: y * label, optimizer)
    trainer.step(torch.ones(1, 1, 3, 3, 3), torch.tensor(1.0))
    torch.testing.assert_close(points.points.detach(), start * 0.75)


class Transformer(nn.Module):
    """A spatial transformer, which begins with the identity: it reads each pixel where the slope jumps."""

    def __init__(self, size, align_corners):
        super().__init__()
        self.theta = nn.Parameter(torch.eye(2, 3))
        self.weight = nn.Parameter(torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.1)
        self.align_corners = align_corners

    def forward(self, images):
        grid = F.affine_grid(self.theta.expand(len(images), -1, -1), images.shape, align_corners=self.align_corners)
        found = [F.grid_sample(images, grid, padding_mode=p, align_corners=self.align_corners) for p in PADDINGS]
        return torch.cat(found, 1) * self.weight


@pytest.mark.parametrize("size, align_corners", [(4, True), (19, False), slow(28, False), slow(28, True)])
def test_a_spatial_transformer_that_begins_with_the_identity_trains_as_in_pytorch(size, align_corners):
    images = [torch.randn(2 + step, 1, size, size, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    assert_trains_as_in_pytorch(lambda: Transformer(size, align_corners), lambda step: [images[step]], evaluates=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_flow_that_is_0_at_first_has_no_slope_on_the_rim(dtype):
    class Warp(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(1, 2, 3, padding=1, dtype=dtype)
            nn.init.zeros_(self.net.weight)
            nn.init.zeros_(self.net.bias)

        def forward(self, images):
            same = torch.eye(2, 3).to(images).expand(len(images), -1, -1)
            grid = F.affine_grid(same, images.shape, align_corners=False) + self.net(images).permute(0, 2, 3, 1)
            return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    images = [torch.rand(2 + step, 1, 8, 8, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    assert_trains_as_in_pytorch(Warp, lambda step: [images[step].to(dtype)], evaluates=True)


class OfHalves(nn.Module):
    """Images that are read at whole pixels and between two, far beyond their bounds as well."""

    def __init__(self, align_corners):
        super().__init__()
        self.scale, self.align_corners = nn.Parameter(torch.ones(5, 4)), align_corners
        at = torch.arange(-30, 40) / 2
        sides = [(2 * at + (not align_corners)) / (n - align_corners) - 1 for n in (4, 5)]
        self.points = nn.Parameter(torch.stack(torch.meshgrid(*sides, indexing="ij"), -1))

    def forward(self, images):
        grid, options = self.points.expand(len(images), -1, -1, -1), {"align_corners": self.align_corners}
        return F.grid_sample(images * self.scale, grid, "nearest", "reflection", **options)


@pytest.mark.parametrize("align_corners", [False, True])
def test_the_pixel_nearest_to_a_reflected_half_is_pytorch_s(align_corners):
    images = [torch.randn(2 + step, 1, 5, 4, generator=torch.Generator().manual_seed(step)) for step in range(10)]
    assert_trains_as_in_pytorch(lambda: OfHalves(align_corners), lambda step: [images[step]], evaluates=False)


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
