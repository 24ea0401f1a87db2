"""Learning rates as functions of the step: warm-up and decay, and any scheduler of PyTorch.

A schedule is called with the number of updates made so far and returns the learning rate of the
next one. It is what `get_lr_this_step` of the first generation takes and what `lr_scheduler` in
the options of the second takes; the classes in `orttrainer.training.optim.lr_scheduler` are thin
over these. A schedule is a function of the step alone, so a run that is resumed goes on exactly.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from orttrainer.errors import SettingError, UnsupportedFeatureError

__all__ = ["ConstantWarmup", "CosineWarmup", "LinearWarmup", "PolynomialWarmup", "TorchSchedule", "Warmup"]


@dataclass(frozen=True)
class Warmup(abc.ABC):
    """A linear warm-up from 0; what comes after it is the subclass's.

        n = warmup * total_steps                    (not rounded)
        rate(s) = lr * s / max(1, n)                where s < n

    The first update of any warm-up has the rate 0: it changes no weight, only the moments.

    Args:
        total_steps: number of updates of the whole training, > 0.
        warmup: the part of `total_steps` that is warm-up, in [0, 1).
        lr: the rate that the warm-up ends with, finite and >= 0. In the options of the second generation it may
            be left out for the `lr` of the optimizer's configuration.

    Raises:
        SettingError: a value of another type or out of its range.

    Example: `get_lr_this_step=LinearWarmup(total_steps=1000, warmup=0.1, lr=1e-3)`
    """

    total_steps: int
    warmup: float = 0.002
    lr: float | None = None

    def __post_init__(self):
        _require(_is_int(self.total_steps) and self.total_steps > 0, "total_steps", self.total_steps, "an int > 0")
        _require(
            _is_number(self.warmup) and 0 <= self.warmup < 1, "warmup", self.warmup, "a part of total_steps in [0, 1)"
        )
        given = self.lr is None or (_is_number(self.lr) and 0 <= self.lr < math.inf)
        _require(given, "lr", self.lr, "a finite number >= 0")

    def __call__(self, step: int) -> float:
        """The learning rate of the update after `step` updates."""
        _require(self.lr is not None, "lr", self.lr, f"given to {type(self).__name__} where it is called by itself")
        return self.rate(step, self.lr)

    def rate(self, step: int, lr: float) -> float:
        """The same with another `lr`."""
        steps = self.warmup * self.total_steps
        if step < steps:
            return lr * step / max(1.0, steps)
        return self.after_warmup(step - steps, self.total_steps - steps, lr)

    @abc.abstractmethod
    def after_warmup(self, step: float, total_steps: float, lr: float) -> float:
        """The rate after the warm-up, both arguments counted from its end."""


@dataclass(frozen=True)
class ConstantWarmup(Warmup):
    """`lr` after the warm-up."""

    def after_warmup(self, step, total_steps, lr):
        return lr


@dataclass(frozen=True)
class LinearWarmup(Warmup):
    """From `lr` to 0 along a straight line; 0 after `total_steps`."""

    def after_warmup(self, step, total_steps, lr):
        return lr * max(0.0, (total_steps - step) / max(1.0, total_steps))


@dataclass(frozen=True)
class CosineWarmup(Warmup):
    """lr * (1 + cos(2 pi * cycles * s / total)) / 2 after the warm-up: by default from `lr` to 0 along half a wave.

    Past `total_steps` the wave goes on, as it did in legacy.
    """

    cycles: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        _require(_is_number(self.cycles) and self.cycles > 0, "cycles", self.cycles, "a number > 0")

    def after_warmup(self, step, total_steps, lr):
        angle = 2.0 * math.pi * self.cycles * step / max(1.0, total_steps)
        return lr * max(0.0, 0.5 * (1.0 + math.cos(angle)))


@dataclass(frozen=True)
class PolynomialWarmup(Warmup):
    """(lr - lr_end) * (1 - s / total)^power + lr_end after the warm-up, then `lr_end`; `lr` must be above it."""

    lr_end: float = 1e-7
    power: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        _require(_is_number(self.lr_end) and self.lr_end >= 0, "lr_end", self.lr_end, "a number >= 0")
        _require(_is_number(self.power) and self.power >= 0, "power", self.power, "a number >= 0")

    def rate(self, step, lr):
        _require(lr > self.lr_end, "lr", lr, f"above lr_end, which is {self.lr_end!r}")
        return super().rate(step, lr)

    def after_warmup(self, step, total_steps, lr):
        if step > total_steps:
            return self.lr_end
        return (lr - self.lr_end) * (1.0 - step / total_steps) ** self.power + self.lr_end


class TorchSchedule:
    """A scheduler of `torch.optim.lr_scheduler` as a function of the step.

    The scheduler runs on an optimizer of its own, which trains nothing. It is stepped forward to the step
    that is asked for, and made anew for an earlier one: exact after a jump or in a resumed run.

    Args:
        make: called with an optimizer; returns the scheduler, new at every call.
        lr: the learning rate that the scheduler starts from.

    Raises:
        SettingError: `make` does not return a scheduler of the optimizer that it was given.
        UnsupportedFeatureError: a scheduler that wants a metric (ReduceLROnPlateau), or that changes the
            momentum as well (OneCycleLR and CyclicLR unless `cycle_momentum=False`).

    Example:
        schedule = TorchSchedule(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=30), lr=0.1)
        options = ORTTrainerOptions({"lr_scheduler": schedule})
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], lr: float):
        _require(callable(make), "make", make, "callable as make(optimizer) -> scheduler")
        _require(_is_number(lr) and 0 <= lr < math.inf, "lr", lr, "a finite number >= 0")
        self._make, self.lr = make, float(lr)
        self._begin()
        self._last = self._rate()

    def __call__(self, step: int) -> float:
        """The learning rate of the update after `step` updates."""
        _require(_is_int(step) and step >= 0, "step", step, "the number of updates made so far, an int >= 0")
        if step < self._step:
            self._begin()
        while self._step < step:
            self._optimizer.step()  # torch warns where a scheduler steps before its optimizer
            self._scheduler.step()
            self._step += 1
            self._check_nothing_else_changed()
        self._last = self._rate()
        return self._last

    def get_last_lr(self) -> list[float]:
        """The rate that was asked for last, in a list as in PyTorch."""
        return [self._last]

    def _begin(self) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros((), device="cpu", requires_grad=True)], lr=self.lr)
        self._group = self._optimizer.param_groups[0]
        self._others = {key: value for key, value in self._group.items() if key not in ("params", "lr")}
        scheduler = self._make(self._optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedFeatureError(
                "ReduceLROnPlateau follows a metric, not the step. Set the rate yourself: subclass "
                "orttrainer.training.optim.lr_scheduler._LRScheduler, or pass the learning rate to train_step."
            )
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise SettingError(
                f"make(optimizer) must return a scheduler of torch.optim.lr_scheduler, got {scheduler!r}"
            )
        if scheduler.optimizer is not self._optimizer:
            raise SettingError(
                "make(optimizer) must make its scheduler on the optimizer that it is given, not on another"
            )
        self._scheduler, self._step = scheduler, 0
        self._check_nothing_else_changed()

    def _rate(self) -> float:
        return float(self._group["lr"])

    def _check_nothing_else_changed(self) -> None:
        if changed := [key for key, value in self._others.items() if self._group[key] != value]:
            raise UnsupportedFeatureError(
                f"{type(self._scheduler).__name__} also changes {', '.join(map(repr, changed))}, which is fixed in the "
                "training graph; only the learning rate can follow a schedule. Pass cycle_momentum=False."
            )


def _require(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise SettingError(f"{name!r} must be {what}; got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
