"""Export: a torch module and its loss, or an ONNX model, to a forward graph ending in the loss."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "ForwardGraph": "forward_graph",
    "check_layers": "call",
    "export_module": "module",
    "from_onnx": "from_onnx",
    "named_state": "call",
    "observe_gradients": "check",
}

__all__ = ["ForwardGraph", "check_layers", "export_module", "from_onnx", "named_state", "observe_gradients"]

if TYPE_CHECKING:
    from orttrainer.export.call import check_layers, named_state
    from orttrainer.export.check import observe_gradients
    from orttrainer.export.forward_graph import ForwardGraph
    from orttrainer.export.from_onnx import from_onnx
    from orttrainer.export.module import export_module


def __getattr__(name: str):
    """Import an exporter when it is first used: onnxscript takes a while."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value  # also over a submodule of that name
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
