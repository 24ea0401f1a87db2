"""Numbers beyond 0 and 1 in a binary cross-entropy: a step raises what PyTorch raises, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from pairs import with_twin
from torch import nn
from torch.nn import functional as F

from orttrainer.engine.source import Source
from orttrainer.errors import ExecutionError


class Scorer(nn.Module):
    """Its probabilities are those of a sigmoid times `scale`, its targets `label` plus `shift`."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.layer, self.norm, self.reduction = nn.Linear(3, 2), nn.BatchNorm1d(2), reduction

    def forward(self, x, label, scale, shift):
        probability = self.norm(self.layer(x)).sigmoid() * scale
        return F.binary_cross_entropy(probability, label + shift, reduction=self.reduction).sum()


def batch(step: int, scale: float = 1.0, shift: float = 0.0, label: float | None = None):
    draws = torch.Generator().manual_seed(step)
    labels = torch.rand(5, 2, generator=draws)
    if label is not None:
        labels[2, 1] = label
    return torch.randn(5, 3, generator=draws), labels, torch.tensor(scale), torch.tensor(shift)


def made(reduction="mean", **options):
    """A trainer, its twin in PyTorch, and a step of both on the same batch."""
    torch.manual_seed(0)
    return with_twin(Scorer(reduction), 0.1, **options)


def raised_by(call, *given) -> Exception:
    with pytest.raises(Exception) as raised:
        call(*given)
    return raised.value


REFUSED = {
    "inputs above 1": batch(1, scale=3.0),
    "inputs below 0": batch(1, scale=-1e-9),
    "inputs of NaN": batch(1, scale=torch.nan),
    "a label above 1": batch(1, label=1.0001),
    "a label below 0": batch(1, label=-1.0),
    "a label of NaN": batch(1, label=torch.nan),
    "computed targets": batch(1, shift=0.9),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_numbers_beyond_0_and_1_are_refused_as_in_pytorch_and_change_nothing(reduction):
    trainer, twin, step = made(reduction)
    step(*batch(0))
    for refused in REFUSED.values():
        expected = raised_by(copy.deepcopy(twin), *refused)
        for call in (trainer.step, trainer.eval_step):
            error = raised_by(call, *refused)
            assert (type(error), str(error)) == (type(expected), str(expected))
    step(*batch(2))
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


def test_0_and_1_are_taken():
    _, _, step = made("sum")
    step(*batch(0))
    for label in (0.0, 1.0):
        step(*batch(1, scale=0.0, label=label))


def test_accumulated_batches_stay_where_the_next_is_refused():
    trainer, twin, _ = made(gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    trainer.step(*batch(0))
    assert "input should be between 0 and 1" in str(raised_by(trainer.step, *REFUSED["inputs above 1"]))
    trainer.step(*batch(2))
    for given in (batch(0), batch(2)):
        (twin(*given) / 2).backward()
    optimizer.step()
    for parameter, like in zip(trainer.model.parameters(), twin.parameters()):
        torch.testing.assert_close(parameter, like)


def test_what_only_the_graph_refuses_is_an_error_of_ours(monkeypatch):
    trainer, _, step = made()
    step(*batch(0))
    monkeypatch.setattr(Source, "raised", lambda *_, **__: None)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(
        ExecutionError, match="in a binary cross-entropy, inputs or targets that are not between 0 and 1"
    ):
        trainer.step(*REFUSED["inputs above 1"])
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
