"""What is loaded before the first step, when there is no graph yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from orttrainer.training import _state_layout
from orttrainer.training._counts import Counts


class EarlyLoad(NamedTuple):
    """What `load_state_dict` was given.

    Attributes:
        given: a nested state dict.
        strict: whether other keys than the trainer's are an error.
        weights: names of those that are in the modules already.
        counts: whether the trainer has counts and loss scale already.
    """

    given: dict[str, Any]
    strict: bool
    weights: set[str]
    counts: bool

    def as_it_is(self, weights: Mapping[str, torch.Tensor], counts: Mapping[str, Mapping]) -> dict[str, Any]:
        """It with what the trainer has already as it has it now, so that no later change to that is undone.

        Args:
            weights: those of the modules.
            counts: the sections of the trainer's counts.
        """
        state = _state_layout.with_weights(self.given, weights)
        for name in counts.keys() & state.keys() if self.counts else ():
            state[name] = {key: counts[name].get(key, value) for key, value in state[name].items()}
        return state


def not_sent(early: EarlyLoad | None, counts: Counts, scheduled: bool) -> dict[str, Any]:
    """What no rank sends to the others: moments that were loaded, and the counts that the rates of a schedule depend on."""
    moments = {} if early is None else {"optimizer": _state_layout.section(early.given, "optimizer")}
    return _state_layout.flattened(moments) | (counts.sections()["train_step_info"] if scheduled else {})
