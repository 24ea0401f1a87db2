"""What is read and written at a place that a tensor of one number tells trains as in PyTorch, at another place each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from torch import nn


def add_to_row(y, t, mask):
    y[t] += 1.0


def scale_in_place_in_a_row(y, t, mask):
    y[1, t] *= y[0, 0].clone()


def divide_an_element(y, t, mask):
    y[t, t, 2] /= 3.0


def subtract_by_select(y, t, mask):
    y.select(1, t).sub_(y[:, 0].clone(), alpha=2)


def write_in_a_loop(y, t, mask):
    for k, place in enumerate((t, t - 1, t - 2)):  # of which one counts from the end
        y[place] = y[place - 1] * 0.5 + k


def masked_by_lengths(y, t, mask):
    masks = torch.ones(4, 3)
    for sample, length in enumerate(t + torch.arange(3)):
        masks[length:, sample] = 0
    y *= masks.t().unsqueeze(-1)


def masked_by_a_list(y, t, mask):
    for sample, length in enumerate((t - torch.tensor([0, 1, 2])).tolist()):
        y[sample, length:] = 0.25


def rows_of_as_many(y, t, mask):
    y[:t] = y[1 : t + 1] * 0.5


def add_to_some_rows(y, t, mask):
    y[t:, 1] += 1.0


def scale_some_columns(y, t, mask):
    y[1, :, :t] *= y[0, 0, 0].clone()


def slices_by_aten(y, t, mask):
    """As torch's associative_scan takes them, without what is usual."""
    before = y.clone()
    y[:, :2] = torch.ops.aten.slice(before, 1, 2) * torch.ops.aten.slice(before, dim=1, end=2)


def told(index, t, mask):
    """The index with what the names in it stand for."""
    if isinstance(index, slice):
        return slice(told(index.start, t, mask), told(index.stop, t, mask))
    if isinstance(index, (tuple, list)):
        return type(index)([told(k, t, mask) for k in index])
    return {"t": t, "mask": mask}[index] if isinstance(index, str) else index


def write(*index, value=lambda y: 0.5):
    def written(y, t, mask):
        y[told(index, t, mask)] = value(y)

    return written


def read(*index):
    """Adds what is read to all."""

    def added(y, t, mask):
        y += y[told(index, t, mask)].square().sum()

    return added


ALL = slice(None)
FUNCTIONS = {  # which change y of [3, 4, 5]; t is 0, 1 or 2, the mask one of 3
    "a number at a place": write("t"),
    "a row at a place": write("t", 1, value=lambda y: y[0, 0]),
    "a row with an axis of its own": write("t", 1, value=lambda y: y[0, :1]),
    "behind an axis": write(ALL, "t", value=lambda y: y[:, 0] + y[0, 1]),
    "behind all axes": write(..., "t"),
    "an element": write("t", "t", "t", value=lambda y: y.sum()),
    "before a new axis": write(None, "t", slice(1, 3), value=lambda y: y[0, 1:3].clone()),
    "a place, then a mask": write("t", ALL, [0, 2], value=lambda y: y[0, :, 1:3]),
    "a mask, then a place": write("mask", "t", value=lambda y: y[0, 0]),
    "a mask behind an axis behind a place": lambda y, t, mask: write("t", ALL, "mask")(y.transpose(0, 2)[:3], t, mask),
    "reads a mask, then a place": read("mask", "t"),
    "reads a place, then a mask": lambda y, t, mask: read("t", "mask")(y[:, :3], t, mask),
    "reads a mask behind an axis behind a place": lambda y, t, mask: read("t", ALL, "mask")(y[:, :, :3], t, mask),
    "lists of places": write((0, "t"), ["t", 1], value=lambda y: y[0, :2].clone()),
    "at an array's places": write(ALL, np.array([0, 2]), value=lambda y: y[:, 1:2] * 0.5),
    "up to a place": write(slice(None, "t"), value=lambda y: y[2, 0]),
    "from a place on, in a column": write(slice("t", None), 1, value=lambda y: y[:1, 2]),
    "between places, behind a place": write("t", slice("t", 3), value=lambda y: y[0, 0].clone()),
    "between places, behind a new axis": write(None, ..., slice(1, "t"), "t", value=lambda y: y[0, 0, 0].clone()),
    "from the end": lambda y, t, mask: write(slice(-1 - t, -1), value=lambda y: y[0].clone() * 0.5)(y, t, mask),
    "masked_by_lengths": masked_by_lengths,
    "masked_by_a_list": masked_by_a_list,
    "rows_of_as_many": rows_of_as_many,
    "add_to_some_rows": add_to_some_rows,
    "scale_some_columns": scale_some_columns,
    "add_to_row": add_to_row,
    "scale_in_place_in_a_row": scale_in_place_in_a_row,
    "divide_an_element": divide_an_element,
    "subtract_by_select": subtract_by_select,
    "write_in_a_loop": write_in_a_loop,
    "slices_by_aten": slices_by_aten,
}


class Places(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(5, 5)

    def forward(self, x, t):
        y = torch.tanh(self.linear(x)).clone()
        self.function(y, t[0], torch.arange(3) != t[1])
        return y * torch.arange(5.0)


def batch(step: int):
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(step))
    return [x, torch.tensor([(1 + step) % 3, step % 3, 0])]


@pytest.mark.parametrize(
    "name",
    usual(FUNCTIONS, "a row at a place", "a mask behind an axis behind a place", "reads a mask, then a place", "add_to_row", "write_in_a_loop", "masked_by_lengths", "rows_of_as_many", "slices_by_aten"),
)  # fmt: skip
def test_what_is_read_and_written_at_a_place_trains_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Places(FUNCTIONS[name]), batch, evaluates=True)


class Beside(nn.Linear):
    """What a slice at t adds; at no place, behind the end or before the beginning, it is empty, and forward may ask for that."""

    def forward(self, x, t):
        y, k = super().forward(x), t.max().item()
        chosen = y[k : k + 1]
        y = torch.cat([y, chosen]).amax(0) + y
        return y * 2 if len(chosen) == 0 else y + chosen.sum(0)


@pytest.mark.parametrize("first", [2, 7])
def test_a_slice_of_one_is_empty_where_there_is_no_such_place(first):
    places = first, -1, 9 - first
    assert_trains_as_in_pytorch(
        lambda: Beside(5, 5), lambda step: [batch(step)[0], torch.full((3,), places[step % 3])], evaluates=True
    )
