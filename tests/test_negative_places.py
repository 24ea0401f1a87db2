"""Numbers of a batch that are places along an axis: of one that there is not, a step raises what PyTorch raises, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from pairs import with_twin
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription, ORTTrainer

GOOD = torch.tensor([0, 1, 2, 3, 2, 1])
READ = {
    "gather": lambda h, i: h.gather(1, i[:, None]),
    "gather of repeated places": lambda h, i: h.gather(0, i[:, None].repeat(1, 4)),
    "index_select": lambda h, i: torch.index_select(h, 0, index=i),
    "index_add": lambda h, i: torch.zeros(8, 4).index_add(0, i, h),
    "index_copy": lambda h, i: torch.zeros(8, 4).index_copy(0, i, h),
    "index_reduce": lambda h, i: torch.ones(8, 4).index_reduce(0, i, h, "mean"),
    "scatter": lambda h, i: torch.zeros(8, 4).scatter(0, i[:, None].expand(-1, 4), h),
    "scatter_add": lambda h, i: torch.zeros(8, 4).scatter_add_(0, i[:, None].expand(-1, 4), h),
    "scatter_reduce": lambda h, i: torch.zeros(8, 4).scatter_reduce(0, i[:, None].expand(-1, 4), h, "amax"),
    "one_hot": lambda h, i: h * F.one_hot(i, 4),
    "bincount": lambda h, i: h * torch.bincount(i, minlength=4)[:4],
}


class Placed(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x, places):
        return self.read(self.layer(x), places).square().sum()


def xs(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def made(read):
    """A trainer, its twin in PyTorch, and a step of both on the same batch."""
    torch.manual_seed(0)
    return with_twin(Placed(read), 0.01)


def with_one(place: int) -> torch.Tensor:
    return torch.where(torch.arange(6) == 3, place, GOOD)


def refused_like(call, twin, *batch) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        twin(*batch)
    with pytest.raises(type(expected.value)) as raised:
        call(*batch)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("case", READ)
def test_a_negative_place_is_refused_as_in_pytorch_and_changes_nothing(case):
    trainer, twin, step = made(READ[case])
    step(xs(0), GOOD)
    refused_like(trainer.step, twin, xs(1), with_one(-1))
    refused_like(trainer.eval_step, twin, xs(1), with_one(-1))
    step(xs(2), GOOD.flip(0))
    for parameter, like in zip(trainer.model.parameters(), twin.parameters()):
        torch.testing.assert_close(parameter, like)


def test_a_class_that_one_hot_does_not_have_is_refused():
    trainer, twin, step = made(READ["one_hot"])
    step(xs(0), GOOD)
    refused_like(trainer.step, twin, xs(1), with_one(4))
    step(xs(2), with_one(0))


def test_places_that_were_floats_are_places():
    trainer, twin, step = made(lambda h, i: h.gather(1, i.long()[:, None]))
    step(xs(0), GOOD.float())
    refused_like(trainer.step, twin, xs(1), with_one(-1).float())


def filled_in_place(h, places):
    places = places.clone()
    places[places < 0] = 0
    return h.gather(1, places[:, None])


@pytest.mark.parametrize(
    "read", [filled_in_place, lambda h, i: h[i], lambda h, i: h.gather(1, i.clamp(min=0)[:, None])]
)
def test_negative_places_that_forward_takes_are_trained_on(read):
    _, _, step = made(read)
    step(xs(0), GOOD)
    for number in range(1, 4):
        step(xs(number), with_one(-number))


def test_a_label_that_the_loss_gathers_by():
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    description = ModelDescription(
        [IODescription("x", ["rows", 4], torch.float32), IODescription("label", ["rows"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", ["rows", 4], torch.float32)],
    )

    def loss(scores, label):
        return -scores.log_softmax(1).gather(1, label.unsqueeze(1)).mean()

    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(module, loss, description, "SGDOptimizer", None, rate, "cpu")
    trainer.train_step(xs(0), GOOD, torch.tensor([0.1]))
    before = trainer.state_dict()
    with pytest.raises(RuntimeError, match="index -1 is out of bounds for dimension 1 with size 4"):
        trainer.train_step(xs(1), with_one(-1), torch.tensor([0.1]))
    assert all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())
