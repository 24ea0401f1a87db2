"""Layers train on the graph as in PyTorch: what the tests of fidelity share."""

from __future__ import annotations

import copy

import torch
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings

RATE = 0.05


class Loss(nn.Module):
    """loss = mean((layer(x) - 1)^2 + sin(layer(x)))."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        y = self.layer(*inputs)
        return ((y - 1).square() + y.sin()).mean(), y


class Written(nn.Module):
    """layer(x) * code, where forward calls `change(code, mean of layer(x))` first, on a parameter."""

    def __init__(self, change, trained: bool):
        super().__init__()
        self.linear, self.code = nn.Linear(6, 6), nn.Parameter(torch.ones(6), requires_grad=trained)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.change(self.code, y.mean(0))
        return y * self.code


def described(inputs) -> ModelDescription:
    shapes = [["batch", *x.shape[1:]] for x in inputs]
    return ModelDescription(
        [IODescription(f"x{i}", shape, x.dtype) for i, (x, shape) in enumerate(zip(inputs, shapes))],
        [IODescription("loss", []), IODescription("y", [])],
    )


def vectors(step: int) -> list[torch.Tensor]:
    """Another batch size at each step."""
    return [torch.randn(8 + step, 6, generator=torch.Generator().manual_seed(step))]


def rebuilt(make_layer) -> nn.Module:
    """Not a copy: a tensor that a hook computes cannot be copied."""
    torch.manual_seed(0)
    return Loss(make_layer())


def evaluated(module: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What PyTorch gives, of a copy."""
    with torch.no_grad():
        return copy.deepcopy(module).eval()(*inputs)


def trained(module: nn.Module, steps: int = 3):
    """A trainer that has trained it."""
    trainer = make(module, loss_fn=None, desc=described(vectors(0)))
    for step in range(steps):
        trainer.train_step(*vectors(step), RATE)
    return trainer


def assert_trains_as_in_pytorch(make_layer, batch, evaluates: bool):
    """Three steps of SGD, each on `batch(step)`, and an evaluation, if the layer has one that a training graph has too.

    Returns the trainer.
    """
    module, ours = rebuilt(make_layer), rebuilt(make_layer)
    trainer = make(ours, loss_fn=None, desc=described(batch(0)))
    for step in range(3):
        loss, y = module.train()(*batch(step))
        found_loss, found_y = trainer.train_step(*batch(step), RATE)
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_y, y.detach(), rtol=1e-4, atol=1e-5)
        module.zero_grad()
        loss.backward()
        for parameter in (p for p in module.parameters() if p.grad is not None):
            parameter.data.sub_(RATE * parameter.grad)
    state = ours.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    if evaluates:
        expected = module.eval()(*batch(9))[1].detach()  # not under no_grad: forward may ask for gradients
        torch.testing.assert_close(trainer.eval_step(*batch(9))[1], expected, rtol=1e-4, atol=1e-5)
    return trainer


def assert_trains_with_and_without(
    name: str, make_module, shape: list[int], replaces: str | None, some: bool = False
) -> None:
    """Three steps on batches of vectors or images, with the speed pass `name` and without.

    Args:
        replaces: an operator of which it leaves none in the training graph; None if it is no pass of that.
        some: it leaves fewer.
    """
    torch.manual_seed(0)
    reference = make_module()
    modules = [copy.deepcopy(reference) for _ in range(2)]
    description = ModelDescription([IODescription("x", ["n", *shape])], [IODescription("loss", [])])
    choice = OptimizerChoice("SGDOptimizer", clip=False)
    engines = [
        Engine(module, None, description, choice, Settings(disabled_passes=disabled))
        for module, disabled in zip(modules, ((), (name,)))
    ]
    for step in range(3):
        x = torch.randn(4 + step, *shape)
        loss = reference(x)
        reference.zero_grad()
        loss.backward()
        for parameter in reference.parameters():
            parameter.data.sub_(RATE * parameter.grad)
        for engine in engines:
            torch.testing.assert_close(engine.train_step({"x": x}, RATE)[0][0], loss.detach(), rtol=1e-5, atol=1e-6)
    for module in modules:
        for found, expected in zip(module.parameters(), reference.parameters()):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with_it, without = (sum(n.op_type == replaces for n in e.training_graph.graph.graph) for e in engines)
    assert replaces is None or (with_it < without and (some or with_it == 0))
