"""Pooling that the exporters refuse or change: adaptive, fractional, windows over the end, averages with a divisor of their own."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from orttrainer.export.rewrites.extrema import first_maximum

__all__ = ["REWRITES"]

_nn = torch._C._nn


# ---------------------------------------------------------------- windows that hang over the end (ceil_mode)


def _behind(size, kernel, step, before, spread=1):
    """The padding behind an axis that holds the last window of `ceil_mode`.

    Spelled out, for releases of ONNX differ in where a window may start, and its shape inference from ONNX Runtime.
    """
    reach = spread * (kernel - 1) + 1
    last = -(-(size + 2 * before - reach) // step) * step  # where it starts, counted from the padding's begin
    if last >= size + before:  # it would see the padding alone
        last -= step
    return max(0, last + reach - size - before)


def _known(sizes):
    return all(type(size) is int for size in sizes)


def _average(pool, rank):
    """avg_pool1d, 2d or 3d; with `ceil_mode` or `divisor_override` each window's sum, divided by what PyTorch divides by."""

    def call(
        input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
    ):
        if divisor_override is None and _is_whole(input, kernel_size, padding, rank):
            return input.mean(list(range(-rank, 0)), keepdim=True)
        kernel, sizes = _each(kernel_size, rank), input.shape[input.dim() - rank :]
        stride, padding = _each(stride or kernel, rank), _each(padding, rank)
        axes = list(zip(sizes, kernel, stride, padding))
        if divisor_override is None and (not ceil_mode or not _known(sizes)):
            return pool(input, kernel, stride, padding, ceil_mode, count_include_pad)
        pads = [(axis[3], _behind(*axis) if ceil_mode else axis[3]) for axis in axes]
        if divisor_override is None and all(after <= before for before, after in pads):
            return pool(input, kernel, stride, padding, False, count_include_pad)
        y = pool(F.pad(input, [side for pad in reversed(pads) for side in pad]), kernel, stride)
        if divisor_override is not None:
            return y * (math.prod(kernel) / divisor_override)
        for axis, (size, width, step, before) in enumerate(axes, -rank):
            border = before if count_include_pad else 0
            starts = [place * step - before for place in range(y.shape[axis])]
            counts = [min(start + width, size + border) - max(start, -border) for start in starts]
            shares = torch.tensor([width / count for count in counts], dtype=y.dtype, device=y.device)
            y = y * shares.reshape([-1] + [1] * (-1 - axis))
        return y

    return call


def _max_pool(pool, rank):
    """Max pooling; with `ceil_mode` spelled out as padding."""

    def call(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        if _is_whole(input, kernel_size, padding, rank):
            found = [x.unflatten(-1, [1] * rank) for x in first_maximum(input.flatten(-rank), -1, keepdim=True)]
            return tuple(found) if pool.__name__.endswith("with_indices") else found[0]
        sizes = input.shape[input.dim() - rank :]
        stride = kernel_size if stride is None or stride == [] else stride
        if not ceil_mode or not _known(sizes):
            return pool(input, kernel_size, stride, padding, dilation, ceil_mode)
        axes = zip(sizes, *(_each(x, rank) for x in (kernel_size, stride, padding, dilation)))
        pads = [(axis[3], _behind(*axis)) for axis in axes]
        if all(after <= before for before, after in pads):
            return pool(input, kernel_size, stride, padding, dilation)
        padded = F.pad(input, [side for pad in reversed(pads) for side in pad], value=-math.inf)
        result = pool(padded, kernel_size, stride, 0, dilation)
        if isinstance(result, torch.Tensor):
            return result
        return result[0], _moved(result[1], padded.shape[-rank:], sizes, [before for before, _ in pads])

    return call


def _is_whole(input, kernel_size, padding, rank):
    """Whether the window is all there is of axes of sizes that may vary: no exporter has a window that does."""
    pairs = list(zip(_each(kernel_size, rank), input.shape[input.dim() - rank :]))
    symbols = [width for width, _ in pairs if isinstance(width, torch.SymInt)]
    same = all(str(width) == str(size) for width, size in pairs)  # their expressions: `==` would decide by the sizes
    return bool(symbols) and same and all(before == 0 for before in _each(padding, rank))


def _moved(indices, padded, sizes, shifts):
    """Places in a padded plane as places in the plane."""
    flat, factor = 0, 1
    for axis in reversed(range(len(sizes))):
        flat = flat + (indices % padded[axis] - shifts[axis]) * factor
        indices, factor = indices // padded[axis], factor * sizes[axis]
    return flat


def _is_one(size):
    return type(size) is int and size == 1


def _each(value, rank):
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values * rank if len(values) == 1 else values


# ---------------------------------------------------------------- adaptive averages


def _adaptive_average(pool, rank):
    """adaptive_avg_pool1d, 2d or 3d; where windows overlap, or may, a product with a matrix along each axis in turn.

    PyTorch's decomposition gathers all windows.
    """

    def call(input, output_size):
        counts, sizes = _each(output_size, rank), input.shape[input.dim() - rank :]
        pairs = list(zip(sizes, counts))
        plain = all(map(_is_one, counts)) or torch.jit.is_tracing()
        if rank < 3 and (plain or (_known(sizes) and not any(size % count for size, count in pairs if count))):
            return pool(input, output_size)
        for axis, (size, windows) in enumerate(pairs, -rank):
            if _is_one(windows):
                input = input.mean(axis, keepdim=True)
                continue
            if str(windows) == str(size):  # an axis that is to stay
                continue
            start, end = _adaptive_windows(size, windows, input.device)
            position = torch.arange(size, device=input.device).unsqueeze(1)
            inside = ((position >= start) & (position < end)).to(input.dtype) / (end - start)
            if axis == -2:
                input = inside.T @ input
            else:
                input = torch.movedim(torch.movedim(input, axis, -1) @ inside, -1, axis)
        return input

    return call


def _adaptive_windows(size, windows, device):
    """First position of each window and the one after its last."""
    index = torch.arange(windows, device=device)
    return index * size // windows, ((index + 1) * size + windows - 1) // windows


# ---------------------------------------------------------------- maxima


def _adaptive_max_pool(pool, rank):
    """adaptive_max_pool1d, 2d and 3d -> values, and their places in the flattened plane; `pool` where windows are alike."""

    def call(input, output_size):
        sizes, windows = input.shape[input.dim() - rank :], []
        pairs = list(zip(sizes, _each(output_size, rank)))
        if _known(sizes) and all(count and size and size % count == 0 for size, count in pairs):
            return pool(input, [size // count for size, count in pairs])
        for size, count in pairs:
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
        split = [*input.shape[:axis], count, length, *input.shape[axis + 1 :]]
        around = [1] * (axis - len(leading)), [1] * (input.dim() - axis - 1)
        slices = all(_is_one(size) for size in leading) and axis < input.dim() - 1  # the same in all channels
        index = index.reshape([*leading, *around[0], count * length, *around[1]])
        whole = index.expand(*input.shape[:axis], count * length, *input.shape[axis + 1 :])
        values = (input.index_select(axis, index.flatten()) if slices else input.gather(axis, whole)).reshape(split)
        best = values.argmax(axis + 1, keepdim=True)
        chosen = whole.reshape(split).gather(axis + 1, best).squeeze(axis + 1)
        place = chosen * stride if place is None else place.gather(axis, chosen) + chosen * stride
        input, stride = values.gather(axis + 1, best).squeeze(axis + 1), stride * size
    return input, place


REWRITES = {
    torch.avg_pool1d: _average(torch.avg_pool1d, 1),
    _nn.avg_pool2d: _average(_nn.avg_pool2d, 2),
    _nn.avg_pool3d: _average(_nn.avg_pool3d, 3),
    **{pool: _max_pool(pool, 1) for pool in (torch.max_pool1d, torch.max_pool1d_with_indices)},
    **{pool: _max_pool(pool, 2) for pool in (torch.max_pool2d, _nn.max_pool2d_with_indices)},
    **{pool: _max_pool(pool, 3) for pool in (torch.max_pool3d, _nn.max_pool3d_with_indices)},
    torch.adaptive_avg_pool1d: _adaptive_average(torch.adaptive_avg_pool1d, 1),
    _nn.adaptive_avg_pool2d: _adaptive_average(_nn.adaptive_avg_pool2d, 2),
    _nn.adaptive_avg_pool3d: _adaptive_average(_nn.adaptive_avg_pool3d, 3),
    torch.adaptive_max_pool1d: _adaptive_max_pool(torch.max_pool1d_with_indices, 1),
    _nn.adaptive_max_pool2d: _adaptive_max_pool(_nn.max_pool2d_with_indices, 2),
    _nn.adaptive_max_pool3d: _adaptive_max_pool(_nn.max_pool3d_with_indices, 3),
    _nn.fractional_max_pool2d: _fractional_max_pool(True),
    _nn.fractional_max_pool3d: _fractional_max_pool(False),
}
