"""`interpolate` as a product with a matrix for each axis.

With `antialias` the exporters' Resize has other weights; cubic, ONNX Runtime's takes 22 ms (4 x 16 images of 32 x 32, twice as
large) where these products take 0.3. And factors that it takes are of float32.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["REWRITES", "cubic"]


def _linear(x):
    return (1 - x).clamp(min=0)


def cubic(x, a=-0.5):
    """Keys' kernel."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _upsample(original, weights):
    """torch's upsample_bicubic2d and those that end in _aa, whose factors are called by one name or by two.

    Args:
        weights: a function of both sizes, the step, whether corners are aligned, and a tensor whose dtype the matrix has.
    """

    def call(input, output_size=None, align_corners=False, scale_factors=None, scales_w=None, *, scales_h=None):
        if not all(type(size) is int for size in input.shape[-2:]):
            return original(input, output_size, align_corners, scale_factors)
        if not isinstance(scale_factors, (list, tuple)):
            scale_factors = scales_h if scale_factors is None else scale_factors, scales_w
        return _products(input, output_size, align_corners, scale_factors, weights)

    return call


def _by_rounded_factors(original):
    """torch's upsample_bilinear2d and upsample_trilinear3d of float64, by factors that float32 rounds."""

    def call(input, output_size, align_corners, scale_factors=None):
        rounded = any(float(np.float32(factor)) != factor for factor in scale_factors or ())
        known = all(type(size) is int for size in input.shape[2:])
        if not rounded or not known or align_corners or input.dtype != torch.float64:
            return original(input, output_size, align_corners, scale_factors)
        return _products(input, output_size, align_corners, scale_factors, _of_two)

    return call


def _products(input, output_size, align_corners, scale_factors, weights):
    """`input` times a matrix along each of the last axes, of which there are as many as factors."""
    dims = len(scale_factors)
    for place, factor in enumerate(scale_factors):
        axis, size = place - dims, input.shape[place - dims]
        count = int(size * factor) if output_size is None else output_size[place]
        matrix = weights(size, count, _step(size, count, align_corners, factor), align_corners, input)
        if axis == -2:
            input = torch.matmul(matrix, input)
        else:
            input = torch.matmul(input.transpose(axis, -1), matrix.t()).transpose(axis, -1)
    return input


def _step(size, count, align_corners, factor):
    """From one element of the result to the next, in elements of the input."""
    if align_corners:
        return (size - 1) / (count - 1) if count > 1 else 0.0
    return 1 / factor if factor else size / count


def _antialiased(kernel):
    def weights(size, count, step, align_corners, like):
        """[count, size]: each row sums to 1; where the image shrinks the kernel is wider."""
        center, place = (torch.arange(n, device=like.device, dtype=like.dtype) + 0.5 for n in (count, size))
        distance = (place - center.unsqueeze(-1) * step).abs()
        found = kernel(distance / torch.sym_max(step, 1.0))
        return found / found.sum(-1, keepdim=True)

    return weights


def _of_two(size, count, step, align_corners, like):
    """[count, size]: of the two elements around each place; beyond the first and the last of all, of these."""
    at = (torch.arange(count, device=like.device, dtype=like.dtype) + 0.5) * step - 0.5
    distance = at.clamp(0, size - 1).unsqueeze(-1) - torch.arange(size, device=like.device, dtype=like.dtype)
    return _linear(distance.abs())


def _of_four(size, count, step, align_corners, like):
    """[count, size]: of the four elements around each place, the first and the last of all standing for those beyond."""
    at = torch.arange(count, device=like.device, dtype=torch.float64)
    at = at * step if align_corners else (at + 0.5) * step - 0.5
    taps = at.floor().unsqueeze(-1) + torch.arange(-1, 3, device=like.device)
    shares = cubic((at.unsqueeze(-1) - taps).abs(), -0.75)
    hit = taps.clamp(0, size - 1).unsqueeze(-1) == torch.arange(size, device=like.device)
    return (shares.unsqueeze(-1) * hit).sum(1).to(like.dtype)


_nn, _aten = torch._C._nn, torch.ops.aten

REWRITES = {
    **{f: _upsample(f, _antialiased(_linear)) for f in (_nn._upsample_bilinear2d_aa, _aten._upsample_bilinear2d_aa)},
    **{f: _upsample(f, _antialiased(cubic)) for f in (_nn._upsample_bicubic2d_aa, _aten._upsample_bicubic2d_aa)},
    **{f: _upsample(f, _of_four) for f in (_nn.upsample_bicubic2d, _aten.upsample_bicubic2d)},
    **{f: _by_rounded_factors(f) for f in (_nn.upsample_bilinear2d, _nn.upsample_trilinear3d)},
}
