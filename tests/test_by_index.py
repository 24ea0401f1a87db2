"""Reads and writes by index train like in PyTorch, with other sizes in each batch."""

from __future__ import annotations

import copy

import pytest
import torch
from fidelity import assert_trains_as_in_pytorch
from marks import slow
from torch import nn
from torch.autograd import Function

import orttrainer


def lengths(place):
    return (place[:, None] == torch.arange(4)).sum(0)


def written(x, index, value):
    x[index] = value
    return x


class Subtracts(Function):
    """Takes 1 from the probability of a class, as losses with a gradient of their own do."""

    @staticmethod
    def forward(ctx, x, label):
        y = torch.softmax(x, 1).scatter_add_(1, label, torch.full_like(x, -1))
        ctx.save_for_backward(y)
        return y.square()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None


# Of rows of a batch, [n, 6], and where each goes, [n].
FUNCTIONS = {
    "segment_reduce": lambda x, place: torch.cat(
        [torch.segment_reduce(x, r, lengths=lengths(place), initial=0.25) for r in ("sum", "mean", "prod", "max", "min")]
        + [torch.segment_reduce(x, "max", offsets=torch.tensor([0, 1, 2]), unsafe=True)]
    ),
    "segment_reduce, of ties": lambda x, place: torch.cat(
        [torch.segment_reduce(x[[0, 0, 1, 2, 2, 2]], r, lengths=torch.tensor([3, 3])) for r in ("max", "min")]
    ),
    "segment_reduce, of as many segments as values say": lambda x, place: (
        torch.segment_reduce(x.T, "sum", lengths=torch.bincount(place[:6])).cumsum(0)[-1:].T * place.max()
    ),
    "index_reduce": lambda x, place: torch.cat(
        [x.new_ones(4, 6).index_reduce(0, place, x, r) for r in ("mean", "amax", "amin")]
        + [x.new_zeros(4, 6).index_reduce(0, place, x, "prod", include_self=False)]
    ),
    "scatter_reduce": lambda x, place: torch.cat(
        [
            torch.zeros(4, 6).scatter_reduce(0, place[:, None].expand(-1, 6), x, "mean", include_self=own)
            for own in (True, False)
        ]
    ),
    "put": lambda x, place: torch.zeros(4, 6).put(place, x[:, 0], accumulate=True) + x.put(torch.tensor([3, -1]), x[0, :2]).sum(),
    "combinations": lambda x, place: 0.01 * torch.cat([torch.combinations(x[:, 0]).prod(1), torch.combinations(x[:, 1], 3, True).prod(1)])[:, None],
    "diagonal_scatter": lambda x, place: x.diagonal_scatter(x[0, :3], 3)[:, 2:],
    "index_put, by int32 and int64": lambda x, place: (
        torch.zeros(4, 6).index_put((place[:, None].int(), torch.arange(6)), x, accumulate=True)
        + written(torch.zeros(4, 6), (torch.tensor([2, 0]).int(), torch.tensor([5, 1]).int()), x[0, :2])
        + x[place.int()[:4, None] // 2, torch.arange(6)]
    ),
    "scatter, of the corner of what is larger": lambda x, place: torch.cat(
        [
            x.scatter(1, place[:, None], torch.full_like(x, -1)),
            torch.zeros(4, 6).scatter(0, place[:3, None].sort(0).indices.expand(3, 2), x.detach()),
            x.scatter_reduce(1, place[:, None], x.detach() + 1, "amax"),
            x.scatter_reduce(1, place[:, None], torch.ones(64, 8), "mean"),
            x.clone().scatter_add_(1, place[:, None], torch.full_like(x, -1)),
            x.clone().scatter_(1, place[:, None], torch.full_like(x, -1)),
            Subtracts.apply(x, place[:, None]),
        ]
    ),
    "numbers, as rows of one": lambda x, place: (
        x * x[0, 0].flip(0)
        + x.mean().flip((-1,)) * x.max().scatter(0, place[0] * 0, src=x[0, 1])
        + x.max().clone().scatter_add_(-1, torch.tensor(0), x[1, 1])
        + x.sum().scatter(0, torch.tensor(0), 0.5)
    ),
    "repeat_interleave": lambda x, place: x.repeat_interleave(torch.tensor([2, 0, 1, 1, 3, 0]), dim=1, output_size=7),
}  # fmt: skip


class ByIndex(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x, place):
        return self.function(self.linear(x), place).sum(0, keepdim=True)


def rows(step: int):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8 + step, 6, generator=generator), torch.randint(4, (8 + step,), generator=generator)]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name
        in (
            "segment_reduce",
            "segment_reduce, of ties",
            "index_reduce",
            "combinations",
            "index_put, by int32 and int64",
            "scatter, of the corner of what is larger",
            "numbers, as rows of one",
        )
        else slow(name)
        for name in FUNCTIONS
    ],
)
def test_writes_by_index_train_as_in_pytorch(name):
    assert_trains_as_in_pytorch(lambda: ByIndex(FUNCTIONS[name]), rows, evaluates=True)


class AddsToAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x):
        more = x.sum(0) + self.weight**2
        return 3 * self.weight.sin() + self.weight.index_put((torch.arange(3),), more, accumulate=True)


def test_what_is_added_to_all_there_is_takes_the_place_of_nothing():
    """Unchecked: the check would let another exporter make the graph."""
    x = rows(0)[0][:, :3]
    theirs, ours = AddsToAll(), AddsToAll()
    expected = theirs(x)
    expected.square().sum().backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    trainer = orttrainer.trainer(ours, lambda y, _: y.square().sum(), optimizer, check_export=False)
    before = copy.deepcopy(ours).weight.detach()
    _, found = trainer.step(x, torch.zeros(8))
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(before - ours.weight.detach(), theirs.weight.grad, rtol=1e-5, atol=1e-5)
