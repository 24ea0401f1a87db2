"""`interpolate` with `antialias`, a product with a matrix for each axis: the exporters' Resize has other weights."""

from __future__ import annotations

import torch

__all__ = ["REWRITES"]


def _linear(x):
    return (1 - x).clamp(min=0)


def _cubic(x):
    """Keys' kernel with a = -1/2."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _upsample(original, kernel):
    """torch's _upsample_bilinear2d_aa and _upsample_bicubic2d_aa, whose factors are called by one name or by two."""

    def call(input, output_size=None, align_corners=False, scale_factors=None, scales_w=None, *, scales_h=None):
        if not all(type(size) is int for size in input.shape[-2:]):
            return original(input, output_size, align_corners, scale_factors)
        if not isinstance(scale_factors, (list, tuple)):
            scale_factors = scales_h if scale_factors is None else scale_factors, scales_w
        for axis, place in ((-2, 0), (-1, 1)):
            size, factor = input.shape[axis], scale_factors[place]
            count = int(size * factor) if output_size is None else output_size[place]
            weights = _weights(kernel, size, count, _step(size, count, align_corners, factor), input)
            input = torch.matmul(weights, input) if axis == -2 else torch.matmul(input, weights.t())
        return input

    return call


def _step(size, count, align_corners, factor):
    """From one element of the result to the next, in elements of the input."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1 / factor if factor else size / count


def _weights(kernel, size, count, step, like):
    """[count, size]: each row sums to 1; where the image shrinks the kernel is wider."""
    center, place = (torch.arange(n, device=like.device, dtype=like.dtype) + 0.5 for n in (count, size))
    distance = (place - center.unsqueeze(-1) * step).abs()
    weights = kernel(distance / max(step, 1.0))
    return weights / weights.sum(-1, keepdim=True)


_nn, _aten = torch._C._nn, torch.ops.aten

REWRITES = {
    **{f: _upsample(f, _linear) for f in (_nn._upsample_bilinear2d_aa, _aten._upsample_bilinear2d_aa)},
    **{f: _upsample(f, _cubic) for f in (_nn._upsample_bicubic2d_aa, _aten._upsample_bicubic2d_aa)},
}
