"""What forward writes into slices lies where PyTorch puts it, and trains as there."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch, vectors
from marks import in_turn, slow
from torch import nn


class Written(nn.Module):
    """x * w, into which `write(y, v)` writes v = x * u."""

    def __init__(self, write):
        super().__init__()
        self.w, self.u, self.write = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6)), write

    def forward(self, x):
        y = x * self.w
        self.write(y, x * self.u)
        return y


def write(*index, value=lambda v: v):
    """Writes `value(v)` into y[index]."""

    def written(y, v):
        y[index] = value(v)

    return written


ALL = slice(None)
WRITES = {
    "begin": write(ALL, slice(2), value=lambda v: v[:, :2]),
    "middle": write(ALL, slice(1, 4), value=lambda v: v[:, :3]),
    "end": write(ALL, slice(-2, None), value=lambda v: v[:, 2:4]),
    "up to the last": write(ALL, slice(1, -1), value=lambda v: v[:, :4]),
    "beyond the end": write(ALL, slice(4, 99), value=lambda v: v[:, :2]),
    "everything": write(ALL, slice(0, 6)),
    "nothing": write(ALL, slice(4, 2), value=lambda v: v[:, :0]),
    "steps": write(ALL, slice(1, None, 2), value=lambda v: v[:, :3]),
    "one": write(ALL, 2, value=lambda v: v[:, 0]),
    "the first": write(ALL, 0, value=lambda v: v[:, 1]),
    "the last": write(ALL, -1, value=lambda v: v[:, 1]),
    "a number": write(ALL, slice(1, 3), value=lambda v: 0.5),
    "a row": write(0, value=lambda v: v[1]),
    "the last row": write(-1, value=lambda v: v[0]),
    "the last but one": write(-2, value=lambda v: v[0]),
    "rows of a symbolic size": write(slice(1, 3), value=lambda v: v[:2]),
    "from a row on": write(slice(3, None), value=lambda v: v[:-3]),
    "the last rows": write(slice(-2, None), value=lambda v: v[:2]),
    "without the last row": write(slice(1, -1), value=lambda v: v[:-2]),
    "a diagonal": lambda y, v: y.diagonal().copy_(v[0]),
    "added to a diagonal": lambda y, v: y.diagonal().add_(v.sum()),
    "a diagonal below": lambda y, v: y.diagonal(-2).fill_(0.5),
    "a diagonal above": lambda y, v: y[3:].diagonal(2).mul_(v[0, :4]),
    "diagonals of matrices": lambda y, v: y.view(-1, 2, 3).diagonal(dim1=1, dim2=2).lerp_(v[:, :2], 0.25),
    "diagonals of other axes": lambda y, v: y.view(-1, 2, 3).diagonal(-1, 0, 2).exp_(),
    "twice": lambda y, v: (write(slice(0, 2), slice(1, 3), value=lambda v: v[:2, :2])(y, v), write(ALL, 2, value=lambda v: v[:, 1])(y, v)),
}  # fmt: skip


@pytest.mark.parametrize("write", in_turn(WRITES))
def test_what_is_written_into_a_slice_trains_as_in_pytorch(write):
    assert_trains_as_in_pytorch(lambda: Written(write), vectors, evaluates=True)


class Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy


def with_hook(y):
    if y.grad_fn is not None:  # PyTorch crashes where nothing has asked for the history of such a view
        y.register_hook(lambda g: g * g.abs())
    return y


class Given(nn.Linear):
    """given(a view that was written to), of a view of [2, 3] numbers each that the layer gives, or of products of these."""

    def __init__(self, view, given):
        super().__init__(3, 3)
        self.view, self.given = view, given

    def forward(self, x):
        y = self.view(super().forward(x.view(-1, 2, 3)))
        y.diagonal(dim1=-2, dim2=-1).add_(1.0)
        y[:, 1] += 0.5
        y.select(-1, 1).mul_(1.5)
        return self.given(y)


SHOWN = {  # to autograd each is a view, whose history it finds anew once it was written to
    "outputs of a layer": lambda y: y,
    "transposed": lambda y: y.mT,
    "products": lambda y: y @ y.mT,
    "products of einsum": lambda y: torch.einsum("bij,bkj->bik", y, y),
    "parts": lambda y: y.view(-1, 6)[:, 1:5].view(-1, 2, 2),
}
GIVEN = {"a Function": Louder.apply, "a hook": with_hook}
FACTORED = SHOWN["products"], lambda y: torch.linalg.qr(y)[1].abs()


@pytest.mark.parametrize("view, given", [*in_turn(SHOWN, GIVEN), slow(*FACTORED)])
def test_a_view_that_was_written_to_trains_as_in_pytorch_where_its_history_is_asked_for(view, given):
    assert_trains_as_in_pytorch(lambda: Given(view, given), vectors, evaluates=given is not with_hook)
