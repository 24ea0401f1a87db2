"""What forward decides by the values of tensors: `if`, `assert` and `while` on what only a batch tells.

A trace takes one way. The graph of that way is right for the batches on which forward decides as it did on the first, so
that these conditions are a graph of their own, which the engine asks before each step.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir
import torch
from onnx_ir.passes import common

from orttrainer.errors import UnsupportedModelError
from orttrainer.export.initializers import state_as_inputs
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.graph.passes.random import RANDOM_OPS

__all__ = ["Condition", "Conditions", "Followed", "decides", "place", "taken_out"]

_PASSED = tuple(os.path.join(os.path.dirname(path), "") for path in (os.path.dirname(__file__), torch.__file__))


class Condition(NamedTuple):
    """One decision: where in the source it is made, and how it went."""

    file: str
    line: int
    value: bool


class Conditions(NamedTuple):
    """The decisions of one forward.

    Attributes:
        model: a serialized ONNX model; the described inputs and the state that it reads -> bool [1] for each decision.
        made: how they went when the graph was made.
    """

    model: bytes
    made: tuple[Condition, ...]


def decides(func: Callable, args: Sequence) -> bool:
    """Whether `func` gives Python the truth of a tensor."""
    truth = func is torch.Tensor.__bool__
    return truth or (func is torch.Tensor.item and args[0].dtype == torch.bool)


def place() -> tuple[str, int]:
    """File and line that called, of the nearest that are neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class Followed:
    """The decisions of a trace: it goes the way that a forward went which was observed.

    Attributes:
        observed: what that decided.
        made: what the graph depends on.
        tensors: what that was asked of: bool [1].
    """

    def __init__(self):
        self.observed: tuple[Condition, ...] = ()
        self.begin()

    def begin(self) -> None:
        """Forward is traced from its beginning."""
        self._waiting = defaultdict(list)
        for condition in reversed(self.observed):
            self._waiting[condition[:2]].append(condition)
        self.made: list[Condition] = []
        self.tensors: list[torch.Tensor] = []

    def next(self) -> Condition | None:
        """How it went the next time where the caller is; None if nothing was decided there."""
        waiting = self._waiting[place()]
        return waiting.pop() if waiting else None

    def note(self, condition: Condition, tensor: torch.Tensor) -> None:
        """The graph depends on `condition`, which was asked of `tensor`."""
        self.made.append(condition)
        self.tensors.append((tensor != 0).reshape(1))


def taken_out(model: ir.Model, made: Sequence[Condition], state: Sequence[str]) -> Conditions | None:
    """Take the outputs for `made`, the last ones, out of a forward graph.

    Args:
        state: names of its initializers that change.

    Raises:
        UnsupportedModelError: forward decides by random numbers.
    """
    if not made:
        return None
    copy = model.clone()
    copy.graph.outputs[:] = copy.graph.outputs[-len(made) :]
    RemoveGradientMarksPass()(copy)
    common.RemoveUnusedNodesPass()(copy)
    if any(node.op_type in RANDOM_OPS for node in copy.graph.all_nodes()):
        raise UnsupportedModelError(
            f"forward decides by random numbers (dropout is one), at {made[0].file}:{made[0].line} or after it; a graph "
            "would draw others. Use torch.where or masks instead."
        )
    with state_as_inputs(copy, [name for name in state if name in copy.graph.initializers]):
        for value in [value for value in copy.graph.inputs if not value.uses() and not value.is_graph_output()]:
            copy.graph.inputs.remove(value)
        conditions = Conditions(ir.to_proto(copy).SerializeToString(), tuple(made))
    del model.graph.outputs[-len(made) :]
    common.RemoveUnusedNodesPass()(model)
    return conditions
