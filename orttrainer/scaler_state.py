"""The loss scale in a state dict: without it a run in float16 would not go on exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from orttrainer.arguments import checked_loss_scale
from orttrainer.errors import StateError
from orttrainer.loss_scaler import LossScaler
from orttrainer.state.state_dict import checked_count

__all__ = ["SCALE", "STABLE_STEPS", "checked_scale", "from_state", "scaler_state"]

SCALE, STABLE_STEPS = "Loss_Scale", "Loss_Scale_Stable_Steps"


def scaler_state(scaler) -> dict[str, torch.Tensor]:
    """What a `LossScaler` needs to go on: its scale, and the steps since that has changed.

    {} of a scale that stays as it is, which is the caller's choice, and of other classes, whose state is the caller's.
    """
    if not _moves(scaler):
        return {}
    return {
        SCALE: torch.tensor([scaler.loss_scale_], dtype=torch.float64, device="cpu"),
        STABLE_STEPS: torch.tensor([scaler.stable_steps_], device="cpu"),
    }


def from_state(state_dict: Any, scaler) -> tuple[Any, Callable[[], None]]:
    """A state dict without the loss scale, and a function that has the scaler go on from there, once the rest is loaded.

    Raises:
        StateError: no scale, or no number of steps. Nothing is loaded.
    """
    if not isinstance(state_dict, Mapping):  # the engine says what is wrong
        return state_dict, lambda: None
    rest = {name: value for name, value in state_dict.items() if name not in (SCALE, STABLE_STEPS)}
    if SCALE not in state_dict or not _moves(scaler):
        return rest, lambda: None
    scale = checked_scale(state_dict[SCALE], repr(SCALE))
    steps = checked_count(STABLE_STEPS, state_dict.get(STABLE_STEPS, 0))

    def go_on() -> None:
        scaler.loss_scale_, scaler.stable_steps_ = scale, steps

    return rest, go_on


def checked_scale(scale: Any, name: str) -> float:
    """The loss scale that a state dict has under this name."""
    try:
        return checked_loss_scale(scale)
    except ValueError as error:
        raise StateError(f"{name}: {error}. Nothing was loaded") from error


def _moves(scaler) -> bool:
    return isinstance(scaler, LossScaler) and bool(scaler.is_dynamic_scale_)
