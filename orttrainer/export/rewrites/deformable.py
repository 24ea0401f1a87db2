"""torchvision's deformable convolution, of which ONNX Runtime's operator asks for a newer opset: sums of products of what is read."""

from __future__ import annotations

import torch

__all__ = ["rewrites"]


def rewrites() -> dict:
    """What to call instead of torchvision's function, where that is there."""
    if not hasattr(torch.ops.torchvision, "deform_conv2d"):
        return {}
    return {torch.ops.torchvision.deform_conv2d: _deform_conv2d}


def _deform_conv2d(
    input, weight, offset, mask, bias, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, offset_groups, use_mask
):  # fmt: skip
    """Y = weight * (mask X at the places of the kernel plus their offsets) + bias."""
    batch, _, *sizes = input.shape
    out_channels, _, *kernel = weight.shape
    rows, columns = offset.shape[-2:]
    offset = offset.reshape(batch * offset_groups, *kernel, 2, rows, columns)
    place = torch.arange(batch * offset_groups, device=input.device).reshape(-1, 1, 1, 1, 1)
    share = torch.ones((), dtype=input.dtype, device=input.device)
    for axis, (stride, pad, dilation) in enumerate([(stride_h, pad_h, dilation_h), (stride_w, pad_w, dilation_w)]):
        of_output = torch.arange(offset.shape[4 + axis], device=input.device) * stride - pad
        of_kernel = torch.arange(kernel[axis], device=input.device) * dilation
        at = of_kernel.reshape([-1] + [1] * (3 - axis)) + of_output.reshape([-1] + [1] * (1 - axis))
        near, part = _neighbors(offset[:, :, :, axis] + at, sizes[axis])
        near, part = (x.unsqueeze(1 - axis) for x in (near, part))  # [taps of y, of x, ...]
        place, share = place * sizes[axis] + near, share * part
    # As rows of one table: a gather along an axis would need an index for each channel.
    table = input.reshape(batch * offset_groups, -1, sizes[0] * sizes[1]).transpose(1, 2).flatten(0, 1)
    read = table.index_select(0, place.flatten()).reshape(*place.shape, -1) * share.unsqueeze(-1)
    read = read.sum((0, 1)).reshape(batch, offset_groups, kernel[0] * kernel[1], rows, columns, -1)
    if use_mask:
        read = read * mask.reshape(batch, offset_groups, -1, rows, columns, 1)
    read = read.permute(0, 1, 5, 2, 3, 4).reshape(
        batch, groups, -1, rows * columns
    )  # [.., channels and kernel, places]
    y = weight.reshape(groups, out_channels // groups, -1) @ read
    return y.reshape(batch, out_channels, rows, columns) + bias.reshape(-1, 1, 1)


def _neighbors(at, size):
    """The two pixels around each position along an axis, and their shares, [2, ...]: 0 for what is not in the picture."""
    first = torch.floor(at.detach())
    near = torch.stack([first, first + 1])
    share = torch.stack([first + 1 - at, at - first])
    inside = (near >= 0) & (near < size)
    return torch.where(inside, near, 0.0).long(), torch.where(inside, share, 0.0)
