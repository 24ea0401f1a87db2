"""Convolutions with as many groups as a symbolic size tells, such as the batch's: each sample's own kernels, in one call.

    F.conv2d(x.reshape(1, batch * c, h, w), kernels.reshape(batch * out, c, 3, 3), groups=batch)

ONNX's Conv has its number of groups written down. Here what each tap of the kernel reads stands beside what the others
do, and a group is one product.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F

from orttrainer.export.rewrites.windows import im2col

__all__ = ["REWRITES"]


def _convolution(convolution, axes):
    def call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        if not isinstance(groups, torch.SymInt):
            return convolution(input, weight, bias, stride, padding, dilation, groups)
        stride, dilation = _each(stride, axes), _each(dilation, axes)
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]  # from the first tap to the last
        if isinstance(padding, str):
            pads = [(span // 2, span - span // 2) if padding == "same" else (0, 0) for span in spans]
        else:
            pads = [(p, p) for p in _each(padding, axes)]
        return _by_products(input, weight, bias, stride, pads, dilation, groups)

    return call


def _transposed(convolution, axes):
    def call(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        if not isinstance(groups, torch.SymInt):
            return convolution(input, weight, bias, stride, padding, output_padding, groups, dilation)
        kernel, dilation = weight.shape[2:], _each(dilation, axes)
        spans = [d * (k - 1) for d, k in zip(dilation, kernel)]
        pads = [(s - p, s - p + more) for s, p, more in zip(spans, _each(padding, axes), _each(output_padding, axes))]
        for axis, step in enumerate(_each(stride, axes), start=-axes):
            input = _with_zeros_between(input, axis, step)
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2)
        weight = weight.flip(list(range(-axes, 0))).flatten(0, 1)
        return _by_products(input, weight, bias, [1] * axes, pads, dilation, groups)

    return call


def _by_products(input, weight, bias, stride, pads, dilation, groups):
    """The convolution of `input` [N, groups * C, *sizes], or without N, by `weight` [groups * M, C, *kernel]."""
    axes, kernel = len(stride), weight.shape[2:]
    batched = input if input.dim() == axes + 2 else input.unsqueeze(0)
    padding = [min(before, after) if axes < 3 and min(before, after) > 0 else 0 for before, after in pads]
    for axis, (both, (before, after)) in enumerate(zip(padding, pads), start=-axes):
        batched = _padded(batched, axis, before - both, after - both)
    window = kernel, dilation, padding, stride
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    sizes = [(n + 2 * p - span) // s + 1 for n, span, p, s in zip(batched.shape[2:], spans, padding, stride)]
    columns = _of_images(batched, *window) if axes < 3 else _of_volumes(batched, sizes, *window)
    columns = columns.reshape(-1, groups, math.prod(weight.shape[1:]), math.prod(sizes))
    result = weight.reshape(groups, weight.shape[0] // groups, -1) @ columns
    result = result.reshape(-1, weight.shape[0], *sizes)
    result = result if bias is None else result + bias.view(-1, *[1] * axes)
    return result if batched.dim() == input.dim() else result.squeeze(0)


def _of_images(input, kernel, dilation, padding, stride):
    """What each tap reads, [N, channels * taps, windows], of images or of lines."""
    if input.dim() == 4:
        return im2col(input, kernel, dilation, padding, stride)
    return im2col(input.unsqueeze(2), (1, *kernel), (1, *dilation), (0, *padding), (1, *stride))


def _of_volumes(input, sizes, kernel, dilation, padding, stride):
    """The same of volumes, that `sizes` windows see along each axis, [N, channels, taps, *sizes]; without padding."""
    taps = []
    for places in itertools.product(*map(range, kernel)):
        tap = input
        for axis, (place, size, step, gap) in enumerate(zip(places, sizes, stride, dilation), start=2):
            tap = tap[(slice(None),) * axis + (slice(place * gap, place * gap + (size - 1) * step + 1, step),)]
        taps.append(tap)
    return torch.stack(taps, dim=2)


def _padded(input, axis, before, after):
    """`input` with zeros around; without what is there, where they are less than none."""
    if before < 0 or after < 0:
        input = input.narrow(axis, max(-before, 0), input.shape[axis] - max(-before, 0) - max(-after, 0))
    return F.pad(input, [0, 0] * (-axis - 1) + [max(before, 0), max(after, 0)])


def _with_zeros_between(input, axis, step):
    """`input` with step - 1 zeros between its numbers."""
    if step == 1:
        return input
    apart = F.pad(input.unsqueeze(input.dim() + axis + 1), [0, 0] * (-axis - 1) + [0, step - 1])
    return apart.flatten(axis - 1, axis).narrow(axis, 0, (input.shape[axis] - 1) * step + 1)


def _each(value, axes):
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


REWRITES = {
    **{getattr(torch, f"conv{axes}d"): _convolution(getattr(torch, f"conv{axes}d"), axes) for axes in (1, 2, 3)},
    **{
        getattr(torch, f"conv_transpose{axes}d"): _transposed(getattr(torch, f"conv_transpose{axes}d"), axes)
        for axes in (1, 2, 3)
    },
}
