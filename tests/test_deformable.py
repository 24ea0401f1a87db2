"""torchvision's deformable convolution trains, written out; where torchvision is not installed, an operator of its name does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from in_step import check_equal, step
from torch import library, nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.export.rewrites import deformable

_SCHEMA = (
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, "
    "int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask) -> Tensor"
)


def reference(x, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask):
    """A convolution of what `grid_sample` reads for each tap."""
    n, channels, height, width = x.shape
    (_, _, kh, kw), (rows, columns) = weight.shape, offset.shape[-2:]
    parts = x.reshape(n * offset_groups, -1, height, width)
    offset = offset.reshape(n * offset_groups, kh, kw, 2, rows, columns)
    taps = []
    for i in range(kh):
        for j in range(kw):
            y_at = offset[:, i, j, 0] + (torch.arange(rows) * sh - ph + i * dh).unsqueeze(-1)
            x_at = offset[:, i, j, 1] + torch.arange(columns) * sw - pw + j * dw
            grid = torch.stack([(2 * x_at + 1) / width - 1, (2 * y_at + 1) / height - 1], -1)
            tap = F.grid_sample(parts, grid.to(x.dtype), align_corners=False).reshape(
                n, offset_groups, -1, rows, columns
            )
            taps.append(
                tap * mask.reshape(n, offset_groups, kh * kw, 1, rows, columns)[:, :, i * kw + j] if use_mask else tap
            )
    read = torch.stack([tap.reshape(n, channels, rows, columns) for tap in taps], 2).flatten(1, 2)
    return F.conv2d(read, weight.reshape(len(weight), -1, 1, 1), bias, groups=groups)


try:
    import torchvision  # noqa: F401
except ImportError:
    _library = library.Library("torchvision", "FRAGMENT")
    _library.define(_SCHEMA)
    _library.impl("deform_conv2d", reference, "CompositeImplicitAutograd")

FORMS = {
    "plain": ((1, 1, 1, 1, 1, 1, 1, 1), False),
    "strides and weight groups": ((2, 1, 1, 0, 1, 2, 2, 1), True),
    "offset groups": ((1, 2, 2, 2, 1, 1, 1, 2), True),
    "both groups": ((2, 2, 0, 0, 1, 1, 4, 4), True),
}


def of_form(form, dtype=torch.float64, at=None):
    (sh, sw, ph, pw, dh, dw, groups, offset_groups), use_mask = form
    x, weight = torch.randn(2, 4, 7, 8, dtype=dtype), torch.randn(8, 4 // groups, 3, 2, dtype=dtype)
    rows, columns = F.conv2d(x[:, :1], weight[:1, :1], None, (sh, sw), (ph, pw), (dh, dw)).shape[-2:]
    offset = 2 * torch.randn(2, offset_groups * 12, rows, columns, dtype=dtype) if at is None else None
    offset = torch.full((2, offset_groups * 12, rows, columns), at, dtype=dtype) if offset is None else offset
    mask = torch.randn(2, offset_groups * 6 if use_mask else 1, rows, columns, dtype=dtype)
    bias = torch.randn(8, dtype=dtype)
    return [x, weight, offset, mask, bias], (sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_convolution_and_its_gradients_are_those_of_what_is_read(form):
    torch.manual_seed(0)
    tensors, numbers = of_form(form)
    used = [x.requires_grad_() for x in tensors[: 5 if numbers[-1] else 3]]
    results = [function(*tensors, *numbers) for function in (deformable._deform_conv2d, reference)]
    torch.testing.assert_close(*results)
    cotangent = torch.randn_like(results[0])
    for found, expected in zip(*(torch.autograd.grad(y, used, cotangent) for y in results)):
        torch.testing.assert_close(found, expected)


def test_offsets_of_whole_pixels_have_the_slope_towards_the_next():
    """As in torchvision: layers begin with offsets of 0."""
    tensors, numbers = of_form(FORMS["plain"], at=0.0)
    there = tensors[2].requires_grad_()
    (found,) = torch.autograd.grad(deformable._deform_conv2d(*tensors, *numbers).sum(), there)
    little = (there + 1e-6).detach().requires_grad_()
    (expected,) = torch.autograd.grad(reference(*tensors[:2], little, *tensors[3:], *numbers).sum(), little)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class Deformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset, self.mask = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(3, 9, 3, padding=1)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        mask = self.mask(x).sigmoid()
        y = torch.ops.torchvision.deform_conv2d(
            x, self.conv.weight, self.offset(x), mask, self.conv.bias, 1, 1, 1, 1, 1, 1, 1, 1, True
        )
        return y.square().mean()


def test_a_deformable_layer_trains_as_in_pytorch():
    torch.manual_seed(0)
    module = Deformed()
    twin = copy.deepcopy(module)
    description = ModelDescription([IODescription("x", ["n", 3, 6, 6])], [IODescription("loss", [])])
    engine = Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    for size in (2, 3, 2):
        step(engine, twin, {"x": torch.randn(size, 3, 6, 6)}, 0.1)
    check_equal(module, twin)
