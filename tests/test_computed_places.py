"""Places that forward computes: a later batch of negative ones, which PyTorch refuses and ONNX counts from the end, is an error."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import with_twin
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer.errors import ExecutionError

GOOD = torch.tensor([0, 1, 2, 3, 2, 1])


def spread(places):
    return places[:, None].expand(-1, 4)


READ = {  # of rows h, [6, 4], at places i, [6], of which there are four
    "gather": lambda h, i: h.gather(1, i[:, None]),
    "gather of rows": lambda h, i: h.gather(0, spread(i)),
    "index_select": lambda h, i: torch.index_select(h, dim=1, index=i),
    "take_along_dim of all": lambda h, i: torch.take_along_dim(h, i),
    "index_add": lambda h, i: torch.zeros(4, 4).index_add(0, i, h),
    "index_copy": lambda h, i: torch.zeros(4, 4).index_copy_(0, i, h),
    "index_reduce": lambda h, i: torch.ones(4, 4).index_reduce(0, i, h, "mean"),
    "scatter": lambda h, i: h.scatter(1, i[:, None], 0.5),
    "scatter_add": lambda h, i: torch.zeros(4, 4).scatter_add_(0, spread(i), h),
    "scatter_reduce": lambda h, i: torch.zeros(4, 4).scatter_reduce(0, spread(i), h, "amax"),
    "one_hot": lambda h, i: h * F.one_hot(i, 4),
    "embedding": lambda h, i: F.embedding(i, h[:4], padding_idx=0),
    "embedding_bag": lambda h, i: F.embedding_bag(i[:, None], h[:4], mode="sum"),
    "nll_loss": lambda h, i: F.nll_loss(h, i),
    "cross_entropy": lambda h, i: F.cross_entropy(h, i, ignore_index=7, label_smoothing=0.1),
}
TAKES_LARGER = {"gather of rows", "take_along_dim of all"}
COUNTED = {
    "bincount": lambda h, i: h * torch.bincount(i, minlength=4)[:4],
    "repeat_interleave": lambda h, i: h.repeat_interleave(i, 0),
}
TAKE_NEGATIVE = {
    "x[i]": lambda h, i: h[:, i],
    "index_put": lambda h, i: torch.zeros(4, 4).index_put((i,), h, accumulate=True),
    "take_along_dim": lambda h, i: torch.take_along_dim(h, i[:, None], 1),
    "index_fill": lambda h, i: h.index_fill(1, i, 0.5),
    "take": lambda h, i: h.take(i),
}


class Computed(nn.Module):
    """Every function has a row of `places`, and finds its own in it by less 1."""

    def __init__(self, reads):
        super().__init__()
        self.layer, self.norm, self.reads = nn.Linear(4, 4), nn.BatchNorm1d(4), reads

    def forward(self, x, places):
        h = self.norm(self.layer(x))
        return sum(read(h, row - 1).square().mean() for read, row in zip(self.reads, places))


def made(reads):
    """A trainer, its twin in PyTorch, and a step of both on the same batch."""
    torch.manual_seed(0)
    return with_twin(Computed([*reads]), 0.01)


def xs(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def with_one(place: int, at: int, rows: int) -> torch.Tensor:
    places = GOOD.repeat(rows, 1)
    places[at, 3] = place
    return places + 1


def test_negative_and_too_large_computed_places_are_refused_where_pytorch_refuses_them():
    trainer, twin, step = made(READ.values())
    step(xs(0), GOOD.repeat(len(READ), 1) + 1)
    for at, name in enumerate(READ):
        for place in (-1, 4):
            if place == 4 and name in TAKES_LARGER:
                continue
            refused = xs(1), with_one(place, at, len(READ))
            with pytest.raises((RuntimeError, IndexError)):
                copy.deepcopy(twin)(*refused)
            for call in (trainer.step, trainer.eval_step):
                with pytest.raises(Exception) as raised:
                    call(*refused)
                text = str(raised.value)
                assert "is out of range" in text or "negative" in text, (name, place, text)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])
    step(xs(2), GOOD.flip(0).repeat(len(READ), 1) + 1)


def test_negative_computed_places_are_taken_where_pytorch_takes_them():
    _, _, step = made(TAKE_NEGATIVE.values())
    step(xs(0), GOOD.repeat(len(TAKE_NEGATIVE), 1) + 1)
    for at in range(len(TAKE_NEGATIVE)):
        step(xs(at), with_one(-1 - at % 4, at, len(TAKE_NEGATIVE)))


@pytest.mark.parametrize("read", COUNTED)
def test_what_the_graph_asks_itself_raises_the_error_of_pytorch(read):
    trainer, twin, step = made([COUNTED[read]])
    step(xs(0), GOOD[None] + 1)
    with pytest.raises(RuntimeError) as expected:
        twin(xs(1), with_one(-1, 0, 1))
    with pytest.raises(RuntimeError) as raised:
        trainer.step(xs(1), with_one(-1, 0, 1))
    assert (type(raised.value), str(raised.value)) == (RuntimeError, str(expected.value))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(4, 2, mode="sum")

    def forward(self, places, starts):
        return self.bags(places, starts - 1).square().mean()


def test_bags_that_do_not_ascend_are_refused():
    module = Bags()
    trainer = orttrainer.trainer(module, None, torch.optim.SGD(module.parameters(), 0.1))
    trainer.step(GOOD, torch.tensor([0, 2, 4]) + 1)
    before = copy.deepcopy(module.state_dict())
    for starts in ([0, 4, 2], [0, -2, 4], [0, 2, -1], [-1, 2, 4], [0, 2, 7]):  # PyTorch reads past its memory
        with pytest.raises(ExecutionError, match="is out of range"):
            trainer.step(GOOD, torch.tensor(starts) + 1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    loss, _ = trainer.step(GOOD, torch.tensor([0, 0, 6]) + 1)
    torch.testing.assert_close(
        loss, F.embedding_bag(GOOD, before["bags.weight"], torch.tensor([0, 0, 6]), mode="sum").square().mean()
    )


class Shown(nn.Module):
    """What is looked up is an output, and no part of the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x, places):
        h = self.norm(self.first(x))
        return self.second(h.relu()).square().mean(), h.gather(1, places[:, None] - 1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("place", [-1, 4])
def test_an_output_that_fails_leaves_the_state_as_it_was(optimizer, place):
    module = Shown()
    trainer = orttrainer.trainer(module, None, optimizer(module.parameters(), 0.1))
    trainer.step(xs(0), GOOD + 1)
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(
        ExecutionError, match=r"the state is as it was before. An index .* PyTorch takes no negative place"
    ):
        trainer.step(xs(1), torch.where(torch.arange(6) == 3, place, GOOD) + 1)
    torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
