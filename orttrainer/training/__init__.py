"""The second generation of the interface: `ORTTrainer(model, model_desc, optim_config, loss_fn, options)`.

Scripts that imported `onnxruntime.training` run with `orttrainer.training` in its place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "ORTTrainer": "orttrainer.training.orttrainer",
    "ORTTrainerOptions": "orttrainer.training.orttrainer_options",
    "PropagateCastOpsStrategy": "orttrainer.training.options_schema",
    "TrainStepInfo": "orttrainer.training.step_info",
}
_MODULES = ("amp", "checkpoint", "model_desc_validation", "optim", "orttrainer", "orttrainer_options")

__all__ = [
    "ORTTrainer",
    "ORTTrainerOptions",
    "PropagateCastOpsStrategy",
    "TrainStepInfo",
    "amp",
    "checkpoint",
    "model_desc_validation",
    "optim",
]

if TYPE_CHECKING:
    from orttrainer.training import amp, checkpoint, model_desc_validation, optim
    from orttrainer.training.options_schema import PropagateCastOpsStrategy
    from orttrainer.training.orttrainer import ORTTrainer
    from orttrainer.training.orttrainer_options import ORTTrainerOptions
    from orttrainer.training.step_info import TrainStepInfo


def __getattr__(name: str):
    """Import a public name from its home when it is first used: `import orttrainer.training` stays light."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
