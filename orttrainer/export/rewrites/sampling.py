"""`grid_sample` of volumes, which the exporters have for images alone: each point is a weighted sum of the voxels around it.

And `affine_grid`, to the last bit: the grid that leaves an image as it is reads each pixel where the slope jumps.
"""

from __future__ import annotations

import torch

from orttrainer.export.rewrites.resized import cubic

__all__ = ["REWRITES"]

_NEAREST, _CUBIC = 1, 2  # as torch numbers the modes ...
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2  # ... and what is beyond the volume


def _grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    if input.dim() == 5:
        return _grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners)
    if (interpolation_mode, padding_mode) == (_NEAREST, _REFLECTION):  # halfway ONNX rounds first, to another pixel
        pixels = [_pixel(at, n, align_corners) for at, n in zip(grid.unbind(-1), reversed(input.shape[2:]))]
        grid, padding_mode = torch.stack(pixels, -1), _BORDER
    return torch.grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)


def _pixel(at, size, align_corners):
    """The center of the pixel next to each coordinate, or to its reflection."""
    place = (at + 1) * ((size - 1) / 2) if align_corners else (at + 1) * (size / 2) - 0.5
    place = torch.round(_within(place, size, _REFLECTION, align_corners))
    return place * 2 / at.new_ones(()).mul(size - 1).clamp(min=1) - 1 if align_corners else (place * 2 + 1) / size - 1


def _grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners):
    """torch.grid_sampler_3d; of `grid` the last axis is x, y, z, and in volumes z is the first."""
    batch, channels, *sizes = input.shape
    place, weight = torch.arange(batch, device=input.device).unsqueeze(1), 1.0  # [taps of z, of y, of x, batch, points]
    for axis, size in enumerate(sizes):
        at = _in_voxels(grid[..., 2 - axis].reshape(batch, -1), size, align_corners)
        found = _neighbors(at, size, interpolation_mode, padding_mode, align_corners)
        near, share = (x.reshape([-1] + [1] * (2 - axis) + list(at.shape)) for x in found)
        place, weight = place * size + near, weight * share
    # As rows of one table: a gather along an axis would need an index for each channel.
    table = input.flatten(2).transpose(1, 2).reshape(-1, channels)
    found = table.index_select(0, place.flatten()).reshape(*place.shape, channels) * weight.unsqueeze(-1)
    return found.sum((0, 1, 2)).transpose(1, 2).reshape(batch, channels, *grid.shape[1:4])


def _in_voxels(at, size, align_corners):
    """Coordinates from -1 to 1 as positions in voxels, from 0 to size - 1."""
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _within(at, size, padding_mode, align_corners):
    """Positions, of which those beyond the volume are as `padding_mode` says."""
    if padding_mode == _ZEROS:
        return torch.where((at >= -1) & (at <= size), at, -2.0)  # what is farther away is as good as NaN
    if padding_mode == _REFLECTION:
        at = _reflected(at, *((0.0, size - 1) if align_corners else (-0.5, size)))
    # The slope at both ends is 0, as in PyTorch.
    return torch.where(at > 0, torch.where(at < size - 1, at, at.new_ones(()) * (size - 1)), 0.0)


def _reflected(at, low, span):
    """Back and forth between `low` and `low + span`."""
    beyond = at - low
    side = torch.where(beyond < 0, -1.0, 1.0)
    beyond, span = beyond * side, at.new_ones(()) * span
    turns = torch.floor(beyond / span.clamp(min=1)).detach()
    rest = beyond - turns * span
    return torch.where(turns % 2 == 0, rest, span - rest) + low


def _neighbors(at, size, mode, padding_mode, align_corners):
    """The voxels next to each position along one axis, and their weights: [taps, batch, points]; outside the weight is 0."""
    if mode == _CUBIC:  # here not the position is brought into the volume, but each voxel that it is read from
        near, share = _next_four(at)
        near = _within(near, size, padding_mode, align_corners)
    else:
        at = _within(at, size, padding_mode, align_corners)
        near, share = _nearest(at) if mode == _NEAREST else _next_two(at)
    inside = (near >= 0) & (near < size)
    return torch.where(inside, near, 0.0).long(), torch.where(inside, share, 0.0)


def _nearest(at):
    near = torch.round(at).unsqueeze(0)
    return near.detach(), 1 + 0 * torch.sign(near)  # with the gradient 0, and not none: weight decay moves such a grid


def _next_two(at):
    below = torch.floor(at.detach())
    return torch.stack([below, below + 1]), torch.stack([below + 1 - at, at - below])


def _next_four(at):
    below, offsets = torch.floor(at.detach()), torch.arange(-1, 3, device=at.device).reshape(-1, 1, 1)
    return below + offsets, cubic((at - below - offsets).abs(), -0.75)


def _affine_grid(theta, size, align_corners):
    """torch.affine_grid_generator; exporters scale the ends of the steps, and PyTorch each step."""
    batch, _, *sizes = size
    if not all(isinstance(n, int) for n in sizes):
        return torch.affine_grid_generator(theta, size, align_corners)
    sides = torch.meshgrid(*(_steps(n, align_corners, theta) for n in sizes), indexing="ij")
    points = torch.stack([*reversed(sides), torch.ones_like(sides[0])], -1)  # x, y[, z], 1
    return (points.reshape(-1, len(sizes) + 1) @ theta.mT).reshape(batch, *sizes, len(sizes))


def _steps(count, align_corners, like):
    if count <= 1:
        return like.new_zeros(count)
    steps = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    return steps if align_corners else steps * (count - 1) / count


REWRITES = {
    torch.affine_grid_generator: _affine_grid,
    torch.grid_sampler: _grid_sampler,
    torch.grid_sampler_3d: _grid_sampler_3d,
}
"""Each has the value and the gradient of the original, also where the slope jumps."""
