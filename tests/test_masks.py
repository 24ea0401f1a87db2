"""What is read and written at masks, beside other indices, too, trains as in PyTorch, where nothing is chosen as well."""

from __future__ import annotations

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import usual
from torch import nn


def write(*index, value=lambda y, chosen: 0.5, add=False):
    """Writes or adds `value(y, chosen)` at y[index], where callables of (rows, columns, place) stand for masks and places."""

    def written(y, *given):
        at = tuple(k(*given) if callable(k) else k for k in index)
        result = y.clone()
        result[at] = value(y, at) + result[at] if add else value(y, at)
        return result

    return written


def read(*index):
    return lambda y, *given: y[tuple(k(*given) if callable(k) else k for k in index)].square().sum().reshape(1)


def rows(rows, columns, place):
    return rows


def columns(rows, columns, place):
    return columns


def chosen_place(rows, columns, place):
    return place[rows]


def first_place(rows, columns, place):
    return place[:1]


def both(rows, columns, place):
    return rows[:, None] & columns


def one(rows, columns, place):
    """A truth, True of the first batch and False of the second."""
    return columns.any()


def byte(*given):
    return one(*given).to(torch.uint8)


ALL, REST = slice(None), ...
FUNCTIONS = {  # of y of [n, 6], masks of its rows and columns, and a place in each row
    "a number in columns": write(ALL, columns),
    "a number in columns of a tail": write(slice(2, None), columns),
    "a sum in columns": write(ALL, columns, value=lambda y, at: y.sum()),
    "vectors in columns": write(ALL, columns, value=lambda y, at: y[:, :1]),
    "added to columns": write(REST, columns, value=lambda y, at: 1.0, add=True),
    "a number at a place of each row": write(rows, chosen_place),
    "a vector at a place of each row": write(rows, chosen_place, value=lambda y, at: y[at[0], 0]),
    "a number in one column of some rows": write(rows, 2),
    "a number in a column of some rows that is told": write(rows, torch.tensor(2)),
    "added at one place of some rows": write(rows, first_place, value=lambda y, at: 0.5, add=True),
    "a slice of some rows": write(rows, slice(1, 3), value=lambda y, at: y[at[0], :2]),
    "a number in rows": write(rows),
    "vectors in rows": write(rows, value=lambda y, at: 2 * y[at[0]]),
    "rows of half as many axes": lambda y, *given: write(ALL, both)(torch.stack([y, y.sin()]), *given)[1],
    "one of two at masks of both axes": lambda y, *given: write(1, both)(torch.stack([y, y.sin()]), *given)[1],
    "read columns": read(ALL, columns),
    "read a place of each row": read(rows, chosen_place),
    "read one column": read(rows, 0),
    "read a mask of two axes, then a number": lambda y, *given: read(both, 1)(torch.stack([y, y.sin()], -1), *given),
    "read behind a mask of two axes": lambda y, *given: read(ALL, both)(torch.stack([y, y.sin()]), *given),
    "a number everywhere or nowhere": write(one),
    "a vector everywhere or nowhere": write(one, value=lambda y, at: y[0] ** 2),
    "vectors in a tail or nowhere": write(byte, slice(2, None), value=lambda y, at: y[2:] ** 2),
    "added to a column or nowhere": write(REST, 2, one, value=lambda y, at: 1.0, add=True),
    "read all or nothing": read(one),
    "read a column or nothing": read(ALL, None, 1, byte),
    "any of the chosen rows": lambda y, rows, *_: y * (y[rows] > 0).any(0) + (y[rows] > 0).any(),
    "any along several axes": lambda y, rows, *_: (
        y * torch.any(y[rows] > 0, (0,)) * torch.any(y > -1, ())
        + torch.any(y[rows] > 0, (-2, 1))
        + torch.any(y[rows] > 0, (-1, 0), keepdim=True)
    ),
    "filled at chosen rows": lambda y, rows, *_: y.index_fill(0, rows.nonzero()[:, 0], 0.5),
    "in a list or not": lambda y, rows, columns, place: (
        y[torch.isin(place, rows.nonzero())].sum(0) + y.sum() * torch.isin(place, 2, invert=True)[:, None]
    ),
    "places that are not 0": lambda y, *_: (
        y.sum(0) * (y.double() * (y > 0)).nonzero().double().mean().nan_to_num().float()
    ),
    "sums of masks": lambda y, rows, columns, place: y * ((y > 0) + columns) + y * sum([rows, place > 3])[:, None],
    "sorted masks": lambda y, *_: y * (y > 0).sort(1, descending=True)[0] + y.gather(1, (y > 0).argsort(1)),
}
USUAL = (
    "any along several axes",
    "a number in columns", "vectors in columns", "a number in a column of some rows that is told",
    "a number at a place of each row", "read a place of each row",
    "vectors in a tail or nowhere", "read a column or nothing", "any of the chosen rows", "in a list or not", "places that are not 0", "sums of masks", "sorted masks",
)  # fmt: skip


class Masked(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x, columns, place):
        return self.function(self.linear(x), x[:, 0] > 0, columns[0] > 0, place).sum(0, keepdim=True)


def batch(step: int):
    """Without a column in the second, without a row in the third."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8 + step, 6, generator=generator)
    x[:, 0] *= step != 2
    columns = torch.randint(2, (8 + step, 6), generator=generator) * (step != 1)
    return [x, columns, torch.randint(6, (8 + step,), generator=generator)]


@pytest.mark.parametrize("name", usual(FUNCTIONS, *USUAL))
def test_what_is_read_and_written_at_masks_trains_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: Masked(FUNCTIONS[name]), batch, evaluates=True)
