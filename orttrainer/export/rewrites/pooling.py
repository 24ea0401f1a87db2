"""Pooling that the exporters refuse or change: adaptive, fractional, and averages with a divisor of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

__all__ = ["REWRITES"]

_nn = torch._C._nn


# ---------------------------------------------------------------- averages


def _average(pool, rank):
    """avg_pool2d or avg_pool3d; with `divisor_override` the sum of each window, divided by it."""

    def call(
        input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    ):
        if divisor_override is None:
            return pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
        kernel = _each(kernel_size, rank)
        stride, padding = _each(stride or kernel, rank), _each(padding, rank)
        pads = []
        for axis in reversed(range(rank)):
            size = input.shape[axis - rank]
            before, after = padding[axis], padding[axis]
            if ceil_mode:
                windows = -(-(size + 2 * before - kernel[axis]) // stride[axis]) + 1
                if (windows - 1) * stride[axis] >= size + before:
                    windows -= 1
                after = max(0, (windows - 1) * stride[axis] + kernel[axis] - size - before)
            pads += [before, after]
        return pool(F.pad(input, pads), kernel, stride) * (math.prod(kernel) / divisor_override)

    return call


def _each(value, rank):
    values = [value] * rank if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


def _adaptive_avg_pool3d(input, output_size):
    """The mean over windows of each axis in turn, as a product with a matrix."""
    for axis, windows in zip((-3, -2, -1), _each(output_size, 3)):
        size = input.shape[axis]
        if windows == 1:
            input = input.mean(axis, keepdim=True)
            continue
        start, end = _adaptive_windows(size, windows, input.device)
        position = torch.arange(size, device=input.device).unsqueeze(1)
        inside = ((position >= start) & (position < end)).to(input.dtype) / (end - start)
        input = torch.movedim(torch.movedim(input, axis, -1) @ inside, -1, axis)
    return input


def _adaptive_windows(size, windows, device):
    """First position of each window and the one after its last."""
    index = torch.arange(windows, device=device)
    return index * size // windows, ((index + 1) * size + windows - 1) // windows


# ---------------------------------------------------------------- maxima


def _adaptive_max_pool(rank):
    """adaptive_max_pool1d, 2d and 3d -> values, and their places in the flattened plane."""

    def call(input, output_size):
        windows = []
        for axis, count in zip(range(-rank, 0), _each(output_size, rank)):
            size = input.shape[axis]
            start, end = _adaptive_windows(size, count, input.device)
            offset = torch.arange((size + count - 1) // count + 1, device=input.device)
            index = torch.minimum(start.unsqueeze(1) + offset, end.unsqueeze(1) - 1)  # the last again where it is short
            windows.append(index.reshape([1] * (input.dim() - rank) + [count, -1]))
        return _max_over_windows(input, windows)

    return call


def _fractional_max_pool(first_axis_last):
    """fractional_max_pool2d (whose random samples are for the last axis first) and 3d."""

    def call(input, kernel_size, output_size, random_samples):
        rank = 2 if first_axis_last else 3
        output_size = _each(output_size, rank)
        samples = random_samples if input.dim() == rank + 2 else random_samples[0]
        windows = []
        for axis, (kernel, count) in enumerate(zip(_each(kernel_size, rank), output_size)):
            sample = samples[..., rank - 1 - axis if first_axis_last else axis].unsqueeze(-1)  # [..., channels, 1]
            last = input.shape[axis - rank] - kernel
            start = torch.full_like(sample, last).long()
            if count > 1:
                alpha = last / (count - 1)
                step = torch.arange(count - 1, device=input.device, dtype=input.dtype)
                start = torch.cat([((step + sample) * alpha).long() - (sample * alpha).long(), start], -1)
            windows.append(start.unsqueeze(-1) + torch.arange(kernel, device=input.device))
        return _max_over_windows(input, windows)

    return call


def _max_over_windows(input, windows):
    """The first maximum of each window and its place in the plane, one axis after the other, the last axis first.

    Args:
        windows: for each pooled axis the positions in its windows: [..., windows, length].
    """
    rank, stride, place = len(windows), 1, None
    for axis, index in reversed(list(enumerate(windows))):
        size = input.shape[axis - rank]
        axis += input.dim() - rank
        *leading, count, length = index.shape
        around = [1] * axis, [1] * (input.dim() - axis - 1)
        index = index.reshape(
            [*(leading or around[0]), *[1] * (axis - len(leading or around[0])), count * length, *around[1]]
        )
        index = index.expand(*input.shape[:axis], count * length, *input.shape[axis + 1 :])
        split = [*input.shape[:axis], count, length, *input.shape[axis + 1 :]]
        values = input.gather(axis, index).reshape(split)
        best = values.argmax(axis + 1, keepdim=True)
        chosen = index.reshape(split).gather(axis + 1, best).squeeze(axis + 1)
        place = chosen * stride if place is None else place.gather(axis, chosen) + chosen * stride
        input, stride = values.gather(axis + 1, best).squeeze(axis + 1), stride * size
    return input, place


REWRITES = {
    _nn.avg_pool2d: _average(F.avg_pool2d, 2),
    _nn.avg_pool3d: _average(F.avg_pool3d, 3),
    _nn.adaptive_avg_pool3d: _adaptive_avg_pool3d,
    torch.adaptive_max_pool1d: _adaptive_max_pool(1),
    _nn.adaptive_max_pool2d: _adaptive_max_pool(2),
    _nn.adaptive_max_pool3d: _adaptive_max_pool(3),
    _nn.fractional_max_pool2d: _fractional_max_pool(True),
    _nn.fractional_max_pool3d: _fractional_max_pool(False),
}
