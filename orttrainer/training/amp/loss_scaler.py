"""Loss scalers: what the loss is multiplied with so that small gradients survive in half precision."""

from __future__ import annotations

import math

from orttrainer import loss_scaler
from orttrainer.errors import InvalidArgumentError, SettingError, UnsupportedFeatureError


class LossScaler:
    """Base of all loss scalers; subclass it for one of your own.

    Args:
        loss_scale: the scale of the first step, a finite number > 0.

    Raises:
        SettingError: `loss_scale` is no such number.

    Example:
        class Constant(amp.LossScaler):
            def reset(self):
                pass

            def update(self, train_step_info):
                return self.loss_scale
    """

    def __init__(self, loss_scale: float):
        self._input_name: str | None = None
        self.loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        if not _is_number(loss_scale) or not 0 < loss_scale < math.inf:
            raise SettingError(f"'loss_scale' must be a finite number > 0; got {loss_scale!r}")
        self._loss_scale = float(loss_scale)

    @property
    def input_name(self) -> str | None:
        """Name of the graph input that the scale is fed to; None before the graph exists."""
        return self._input_name

    @input_name.setter
    def input_name(self, input_name: str) -> None:
        if not isinstance(input_name, str) or not input_name:
            raise SettingError(f"'input_name' must be a non-empty str; got {input_name!r}")
        self._input_name = input_name

    def reset(self) -> None:
        """Start again with the scale of the first step: what a subclass implements."""
        raise UnsupportedFeatureError(_abstract(self, "reset()"))

    def update(self, train_step_info) -> float:
        """Take note of a step and return the scale of the next one: what a subclass implements.

        Args:
            train_step_info: a `TrainStepInfo`; its `all_finite` says whether the step's gradients were finite.
        """
        raise UnsupportedFeatureError(_abstract(self, "update(train_step_info) -> scale"))


class DynamicLossScaler(LossScaler):
    """Doubles the scale after so many finite steps, halves it after one that overflowed.

    Args:
        automatic_update: False keeps the scale as it is.
        loss_scale: the scale of the first step.
        up_scale_window: number of finite steps in a row that double it.
        min_loss_scale, max_loss_scale: bounds of what halving and doubling arrive at. The first scale may lie outside.

    Raises:
        SettingError: a value of another type or out of its range.

    Example:
        scaler = amp.DynamicLossScaler(up_scale_window=1000)
        options = ORTTrainerOptions({"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    """

    def __init__(
        self, automatic_update=True, loss_scale=float(1 << 16), up_scale_window=2000, min_loss_scale=1.0,
        max_loss_scale=float(1 << 24),
    ):  # fmt: skip
        if not isinstance(automatic_update, bool):
            raise SettingError(f"'automatic_update' must be a bool; got {automatic_update!r}")
        try:
            self._walk = loss_scaler.LossScaler(
                "loss_scale", automatic_update, loss_scale, up_scale_window, min_loss_scale, max_loss_scale
            )
        except InvalidArgumentError as error:
            raise SettingError(str(error)) from error
        super().__init__(loss_scale)
        self.automatic_update, self.up_scale_window = automatic_update, up_scale_window
        self.min_loss_scale, self.max_loss_scale = min_loss_scale, max_loss_scale

    @property
    def _stable_steps_count(self) -> int:
        """Finite steps since the last change of the scale."""
        return self._walk.stable_steps_

    @_stable_steps_count.setter
    def _stable_steps_count(self, count: int) -> None:
        self._walk.stable_steps_ = count

    def reset(self):
        self._walk.reset()
        self.loss_scale = self._walk.loss_scale_

    def update(self, train_step_info):
        self._walk.loss_scale_ = self.loss_scale
        self._walk.update_loss_scale(bool(train_step_info.all_finite))
        self.loss_scale = self._walk.loss_scale_
        return self.loss_scale


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _abstract(scaler: LossScaler, method: str) -> str:
    return (
        f"{type(scaler).__name__} does not implement {method}. Use DynamicLossScaler "
        "(with automatic_update=False for a scale that stays), or implement it in a subclass of LossScaler."
    )
