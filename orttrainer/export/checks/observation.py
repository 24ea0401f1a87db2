"""What one forward of the module gives and does, to compare a graph with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orttrainer.errors import OrtTrainerError
from orttrainer.export.checks.forwards import AsksForGradients
from orttrainer.export.checks.other_values import behind_zeros
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
    cuts: int  # how often it may have stopped gradients
    places: tuple[tuple[int, int | None], ...]  # see `Places.found`


def observe(wrapper, inputs, hidden_state: bool = True) -> Observation:
    """Run the module once, leaving it as it was.

    Args:
        hidden_state: run it once more, to refuse what computes with anything that the first call left elsewhere than in
            buffers and frozen parameters, also behind zeros; and let the first call print and warn.
    """
    try:
        seen = _observed(wrapper, inputs, hidden_state)
        if hidden_state:
            _look_behind_zeros(wrapper, inputs, seen)
        return seen
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
    seen = mute.differentiates, tuple(mute.decisions), tuple(mute.told), first.touched_attributes, mute.read, mute.cuts
    return Observation(first.outputs, rates, random, first.updated, first.before, *seen, mute.places.found())


def _look_behind_zeros(wrapper, inputs, seen: Observation) -> None:
    """Refuse what only zeros hide of what later calls compute with, unless forward goes another way without these."""
    with behind_zeros(wrapper.module, wrapper.loss_fn) as values:
        if not values:
            return
        try:
            with unchanged(wrapper, inputs) as moved, wrapper.in_mode(), wrapper.gradients():
                first = FirstCall(wrapper, inputs, moved, aloud=False)
                if (tuple(first.mute.decisions), tuple(first.mute.told)) != (seen.decisions, seen.told):
                    return
                later = LaterCalls(first)
            later.check()
        except OrtTrainerError:
            raise
        except Exception:  # the module's own: values that it does not take
            return
