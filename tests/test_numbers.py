"""What forward decides, and chooses by masks, from constants alone is part of the graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fidelity import RATE, Loss, assert_trains_as_in_pytorch, rebuilt, vectors
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.errors import StateError

ROWS = 8


class Similar(nn.Linear):
    """The similarities of each row with the others, which a mask chooses: NT-Xent (Chen et al. 2020, section 2.1)."""

    def __init__(self, mask):
        super().__init__(6, 6)
        self.mask = mask
        self.where = ~torch.eye(ROWS, dtype=torch.bool)
        self.register_buffer("place", self.where.clone())

    def forward(self, x):
        y = F.normalize(super().forward(x), dim=1)
        return self.mask(self, y @ y.t())


def written_to(layer, y):
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool)
    mask.fill_diagonal_(False)
    return y * mask


def decided(layer, y):
    times = torch.linspace(0, 1, ROWS)
    if not (times[1:] > times[:-1]).all():
        return y
    return y * (2 if torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) else 3) * times.max().item()


CHOICES = {
    "a mask": lambda layer, y: y[~torch.eye(ROWS).bool()].view(ROWS, -1),
    "a mask of columns": lambda layer, y: y[:, torch.arange(ROWS) % 2 == 0],
    "a mask beside places": lambda layer, y: y[torch.tensor([0, 2, 3, 1]), torch.arange(ROWS) < 4],
    "masked_select": lambda layer, y: y.masked_select(torch.ones(ROWS, ROWS).triu(1) > 0).view(4, -1),
    "an attribute": lambda layer, y: y[layer.where].view(ROWS, -1),
    "a buffer": lambda layer, y: y[layer.place].view(ROWS, -1),
    "a mask that is made step by step": written_to,
    "a decision": decided,
    "a list": lambda layer, y: torch.stack([y[k] for k in (torch.arange(4) * 2).tolist()]),
    "a size": lambda layer, y: y[:, : int(torch.tensor([5.5, 3.0]).min())],
}


def described():
    return ModelDescription(
        [IODescription("x", [ROWS, 6], torch.float32)], [IODescription("loss", []), IODescription("y", [])]
    )


def batch(step):
    return [torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step))]


@pytest.mark.parametrize("mask", CHOICES.values(), ids=CHOICES)
def test_a_choice_by_constants_is_that_of_pytorch(mask):
    module, ours = rebuilt(lambda: Similar(mask)), rebuilt(lambda: Similar(mask))
    trainer = make(ours, loss_fn=None, desc=described())
    sgd = torch.optim.SGD(module.parameters(), RATE)
    for step in range(3):
        loss, y = module(*batch(step))
        found_loss, found_y = trainer.train_step(*batch(step), RATE)
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_y, y.detach(), rtol=1e-4, atol=1e-5)
        sgd.zero_grad()
        loss.backward()
        sgd.step()


def test_a_mask_in_a_buffer_that_is_another_later_is_refused_until_it_is_back():
    layer = Similar(CHOICES["a buffer"])
    trainer = make(Loss(layer), loss_fn=None, desc=described())
    trainer.train_step(*batch(0), RATE)
    layer.place.logical_not_()
    with pytest.raises(StateError, match=r"the buffer 'layer\.place', which had other values"):
        trainer.train_step(*batch(1), RATE)
    layer.place.logical_not_()
    trainer.train_step(*batch(1), RATE)


def test_numbers_that_forward_only_reads_are_left_as_they_are():
    layer = Similar(lambda layer, y: y * layer.where.clone().logical_not_() + layer.where.float().add_(1).add(1))
    before = layer.where.clone()
    make(Loss(layer), loss_fn=None, desc=described()).train_step(*batch(0), RATE)
    assert torch.equal(layer.where, before)


class Masked(nn.Linear):
    """By masks of ones, and by numbers of inference mode, in batches of any size."""

    def forward(self, x):
        with torch.inference_mode():
            scale = 0 * torch.rand(len(x), 6) + torch.ones(len(x), 6)
        mask, holed = torch.ones(len(x), 6), torch.ones_like(x)
        holed[:, 0] = 0
        y = super().forward(x) * scale.clone()
        whole = torch.all(mask[:, None].expand(-1, 2, -1) == 1) and mask.bool().all()
        return y.tanh() if whole and not holed.bool().all() else y


def test_masks_of_ones_are_known_whatever_their_sizes(exports):
    assert_trains_as_in_pytorch(lambda: Masked(6, 6), vectors, evaluates=True)
    assert len(exports) == 1
