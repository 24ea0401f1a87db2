"""Optimizers and learning-rate schedules of the second generation."""

from orttrainer.training.optim import config, lr_scheduler
from orttrainer.training.optim.config import AdamConfig, AdamWConfig, LambConfig, SGDConfig, _OptimizerConfig
from orttrainer.training.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_OptimizerConfig",
    "config",
    "lr_scheduler",
]
