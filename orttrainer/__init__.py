"""Train PyTorch and ONNX models through one ONNX training graph, on stock ONNX Runtime."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "ORTTrainer": "orttrainer.trainer",
    "IODescription": "orttrainer.describe",
    "ModelDescription": "orttrainer.describe",
    "generate_sample": "orttrainer.describe",
    "build_gradient": "orttrainer.differentiate",
    "set_seed": "orttrainer.seed",
}

__all__ = [
    "IODescription",
    "ModelDescription",
    "ORTTrainer",
    "__version__",
    "build_gradient",
    "generate_sample",
    "set_seed",
]

if TYPE_CHECKING:
    from orttrainer.describe import IODescription, ModelDescription, generate_sample
    from orttrainer.differentiate import build_gradient
    from orttrainer.seed import set_seed
    from orttrainer.trainer import ORTTrainer


def __getattr__(name: str):
    """Import a public name from its home when it is first used: `import orttrainer` stays light."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'orttrainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
