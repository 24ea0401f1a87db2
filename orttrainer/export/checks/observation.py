"""What one forward of the module gives and does, to compare a graph with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orttrainer.export.checks.forwards import AsksForGradients
from orttrainer.export.memory.first_call import CallsOthers, FirstCall, SeesGradients
from orttrainer.export.memory.later_calls import LaterCalls
from orttrainer.export.memory.run_code import Read
from orttrainer.export.untouched import unchanged
from orttrainer.export.values.conditions import Condition
from orttrainer.export.values.told import Told

__all__ = ["Observation", "observe"]


@dataclass
class Observation:
    """What one train-mode forward of the module gives and does, its dropout off."""

    outputs: tuple[torch.Tensor, ...] | None  # None: nobody kept them
    rates: tuple[float, ...]
    random: bool  # whether it draws random numbers that are not muted
    updated: dict[str, torch.Tensor]  # qualified name of a buffer or a frozen parameter -> its value after the forward
    before: dict[str, torch.Tensor]
    differentiates: bool  # whether it asks autograd for gradients
    decisions: tuple[Condition, ...]  # by the truth of tensors
    told: tuple[Told, ...]  # numbers, by the values of tensors
    touched: tuple[str, ...]  # paths of attributes that it changes
    read: Read | None  # what the code that it runs may read; None: not known


def observe(wrapper, inputs, hidden_state: bool = True) -> Observation:
    """Run the module once, leaving it as it was.

    Args:
        hidden_state: run it once more, to refuse what computes with anything that the first call left elsewhere than in
            buffers and frozen parameters; and let the first call print and warn.
    """
    try:
        return _observed(wrapper, inputs, hidden_state)
    except AsksForGradients:
        wrapper.differentiates = True
    except SeesGradients:
        wrapper.sees_gradients = True
    except CallsOthers as error:
        wrapper.take_in(error.modules)
    return observe(wrapper, inputs, hidden_state)


def _observed(wrapper, inputs, hidden_state: bool) -> Observation:
    with unchanged(wrapper, inputs) as moved, wrapper.in_mode(), wrapper.gradients():
        first = FirstCall(wrapper, inputs, moved, aloud=hidden_state)
        first.check_trained()
        if hidden_state:
            first.check_apart()
            first.check_forms()
        later = LaterCalls(first) if hidden_state else None
        if hidden_state:
            first.check_seeds()
        random = first.draws()
    if later is not None:
        later.check()
    first.check_versions()
    mute, rates = first.mute, tuple(sorted(first.mute.rates))
    seen = mute.differentiates, tuple(mute.decisions), tuple(mute.told), first.touched_attributes, mute.read
    return Observation(first.outputs, rates, random, first.updated, first.before, *seen)
