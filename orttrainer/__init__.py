"""Train PyTorch and ONNX models through one ONNX training graph, on stock ONNX Runtime."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from orttrainer.deferred import defer_symbolic_math

__version__ = "0.1.0"

_HOME = {
    "LossScaler": "orttrainer.loss_scaler",
    "ORTTrainer": "orttrainer.ort_trainer",
    "Recompute": "orttrainer.graph.recompute",
    "IODescription": "orttrainer.describe",
    "ModelDescription": "orttrainer.describe",
    "generate_sample": "orttrainer.describe",
    "build_gradient": "orttrainer.differentiate",
    "load_checkpoint": "orttrainer.checkpoint",
    "save_checkpoint": "orttrainer.checkpoint",
    "profile": "orttrainer.profiling",
    "set_seed": "orttrainer.seed",
    "trainer": "orttrainer.sketch",
}

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "Recompute",
    "__version__",
    "build_gradient",
    "generate_sample",
    "load_checkpoint",
    "profile",
    "save_checkpoint",
    "set_seed",
    "trainer",
]

if TYPE_CHECKING:
    from orttrainer.checkpoint import load_checkpoint, save_checkpoint
    from orttrainer.describe import IODescription, ModelDescription, generate_sample
    from orttrainer.differentiate import build_gradient
    from orttrainer.graph.recompute import Recompute
    from orttrainer.loss_scaler import LossScaler
    from orttrainer.ort_trainer import ORTTrainer
    from orttrainer.profiling import profile
    from orttrainer.seed import set_seed
    from orttrainer.sketch import trainer

defer_symbolic_math()
if "PMI_FD" in os.environ:  # MPICH's mpiexec started this process
    from orttrainer.distributed.early_failure import end_all_ranks_on_failure

    end_all_ranks_on_failure()


def __getattr__(name: str):
    """Import a public name from its home when it is first used: `import orttrainer` stays light."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'orttrainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
