"""Views by strides show the memory of their tensor, in whatever order its axes lie, and train as in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch, vectors
from torch import nn

from orttrainer.errors import ExportMismatchError, UnsupportedModelError


class Strided(nn.Module):
    """What `view` makes of y = x * w, of shape [n, 6]."""

    def __init__(self, view):
        super().__init__()
        self.w, self.view = nn.Parameter(torch.rand(6) + 0.5), view

    def forward(self, x):
        return self.view(x * self.w)


def overlapping(x):
    """Longformer's chunks: two rows each, of which the next begins in the middle."""
    size, stride = x.shape, x.stride()
    return x.as_strided((size[0], size[1] - 1, 2, *size[2:]), (stride[0], stride[1], *stride[1:]))


def layer(x, outputs):
    """A layer of [n, 3, 2], whose result is a view of a matrix that no one but torch has."""
    weight, bias = torch.linspace(-1, 2, 2 * outputs).view(outputs, 2), torch.linspace(0, 1, outputs)
    return F.linear(x.view(-1, 3, 2), weight, bias)


def in_parts(x, size):
    """Overlapping rows of three parts of 4 `size` elements each, whose strides have a number in them that is computed of a size."""
    return overlapping(x[: 2 * size].reshape(3, size, 4))


def written(x, size, step):
    """A copy, the first elements of whose windows are larger."""
    x = x.clone()
    x.unfold(1, size, step)[..., 0].mul_(5)
    return x


VIEWS = {
    "windows side by side, written": lambda y: written(y, 3, 3),
    "windows with gaps, written": lambda y: written(y, 1, 2),
    "windows of rows": lambda y: y.t().unfold(0, 2, 2),
    "windows with a gap at the end": lambda y: y.unfold(-1, 2, 3)[:, :, 1] + y.sum().unfold(0, 1, 1),
    "windows of which the last has no gap": lambda y: y[:, :4].unfold(-1, 1, 3),
    "as it lies": lambda y: y.as_strided((y.shape[0], 5, 2), (6, 1, 1)),
    "transposed": lambda y: y.t().as_strided((y.shape[0], 2), (6, 3)),
    "of a transposed view's own strides": lambda y: overlapping(y.view(-1, 3, 2).transpose(1, 2)),
    "heads and rows merged": lambda y: overlapping(y.view(-1, 1, 3, 2).transpose(1, 2).reshape(-1, 3, 2)),
    "heads before rows": lambda y: overlapping(y.view(-1, 3, 2).transpose(0, 1).reshape(3, -1, 2).transpose(0, 1)),
    "of a slice": lambda y: y[:, 2:].as_strided((y.shape[0], 2), (6, 1)),
    "every second of every second": lambda y: y[:, ::2].as_strided((y.shape[0], 2), (6, 4)),
    "from a place": lambda y: torch.as_strided(y, size=(y.shape[0], 2), stride=(6, 2), storage_offset=1),
    "of a layer": lambda y: overlapping(layer(y, 2)),
    "of the rows of a layer": lambda y: overlapping(layer(y, 2).transpose(0, 1)),
    "of a part of a layer": lambda y: overlapping(layer(y, 6).chunk(3, -1)[1]),
    "of a layer, from a place": lambda y: layer(y, 2)[:, 1:].as_strided((y.shape[0], 2), (6, 1), 3),
    "of a layer that is written to": lambda y: overlapping(layer(y, 2).add_(1)),
    "of a sum of products": lambda y: overlapping(torch.einsum("nij,jk->nki", y.view(-1, 3, 2), torch.eye(2) + 1)),
    "by half of a size": lambda y: in_parts(y, torch.div(y.size(0), 2, rounding_mode="trunc")),
    "by half of a size, by Python": lambda y: in_parts(y, int(len(y) / 2)) + in_parts(y, math.trunc(len(y) / 2)),
    "by half of a size, rounded up": lambda y: in_parts(torch.cat([y, y]), math.ceil(len(y) / 2)),
    "by half of a negative number": lambda y: in_parts(y, -torch.div(-len(y), 2, rounding_mode="trunc")),
    "expanded": lambda y: y[:, None].expand(-1, 3, -1).as_strided((y.shape[0], 2, 2), (6, 0, 1)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_by_strides_trains_as_in_pytorch(view):
    assert_trains_as_in_pytorch(lambda: Strided(view), vectors, evaluates=True)


def test_what_a_view_shows_beyond_its_tensor_is_refused_since_pytorch_gives_it_no_gradient():
    with pytest.raises(ExportMismatchError, match="the gradient of parameter"):
        assert_trains_as_in_pytorch(
            lambda: Strided(lambda y: y[:, :2].as_strided((y.shape[0], 2), (6, 1), 3)), vectors, False
        )


def in_place(show, change):
    """A copy, what is shown of which is changed."""

    def written(x):
        x = x.clone()
        change(show(x))
        return x

    return written


LOST = {
    "windows": (in_place(lambda y: y.unfold(1, 3, 1), lambda v: v.add_(1)), r"`add_`\) to windows of `unfold`"),
    "a window": (
        in_place(lambda y: y.unfold(1, 3, 2)[:, 1], lambda v: v.zero_()),
        "to windows of `unfold` that overlap",
    ),
    "nothing yet": (
        in_place(lambda y: y.as_strided((4,), (7,)), lambda v: v.masked_fill_(v > 9, 0)),
        r"`masked_fill_`\) to a view by `as_strided`.*\n.*torch.where",
    ),
}


@pytest.mark.parametrize("view, told", LOST.values(), ids=LOST)
def test_what_is_written_to_a_view_by_strides_is_refused_by_name(view, told):
    """Also where the first batch would not show that it is lost."""
    with pytest.raises(UnsupportedModelError, match=f"forward writes in place.*{told}"):
        assert_trains_as_in_pytorch(lambda: Strided(view), vectors, False)
