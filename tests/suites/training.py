"""Whole models in ORTTrainer beside PyTorch: the same weights, the same batches, the losses of each step."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.errors import ExecutionError, ExportError, GradientError
from suites.outcome import Outcome, State

LEARNING_RATE = IODescription("Learning_Rate", [1], torch.float32)


@dataclass(frozen=True)
class Job:
    """A module that returns its loss first, or with `loss_fn` its prediction, and its batches.

    Attributes:
        axes: per input its name and its axes, a str where they may vary.
        batch: `batch(step)` makes the inputs of one step, in the order of `axes`.
    """

    module: torch.nn.Module
    axes: Mapping[str, list]
    batch: Callable[[int], list[torch.Tensor]]
    loss_fn: Callable | None = None

    def loss(self, module, step: int, dtype=torch.float32) -> torch.Tensor:
        """The loss of one batch in PyTorch."""
        batch = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in self.batch(step)]
        if self.loss_fn is not None:
            return self.loss_fn(module(*batch[:-1]), batch[-1])
        return module(**dict(zip(self.axes, batch)))[0]

    def trainer(self, optimizer: str, attributes=None) -> ORTTrainer:
        description = ModelDescription(
            [IODescription(name, axes) for name, axes in self.axes.items()], [IODescription("loss", [])]
        )
        return ORTTrainer(self.module, self.loss_fn, description, optimizer, attributes, LEARNING_RATE, "cpu")

    def train_in_torch(self, make_optimizer: Callable, steps: int, dtype=torch.float32):
        """Losses, and the trained copy of the module."""
        module = copy.deepcopy(self.module).to(dtype)
        optimizer, losses = make_optimizer(dict(module.named_parameters())), []
        for step in range(steps):
            module.zero_grad()
            loss = self.loss(module, step, dtype)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, module

    def train(self, trainer: ORTTrainer, rate: float, steps: Iterable[int]) -> list[float]:
        return [trainer.train_step(*self.batch(step), torch.tensor([rate])).item() for step in steps]


def failed(sample: str, error: Exception) -> Outcome:
    """The outcome of an error of ORTTrainer's own; any other is raised again."""
    text = " ".join(str(error).split())
    if isinstance(error, ExportError):
        ours = text.startswith("the gradient of parameter")  # exported, and its gradients are not PyTorch's
        return Outcome(sample, State.WRONG if ours else State.NOT_EXPORTED, text)
    if isinstance(error, GradientError):
        return Outcome(sample, State.NO_GRADIENT, text)
    if isinstance(error, ExecutionError) and "NOT_IMPLEMENTED" in text:
        return Outcome(sample, State.NOT_RUN, text)
    raise error


class CountedDropouts(TorchDispatchMode):
    """Counts the masks that PyTorch draws, by rate: below every function that a module may call."""

    def __init__(self):
        super().__init__()
        self.rates: Counter[float] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bernoulli_.float:  # what dropout is made of on the CPU
            self.rates[round(1 - args[1], 6)] += 1
        elif func is torch.ops.aten.native_dropout.default:
            self.rates[round(args[1], 6)] += 1
        return func(*args, **(kwargs or {}))


def dropouts_of(trainer: ORTTrainer) -> Counter[float]:
    """The active dropouts of the trainer's graph, by rate."""
    graph = trainer.onnx_model_.graph
    constants = {i.name: i for i in graph.initializer}
    constants |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    rates = Counter()
    for node in graph.node:
        if node.op_type == "Dropout" and len(node.input) == 3 and _number(constants[node.input[2]]):
            rates[round(float(_number(constants[node.input[1]])), 6)] += 1
    return rates


def _number(tensor):
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor).item()
