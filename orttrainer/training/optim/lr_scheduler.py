"""Learning-rate schedulers by the names of the second generation, thin over `orttrainer.schedules`.

A scheduler is called once a `train_step`, with the number of updates made so far: within a block of
accumulated gradients the rate stays the same, and the first update of a warm-up has the rate 0.
"""

from __future__ import annotations

from orttrainer import schedules
from orttrainer.errors import SettingError, UnsupportedFeatureError
from orttrainer.schedules import Warmup


class _LRScheduler:
    """Base of all schedulers; subclass it for one of your own.

    Example:
        class Halving(optim.lr_scheduler._LRScheduler):
            def get_lr(self, train_step_info):
                return [train_step_info.optimizer_config.lr * 0.5 ** train_step_info.optimization_step]
    """

    def __init__(self):
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info) -> list[float]:
        """The rate of this step, as a list of one float: what a subclass implements.

        Args:
            train_step_info: a `TrainStepInfo`; its `optimization_step` is the number of updates made so far.
        """
        raise UnsupportedFeatureError(
            f"{type(self).__name__} does not implement get_lr(train_step_info) -> [rate]; "
            "use ConstantWarmupLRScheduler or another of orttrainer.training.optim.lr_scheduler"
        )

    def get_last_lr(self) -> list[float]:
        """The rate of the last step, as a list of one float; empty before the first."""
        return list(getattr(self, "_last_lr", []))

    def _step(self, train_step_info) -> list[float]:
        """`get_lr`, remembered for `get_last_lr`."""
        rates = self.get_lr(train_step_info)
        if not isinstance(rates, (list, tuple)) or len(rates) != 1:
            raise SettingError(f"{type(self).__name__}.get_lr must return a list with one float; got {rates!r}")
        self._last_lr = list(rates)
        return self._last_lr


class _WarmupLRScheduler(_LRScheduler):
    """A warm-up of `orttrainer.schedules` that ends with the learning rate of the optimizer's config."""

    def __init__(self, schedule: Warmup):
        super().__init__()
        self._schedule = schedule
        self.total_steps, self.warmup = schedule.total_steps, schedule.warmup

    def get_lr(self, train_step_info) -> list[float]:
        return [self._schedule.rate(train_step_info.optimization_step, train_step_info.optimizer_config.lr)]


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """Warm-up, then the rate of the optimizer's config.

    Args:
        total_steps: number of updates of the whole training, > 0.
        warmup: the part of `total_steps` that is warm-up, in [0, 1).

    Raises:
        SettingError: another type or range.
    """

    def __init__(self, total_steps, warmup=0.002):
        super().__init__(schedules.ConstantWarmup(total_steps, warmup))


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """Warm-up, then `cycles` waves of a cosine between the rate and 0.

    Args:
        total_steps, warmup: as in `ConstantWarmupLRScheduler`. As in legacy `cycles` is the second by position.
        cycles: number of waves; 0.5 falls from the rate to 0 once.
    """

    def __init__(self, total_steps, cycles=0.5, warmup=0.002):
        super().__init__(schedules.CosineWarmup(total_steps, warmup, cycles=cycles))
        self.cycles = cycles


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """Warm-up, then a straight line to 0 at `total_steps`. Arguments as in `ConstantWarmupLRScheduler`."""

    def __init__(self, total_steps, warmup=0.002):
        super().__init__(schedules.LinearWarmup(total_steps, warmup))


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """Warm-up, then (lr - lr_end) * (1 - progress)^power + lr_end.

    Args:
        total_steps, warmup: as in `ConstantWarmupLRScheduler`. As in legacy `lr_end` is the second by position.
        lr_end: the rate at `total_steps` and after; the rate of the optimizer's config must be above it.
        power: 1 is a straight line.
    """

    def __init__(self, total_steps, lr_end=1e-7, power=1.0, warmup=0.002):
        super().__init__(schedules.PolynomialWarmup(total_steps, warmup, lr_end=lr_end, power=power))
        self.lr_end, self.power = lr_end, power
