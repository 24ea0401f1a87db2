"""The product of every exporter and the only thing that later stages see of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch
from torch import nn

from orttrainer.export.memory.run_code import Read
from orttrainer.export.values.conditions import CHECKS, Conditions
from orttrainer.export.values.granted import NOT_EMPTY, Granted
from orttrainer.graph.activations import ancestors

__all__ = ["MAX_OPSET", "MIN_OPSET", "ForwardGraph"]

MIN_OPSET, MAX_OPSET = 18, 21  # of what is exported


@dataclass(frozen=True)
class ForwardGraph:
    """A model and its loss in standard ONNX operators, as it trains.

    Attributes:
        model: inputs are the described inputs, in order; outputs the described outputs, the
            loss first, then one output per update, then CHECKS if it `checks`. Parameters and buffers are
            initializers that share memory with the torch tensors. Every Dropout has three
            inputs, a constant rate and a constant True.
        parameters: names of the trainable float initializers that the graph uses.
        buffers: names of the rest of the model's state that the graph reads or updates.
        updates: of a buffer, or of a parameter that forward writes to, the name -> name of the graph output with its new value.
        unread: names of the trainable parameters of the module that the graph does not use.
        decided: names of buffers that the graph is right for as long as they have their values: forward decides by them.
        conditions: what forward decided by values on the first batch; the graph is right for batches on which it decides
            the same.
        granted: what holds of the sizes of inputs that the graph is right for.
        touched: paths of attributes of the module that forward changes itself.
        read: what the code that it ran may read; None where that is not known.
        outside: modules that forward calls and that are no part of the module; their tensors are buffers.
        in_eval_mode: what the module computes otherwise there than the graph with dropout off and running statistics; None:
            nothing, or not known.
        places: names of inputs that forward takes for places along an axis, and how many of these there are, where it says so:
            PyTorch refuses a negative one, the graph counts it from the end.
        exporter: what made the graph: "dynamo", "torchscript" or "onnx".
    """

    model: ir.Model
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updates: dict[str, str] = field(default_factory=dict)
    exporter: str = "onnx"
    unread: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    conditions: Conditions | None = None
    granted: tuple[Granted, ...] = ()
    touched: tuple[str, ...] = ()
    read: Read | None = None
    outside: tuple[nn.Module, ...] = ()
    in_eval_mode: str | None = None
    places: tuple[tuple[str, int | None], ...] = ()

    @property
    def checks(self) -> str | None:
        """The output, bool [1], that tells whether what forward checks of its layers goes as it did on the first batch."""
        return CHECKS if self.conditions is not None and self.conditions.checks else None

    @property
    def decisions(self) -> tuple[str, ...]:
        """Where it decides by values which way it goes, `file:line`; the graph goes one of the ways, and does not ask."""
        if self.conditions is None:
            return ()
        made = enumerate(self.conditions.made)
        return tuple(f"{x.file}:{x.line}" for index, x in made if index not in self.conditions.checks)

    def unchecked(self) -> ForwardGraph:
        """The same without that output, so that the conditions have to be asked."""
        if self.checks is None:
            return self
        graph = self.model.graph
        graph.outputs[:] = [value for value in graph.outputs if value.name != CHECKS]
        needed = ancestors(graph.outputs)
        # The nodes alone: the pass that removes what is unused would take a weight along that only a check reads.
        graph.remove([node for node in graph if node not in needed], safe=True)
        return replace(self, conditions=self.conditions._replace(checks=frozenset()))

    def other_way(self, state: Mapping[str, torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Tells of batches whether it is not right for them, by the decisions that forward makes on them with this state."""
        if self.conditions is None:
            return lambda batch: False
        asked, inputs = self.conditions.asked(), [value.name for value in self.model.graph.inputs]
        return lambda batch: asked.unmet((state | dict(zip(inputs, batch))).__getitem__) is not None

    @functools.cached_property  # asked by every step
    def depends(self) -> bool:
        """Whether there are batches that it is not right for, beside those of which something is empty."""
        return self.conditions is not None or any(statement.text != NOT_EMPTY for statement in self.granted)
