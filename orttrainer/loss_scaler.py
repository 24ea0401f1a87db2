"""The loss scale of mixed precision, and how it follows what overflows."""

from __future__ import annotations

import math

from orttrainer.errors import InvalidArgumentError

__all__ = ["LossScaler"]


class LossScaler:
    """A loss scale that is halved when gradients overflow, and doubled after a row of steps that do not.

    Args:
        loss_scale_input_name: of the graph's input, `trainer.loss_scale_input_name`; not used here.
        is_dynamic_scale: False keeps the scale as it is.
        loss_scale: to begin with.
        up_scale_window: finite updates in a row after which the scale is doubled.
        min_loss_scale, max_loss_scale: where halving and doubling end.

    Attributes:
        loss_scale_: the scale of the next step.
        stable_steps_: finite updates since the last change.

    Example: `ORTTrainer(..., use_mixed_precision=True, loss_scaler=LossScaler("loss_scale", True))`
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ):
        for name, value in (
            ("loss_scale", loss_scale),
            ("min_loss_scale", min_loss_scale),
            ("max_loss_scale", max_loss_scale),
        ):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise InvalidArgumentError(f"LossScaler: {name} must be a finite number above 0, got {value!r}")
        if not isinstance(is_dynamic_scale, (bool, int)):
            raise InvalidArgumentError(f"LossScaler: is_dynamic_scale must be True or False, got {is_dynamic_scale!r}")
        if min_loss_scale > max_loss_scale:
            raise InvalidArgumentError(
                f"LossScaler: min_loss_scale={min_loss_scale!r} is above max_loss_scale={max_loss_scale!r}"
            )
        if isinstance(up_scale_window, bool) or not isinstance(up_scale_window, int) or up_scale_window < 1:
            raise InvalidArgumentError(
                f"LossScaler: up_scale_window must be a number of steps, an int >= 1; got {up_scale_window!r}"
            )
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = loss_scale
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_ = min_loss_scale
        self.max_loss_scale_ = max_loss_scale
        self.reset()

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Take note of an update: whether all of its gradients were finite."""
        if not self.is_dynamic_scale_:
            return
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Back to the initial scale."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0
