"""Parameters and buffers that come, go, or take another form behind the first step or evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
from fidelity import RATE, evaluated, rebuilt, trained, vectors
from small import batch, make
from torch import nn
from torch.nn import functional as F

import orttrainer
from orttrainer.errors import ModelError, StateError


class Grows(nn.Module):
    """Multiplies by all that it has."""

    def __init__(self):
        super().__init__()
        self.linear, self.scales = nn.Linear(6, 6), nn.ParameterList([torch.ones(6)])

    def forward(self, x):
        y = self.linear(x)
        for scale in [*self.scales, *([self.scale] if hasattr(self, "scale") else ())]:
            y = y * scale
        return y


class Asks(Grows):
    """By twice as much in eval mode, of which there is another graph."""

    def forward(self, x):
        return super().forward(x) if self.training else 2 * super().forward(x)


def scale(trained: bool) -> nn.Parameter:
    return nn.Parameter(torch.full((6,), 0.2), requires_grad=trained)


COMING = {
    "a parameter": lambda m, trained: m.register_parameter("scale", scale(trained)),
    "an entry of a list": lambda m, trained: m.scales.append(scale(trained)),
}


@pytest.mark.parametrize("kind", [Grows, Asks])
@pytest.mark.parametrize("change", COMING.values(), ids=COMING)
def test_a_frozen_parameter_that_comes_behind_an_evaluation_is_evaluated_and_trained_with(change, kind):
    module = rebuilt(kind)
    trainer = trained(module, steps=1)
    trainer.eval_step(*vectors(4))
    change(module.layer, False)
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )
    expected = copy.deepcopy(module)(*vectors(6))[0].detach()
    torch.testing.assert_close(trainer.train_step(*vectors(6), RATE)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", COMING.values(), ids=COMING)
def test_a_parameter_that_the_optimizer_does_not_have_is_refused_by_evaluations_too(change):
    torch.manual_seed(0)
    module = Grows()
    x, label = vectors(0)[0], torch.arange(8) % 6
    trainer = orttrainer.trainer(module, nn.CrossEntropyLoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.step(x, label)
    trainer.eval_step(x, label)
    change(module, True)
    for call in (trainer.eval_step, trainer.step):
        with pytest.raises(StateError, match="came into the model after the trainer was made"):
            call(x, label)


class Tempered(nn.Module):
    """Reads a buffer in eval mode only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x):
        y = self.linear(x)
        return y if self.training or self.temperature is None else (y / self.temperature).float()


FORMS = {
    "shape": torch.full((6,), 2.0), "dtype": torch.full((1,), 2.0, dtype=torch.float64), "none": None,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_of_eval_mode_that_takes_another_form_behind_an_evaluation_is_followed(form):
    module = rebuilt(Tempered)
    trainer = trained(module, steps=1)
    trainer.eval_step(*vectors(4))
    for value in (FORMS[form], torch.full((1,), 3.0)):
        module.layer.temperature = value
        torch.testing.assert_close(
            tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
        )


def test_a_buffer_with_which_the_module_cannot_evaluate_is_its_error_until_it_is_put_right():
    module = rebuilt(Tempered)
    trainer = trained(module, steps=1)
    trainer.eval_step(*vectors(4))
    module.layer.temperature = torch.ones(5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            trainer.eval_step(*vectors(5))
    module.layer.temperature = torch.full((1,), 3.0)
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )


def test_a_module_of_which_all_is_frozen_is_evaluated_and_not_trained():
    x, y = batch(0)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).requires_grad_(False)
    trainers = [
        make(model, loss_fn=F.cross_entropy),
        orttrainer.trainer(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)),
    ]
    for trainer, step in zip(trainers, (lambda: trainers[0].train_step(x, y, RATE), lambda: trainers[1].step(x, y))):
        torch.testing.assert_close(trainer.eval_step(x, y)[0], F.cross_entropy(model(x), y))
        with pytest.raises(ModelError, match="nothing to train"):
            step()
