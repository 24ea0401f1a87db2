"""What a first batch does not show of eval mode, and evaluations in odd places."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from fidelity import RATE, evaluated, rebuilt, trained, vectors
from torch import nn

import orttrainer


class Kept(nn.Module):
    """What `evaluates` makes of the outputs of a layer, and a copy of it, a temperature and a scale of next to nothing."""

    def __init__(self, call, mode=lambda layer: layer.training):
        super().__init__()
        self.linear, self.scale, self.factor = nn.Linear(6, 6), nn.Parameter(torch.full((6,), 1e-6)), 1.0
        self.average = copy.deepcopy(self.linear).requires_grad_(False)
        self.register_buffer("temperature", torch.tensor(1.0))
        self.call, self.mode = call, mode

    def forward(self, x):
        y = self.linear(x) + self.scale
        return y if self.mode(self) else self.call(self, x, y)


def of_a_library(layer) -> bool:
    """Tells the mode by code whose names are not looked at."""
    return vars(layer)["".join(("train", "ing"))]


LATER = {
    "a temperature": (
        lambda layer, x, y: y / layer.temperature, lambda layer: layer.temperature.fill_(3.0),
    ),
    "an average of weights": (
        lambda layer, x, y: layer.average(x), lambda layer: layer.average.load_state_dict({"weight": torch.eye(6), "bias": torch.ones(6)}),
    ),
    "a scale": (
        lambda layer, x, y: y + layer.scale * x, lambda layer: layer.scale.data.fill_(1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [lambda layer: layer.training, of_a_library], ids=["own code", "a library's"])
@pytest.mark.parametrize("later", LATER)
def test_what_the_first_batch_does_not_show(later, mode):
    call, change = LATER[later]
    module = rebuilt(lambda: Kept(call, mode))
    trainer = trained(module, steps=1)
    with torch.no_grad():
        change(module.layer)
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )


def test_what_is_decided_by_values_in_eval_mode_only():
    module = rebuilt(lambda: Kept(lambda layer, x, y: -y if x.abs().max() > 9 else y))
    trainer = trained(module)
    for x in (*vectors(5), 10 * vectors(5)[0]):
        torch.testing.assert_close(tuple(trainer.eval_step(x)), evaluated(module, x), rtol=1e-5, atol=1e-6)


def half(layer, inputs, y):
    return y if of_a_library(layer) else y / 2


def test_a_hook_that_comes_later_and_evaluates_only():
    module = rebuilt(lambda: nn.Linear(6, 6))
    trainer = trained(module)
    trainer.eval_step(*vectors(5))
    module.layer.register_forward_hook(half)
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )


class MergedByTheUser(nn.Linear):
    """As loralib's layers: `eval()` puts the adapter into the weight, `train()` takes it out again."""

    def __init__(self):
        super().__init__(6, 6)
        self.requires_grad_(False)
        self.down, self.up, self.is_merged = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2)), False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (-1.0 if mode else 1.0) * self.up.detach() @ self.down.detach()
            self.is_merged = not mode
        return self

    def forward(self, x):
        y = super().forward(x)
        return (y if self.is_merged else y + x @ self.down.T @ self.up.T) * (2.0 if self.training else 1.0)


def test_a_module_that_the_user_has_put_in_eval_mode_is_left_so():
    module = rebuilt(MergedByTheUser)
    trainer = trained(module)
    module.eval()
    weight, expected = module.layer.weight.clone(), module(*vectors(5))
    trainer.eval_step(*vectors(5))
    torch.testing.assert_close(module.layer.weight, weight)
    assert module.layer.is_merged and not module.training
    torch.testing.assert_close(module(*vectors(5)), expected)


class Softer(nn.Linear):
    """`train` sets what forward reads, from what nothing else reads."""

    temperature, of_eval_mode = 1.0, 1.0

    def train(self, mode=True):
        self.temperature = 1.0 if mode else self.of_eval_mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) / self.temperature


@pytest.mark.parametrize("before", [1.0, 2.0])
def test_what_a_train_of_the_modules_own_reads_is_followed(before):
    module = rebuilt(lambda: Softer(6, 6))
    module.layer.of_eval_mode = before
    trainer = trained(module)
    trainer.eval_step(*vectors(5))
    module.layer.of_eval_mode = 5.0
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_that_is_made_in_the_midst_of_autocast_computes_as_the_model(dtype):
    module = rebuilt(lambda: Kept(lambda layer, x, y: y * layer.factor))
    trainer = trained(module)
    module.layer.factor = 3.0
    with torch.autocast("cpu", dtype):
        found = trainer.eval_step(*vectors(5))
    torch.testing.assert_close(tuple(found), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6)


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return force if self.training else 2 * force


def test_forces_by_an_input_that_the_caller_marked():
    torch.manual_seed(0)
    module = Forces()
    x, y = vectors(0)[0].requires_grad_(), torch.ones(8, 6)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.step(x, y)
    expected = copy.deepcopy(module).eval()(x).detach()
    torch.testing.assert_close(trainer.eval_step(x, y)[1], expected, rtol=1e-5, atol=1e-6)


def test_the_first_call_may_be_an_evaluation_in_inference_mode():
    module = nn.Linear(6, 6)
    trainer = orttrainer.trainer(module, nn.MSELoss(), torch.optim.SGD(module.parameters(), lr=0.1))
    with torch.inference_mode():
        x = torch.randn(4, 6)
        _, found = trainer.eval_step(x, x)
    torch.testing.assert_close(found, evaluated(module, x.clone()), rtol=1e-5, atol=1e-6)


def test_what_raises_in_eval_mode_is_evaluated_as_it_trains(caplog):
    def refuse(*_):
        raise RuntimeError("no labels, no boxes")

    module = rebuilt(lambda: Kept(refuse))
    trainer = trained(module)
    _, found = trainer.eval_step(*vectors(5))
    torch.testing.assert_close(found, module(*vectors(5))[1].detach(), rtol=1e-5, atol=1e-6)
    assert "may do more in eval mode" in caplog.text and "no labels, no boxes" in caplog.text


class Rings(nn.Linear):
    """A time limit ends while it evaluates; of what tells it so no trainer looks at."""

    def forward(self, x):
        if not self.training and os.environ.get("RINGS"):
            signal.raise_signal(signal.SIGALRM)
        return super().forward(x) * (2.0 if self.training else 1.0)


def test_a_time_limit_in_the_first_evaluation_is_no_reason_to_do_without(monkeypatch, caplog):
    def end(*_):
        raise TimeoutError

    module = rebuilt(lambda: Rings(6, 6))
    trainer = trained(module)
    monkeypatch.setenv("RINGS", "1")
    before = signal.signal(signal.SIGALRM, end)
    try:
        with pytest.raises(TimeoutError):
            trainer.eval_step(*vectors(5))
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.delenv("RINGS")
    torch.testing.assert_close(
        tuple(trainer.eval_step(*vectors(5))), evaluated(module, *vectors(5)), rtol=1e-5, atol=1e-6
    )
    assert "do more in eval mode" not in caplog.text


def checked(layer, x, y):
    if x.abs().max() > 99:
        raise layer.error
    return y * 2


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("error", [AssertionError("large"), ValueError("large"), MemoryError("large")], ids=repr)
def test_what_the_module_raises_on_the_first_batch_that_it_evaluates_is_raised(error, steps, caplog):
    module = rebuilt(lambda: Kept(checked))
    module.layer.error = error
    trainer = trained(module, steps)
    x = vectors(5)[0]
    if steps == 0 and isinstance(error, ValueError):
        trainer.train_step(x, RATE)  # else nothing tells it from a module that cannot be called in eval mode
    for _ in range(2):
        with pytest.raises(type(error), match="large"):
            trainer.eval_step(1000 * x)
    torch.testing.assert_close(tuple(trainer.eval_step(x)), evaluated(module, x), rtol=1e-5, atol=1e-6)
    assert "may do more in eval mode" not in caplog.text


def test_a_label_out_of_range_in_the_first_evaluation():
    torch.manual_seed(0)
    module, loss = Kept(lambda layer, x, y: 2 * y), nn.CrossEntropyLoss()
    trainer = orttrainer.trainer(module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    x, label = vectors(0)[0], torch.arange(8) % 6
    trainer.step(x, label)
    with pytest.raises(IndexError, match="out of bounds"):
        trainer.eval_step(x, label + 1)
    torch.testing.assert_close(trainer.eval_step(x, label)[0], loss(copy.deepcopy(module).eval()(x), label).detach())
