"""`F.unfold`: what windows of images show, by slices.

Torch decomposes it to places that are gathered along one axis, then the other, and ONNX Runtime takes number after number
there; so it adds up their gradient. Along one axis after the other, slices are copied in rows: 3 x 3 windows have six.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import Function

__all__ = ["REWRITES", "im2col"]

_MANY = 32  # taps along an axis, from which on the graph would become large


class _Windows(Function):
    """`_by_slices`, whose gradient is `F.fold`: ONNX Runtime adds up a whole image in the time of one slice of many."""

    @staticmethod
    def forward(ctx, input, *window):
        ctx.sizes, ctx.window = input.shape[-2:], window
        return _by_slices(input, *window)

    @staticmethod
    def backward(ctx, g):
        return torch._C._nn.col2im(g, ctx.sizes, *ctx.window), *[None] * len(ctx.window)


def im2col(input, kernel_size, dilation, padding, stride):
    """torch's im2col. The CUDA provider has no Col2Im; for TorchScript's exporter and in `torch.vmap` no Function has a gradient."""
    differentiated = torch.compiler.is_exporting() and not torch._C._are_functorch_transforms_active()
    unfold = _by_slices if input.is_cuda or not differentiated else _Windows.apply
    windows = unfold(_batch(input, 4), *map(_pair, (kernel_size, dilation, padding, stride)))
    return windows if input.dim() == 4 else windows.squeeze(0)


def _col2im(input, *window):
    """torch's col2im, of one image, too."""
    images = torch._C._nn.col2im(_batch(input, 3), *window)
    return images if input.dim() == 3 else images.squeeze(0)


def _batch(x, dims):
    return x if x.dim() == dims else x.unsqueeze(0)


def _by_slices(input, kernel_size, dilation, padding, stride):
    """[N, C, H, W] -> [N, C * taps, windows]."""
    x = F.pad(input, [n for n in reversed(padding) for _ in range(2)]) if any(padding) else input
    for steps in reversed([*zip(kernel_size, dilation, stride)]):  # the taps of columns go before the rows
        x = _taps(x, 3, *steps)
    return x.flatten(4).flatten(1, 3)


def _taps(x, axis, count, dilation, stride):
    """What each tap reads along an axis, on an axis of their own behind the channels."""
    last = dilation * (count - 1)
    if count > _MANY:
        return x.unfold(axis, last + 1, stride)[..., ::dilation].movedim(-1, 2)
    before = (slice(None),) * axis
    return torch.stack([x[(*before, slice(k, k - last or None, stride))] for k in range(0, last + 1, dilation)], 2)


def _pair(value):
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


REWRITES = {torch._C._nn.col2im: _col2im, torch._C._nn.im2col: im2col}
