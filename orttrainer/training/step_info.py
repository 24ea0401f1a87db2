"""`TrainStepInfo`: where the training stands, for schedulers and loss scalers."""

from __future__ import annotations

from collections.abc import Sequence

from orttrainer.errors import SettingError
from orttrainer.training.optim.config import _OptimizerConfig


class TrainStepInfo:
    """What `_LRScheduler.get_lr` and `LossScaler.update` are told.

    Args:
        optimizer_config: the optimizer's configuration.
        all_finite: whether the gradients of the last update were finite.
        fetches: names of the outputs that `train_step` and `eval_step` return; [] for all.
        optimization_step: number of updates made so far; skipped ones do not count.
        step: number of `train_step` calls so far.

    Raises:
        SettingError: a value of another type, or a negative count.
    """

    def __init__(
        self,
        optimizer_config: _OptimizerConfig,
        all_finite: bool = True,
        fetches: Sequence[str] = (),
        optimization_step: int = 0,
        step: int = 0,
    ):
        if not isinstance(optimizer_config, _OptimizerConfig):
            raise SettingError(f"'optimizer_config' must be a configuration of optim; got {optimizer_config!r}")
        if not isinstance(all_finite, bool):
            raise SettingError(f"'all_finite' must be a bool; got {all_finite!r}")
        if not isinstance(fetches, (list, tuple)) or not all(isinstance(name, str) for name in fetches):
            raise SettingError(f"'fetches' must be a list of output names; got {fetches!r}")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches = list(fetches)
        self.optimization_step = _checked_count("optimization_step", optimization_step)
        self.step = _checked_count("step", step)

    def __repr__(self) -> str:
        return (
            f"TrainStepInfo(step={self.step}, optimization_step={self.optimization_step}, "
            f"all_finite={self.all_finite}, fetches={self.fetches})"
        )


def _checked_count(name: str, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise SettingError(f"{name!r} must be an int >= 0; got {count!r}")
    return count
