"""What a trainer of the second generation counts beside its engine, in its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from orttrainer.scaler_state import SCALE, STABLE_STEPS, checked_scale
from orttrainer.schedule_state import StepsMade
from orttrainer.state.state_dict import checked_count
from orttrainer.training import _state_layout
from orttrainer.training.amp.loss_scaler import LossScaler
from orttrainer.training.step_info import TrainStepInfo


@dataclass(frozen=True)
class Counts:
    """Steps and updates, and the loss scale with the finite steps since it changed; None without a scaler."""

    optimization_step: int
    step: int
    loss_scale: float | None
    stable_steps: int

    @classmethod
    def of(cls, info: TrainStepInfo, scaler: LossScaler | None) -> Counts:
        """Those of the moment."""
        scale = None if scaler is None else float(scaler.loss_scale)
        return cls(info.optimization_step, info.step, scale, int(getattr(scaler, "_stable_steps_count", 0)))

    def loaded(self, state: Mapping[str, Any]) -> Counts:
        """Those of a state dict; what it lacks as here.

        Raises:
            StateError: one that is none.
        """
        count, steps = _state_layout.count, _state_layout.section(state, "train_step_info")
        saved, scale, stable = _state_layout.section(state, "loss_scaler"), self.loss_scale, self.stable_steps
        if scale is not None and saved:
            stable = count(saved, "stable_steps", "loss_scaler", 0)
            scale = checked_scale(saved.get("loss_scale"), "state_dict[loss_scaler][loss_scale]")
        return Counts(
            count(steps, "optimization_step", "train_step_info", self.optimization_step),
            count(steps, "step", "train_step_info", self.step), scale, stable,
        )  # fmt: skip

    def flat_loaded(self, state: Any) -> tuple[Any, Counts]:
        """A flat state dict without any, and those that it says; what it lacks as here.

        Raises:
            StateError: one that is none.
        """
        state, made = StepsMade.from_state(state)
        updates, batches = made or (self.optimization_step, self.step)
        if not isinstance(state, Mapping):  # the engine says what is wrong
            return state, self
        scale, stable = self.loss_scale, self.stable_steps
        if scale is not None and SCALE in state:
            scale, stable = (
                checked_scale(state[SCALE], repr(SCALE)),
                checked_count(STABLE_STEPS, state.get(STABLE_STEPS, 0)),
            )
        rest = {name: value for name, value in state.items() if name not in (SCALE, STABLE_STEPS)}
        return rest, Counts(updates, batches, scale, stable)

    def flat(self, scheduled: bool) -> dict[str, torch.Tensor]:
        """As they are in a flat state dict: what a schedule, if there is one, and a scaler go on by."""
        found = StepsMade(self.optimization_step, self.step).state() if scheduled else {}
        if self.loss_scale is not None:
            found[SCALE] = torch.tensor([self.loss_scale], dtype=torch.float64, device="cpu")
            found[STABLE_STEPS] = torch.tensor([self.stable_steps], device="cpu")
        return found

    def put(self, info: TrainStepInfo, scaler: LossScaler | None) -> None:
        """Let the trainer go on with these."""
        info.optimization_step, info.step = self.optimization_step, self.step
        if scaler is not None:
            scaler.loss_scale = self.loss_scale
            if hasattr(scaler, "_stable_steps_count"):
                scaler._stable_steps_count = self.stable_steps

    def sections(self) -> dict[str, Any]:
        """As they are in a state dict."""
        found: dict[str, Any] = {"train_step_info": {"optimization_step": self.optimization_step, "step": self.step}}
        if self.loss_scale is not None:
            found["loss_scaler"] = {"loss_scale": self.loss_scale, "stable_steps": self.stable_steps}
        return found
