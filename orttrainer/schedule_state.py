"""Where a schedule within a trainer stands, in a state dict: without it a resumed run would begin the schedule anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from orttrainer.state.state_dict import checked_count

__all__ = ["BATCHES", "UPDATES", "StepsMade"]

UPDATES, BATCHES = "Global_Step", "Current_Step"


class StepsMade(NamedTuple):
    """Updates, by which schedules go, and batches."""

    updates: int
    batches: int

    def state(self) -> dict[str, torch.Tensor]:
        """As they are in a state dict."""
        return {name: torch.tensor([made], device="cpu") for name, made in zip((UPDATES, BATCHES), self)}

    @classmethod
    def from_state(cls, state_dict: Any) -> tuple[Any, StepsMade | None]:
        """A state dict without them, and what it says; None where that is nothing.

        Raises:
            StateError: no number of steps. Nothing is loaded.
        """
        if not isinstance(state_dict, Mapping) or UPDATES not in state_dict:  # the engine says what is wrong
            return state_dict, None
        rest = {name: value for name, value in state_dict.items() if name not in (UPDATES, BATCHES)}
        updates = checked_count(UPDATES, state_dict[UPDATES])
        return rest, cls(updates, checked_count(BATCHES, state_dict.get(BATCHES, updates)))
