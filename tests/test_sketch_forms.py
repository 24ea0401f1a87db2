"""Batches of other forms than the first: None, other dtypes, numbers of axes, keys. Each has its own graph, all one state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import orttrainer
from orttrainer.errors import SchemaError

OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


class Masked(nn.Module):
    """Takes a mask, a list of tensors to add, and a dict whose order it goes by, or none of these."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x, mask=None, more=(), named=None):
        y = self.first(x).tanh()
        if mask is not None:
            y = y * mask[..., None]
        for part in more:
            y = y + self.other(part)
        for number, part in enumerate((named or {}).values()):
            y = y + number * part[:, None]
        if x.requires_grad:
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.second(y) + slope.square().mean()
        return self.second(y)


class Twins:
    """A trainer, and a copy of its model that PyTorch trains."""

    def __init__(self, model=None, criterion=F.mse_loss, optimizer="SGD with momentum", **options):
        torch.manual_seed(0)
        self.model, self.criterion = model or Masked(), criterion
        self.twin, make = copy.deepcopy(self.model), OPTIMIZERS[optimizer]
        self.trainer = orttrainer.trainer(self.model, criterion, make(self.model.parameters()), **options)
        self.optimizer, self.blocks = make(self.twin.parameters()), options.get("gradient_accumulation_steps", 1)
        self.batches = 0

    def step(self, inputs, label):
        found, _ = self.trainer.step(inputs, label)
        expected = self.loss(inputs, label)
        (expected / self.blocks).backward()
        self.batches += 1
        if self.batches % self.blocks == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.compare(found, expected)

    def evaluate(self, inputs, label):
        self.compare(self.trainer.eval_step(inputs, label)[0], self.loss(inputs, label))

    def loss(self, inputs, label):
        taken = self.twin(**inputs) if isinstance(inputs, dict) else self.twin(*inputs)
        return self.criterion(taken, label)

    def compare(self, found, expected):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)
        for mine, other in zip(self.model.parameters(), self.twin.parameters()):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def numbers(step, *sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(step))


def x(step):
    return numbers(step, 3 + step % 2, 4)


def row(step):
    return numbers(step + 9, 3 + step % 2)


OTHERS = {
    "None by place": (lambda i: (x(i), row(i)), lambda i: (x(i), None)),
    "None at first": (lambda i: (x(i), None), lambda i: (x(i), row(i))),
    "left out": (lambda i: (x(i), row(i)), lambda i: (x(i),)),
    "None by name": (lambda i: {"x": x(i), "mask": row(i)}, lambda i: {"x": x(i), "mask": None}),
    "a name left out": (lambda i: {"x": x(i)}, lambda i: {"x": x(i), "mask": row(i)}),
    "another dtype": (lambda i: (x(i), row(i)), lambda i: (x(i), row(i) > 0)),
    "a longer list": (lambda i: (x(i), None, [x(i)]), lambda i: (x(i), None, [x(i + 2), x(i)])),
    "None, and a list that trains more": (lambda i: (x(i), None, []), lambda i: (x(i), row(i), [x(i)])),
    "None in a dict": (
        lambda i: {"x": x(i), "named": {"a": row(i), "b": row(i + 2)}}, lambda i: {"x": x(i), "named": None},
    ),
    "another order of a dict": (
        lambda i: (x(i), None, (), {"a": row(i), "b": row(i + 2)}), lambda i: (x(i), None, (), {"b": row(i + 2), "a": row(i)}),
    ),
    "gradients that are asked for": (lambda i: (x(i), row(i)), lambda i: (x(i).requires_grad_(), row(i))),
    "one more axis": (lambda i: (x(i),), lambda i: (numbers(i, 3 + i % 2, 2, 4),)),
}  # fmt: skip


def label_for(inputs):
    given = (inputs["x"] if isinstance(inputs, dict) else inputs[0]).detach()
    return given.cos()[..., :3]


@pytest.mark.parametrize("case", OTHERS)
def test_a_batch_of_another_form_has_a_graph_of_its_own(case, exports):
    twins = Twins(optimizer="Adam" if "None" in case else "SGD with momentum")
    for step, other in enumerate((0, 1, 1, 0, 1)):
        inputs = OTHERS[case][other](step)
        twins.step(inputs, label_for(inputs))
    for other in (0, 1) if "gradients" not in case else ():
        inputs = OTHERS[case][other](3)
        twins.evaluate(inputs, label_for(inputs))
    assert len(exports) == 2


def test_what_is_changed_between_steps_is_followed_in_each_form(exports):
    twins = Twins()
    given = [lambda i: (x(i), row(i)), lambda i: (x(i),)]
    changes = [
        lambda m: None,
        lambda m: m.first.weight.data.mul_(0.5),
        lambda m: setattr(m.second.weight, "data", m.second.weight.data * 2),
        lambda m: m.first.bias.requires_grad_(False),
        lambda m: m.first.bias.requires_grad_(True),
    ]
    step = 0
    for change in changes:
        for form in given:
            twins.step(form(step), label_for(form(step)))
            step += 1
        change(twins.model)
        change(twins.twin)
        twins.optimizer.param_groups[0]["momentum"] = twins.trainer.optimizer.param_groups[0]["momentum"] = (
            0.9 - 0.05 * step
        )
    state = twins.trainer.state_dict()
    twins.trainer.load_state_dict(state)
    for form in given:
        twins.step(form(step), label_for(form(step)))


def test_a_block_of_batches_may_have_several_forms():
    twins = Twins(gradient_accumulation_steps=3)
    for step in range(7):
        inputs = (x(step), row(step)) if step % 2 else (x(step), None)
        twins.step(inputs, label_for(inputs))


def test_labels_may_have_other_dtypes():
    def loss(scores, label):
        return F.cross_entropy(scores, label.long())

    twins = Twins(nn.Linear(4, 3), loss)
    for step, dtype in enumerate((torch.int64, torch.int32, torch.int64, torch.int32)):
        twins.step((x(step),), torch.arange(len(x(step))).to(dtype) % 3)


def test_what_the_module_does_not_take_is_refused_as_ever_and_changes_nothing():
    twins = Twins()
    twins.step((x(0), row(0)), label_for((x(0),)))
    with pytest.raises(SchemaError, match=r"input 'x': expected dtype torch\.float32, got torch\.float64"):
        twins.trainer.step((x(0).double(), row(0)), label_for((x(0),)))
    with pytest.raises(SchemaError, match="step got 7 inputs but takes 3: "):
        twins.trainer.step((x(0), row(0), row(0), row(0), row(0), row(0)), label_for((x(0),)))
    with pytest.raises(SchemaError, match="a batch has a NoneType where a tensor belongs"):
        twins.trainer.step((x(0), row(0)), None)
    twins.step((x(1), row(1)), label_for((x(1),)))
