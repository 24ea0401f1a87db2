"""Export: a torch module and its loss, or an ONNX model, to a forward graph ending in the loss."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "OUTSIDE": "call",
    "ROUNDING": "checks.nearby",
    "Asked": "values.conditions",
    "Beside": "module",
    "Conditions": "values.conditions",
    "ForwardGraph": "forward_graph",
    "LossModule": "call",
    "Read": "memory.run_code",
    "WidenedOperands": "checks.widened",
    "as_real": "initializers",
    "behind_zeros": "checks.other_values",
    "attach_loss": "torch_loss",
    "called": "checks.forwards",
    "check_layers": "call",
    "check_postprocessed": "postprocess",
    "count_outputs": "counted",
    "export_module": "module",
    "from_onnx": "onnx_model",
    "in_train_mode": "call",
    "is_installed": "memory.run_code",
    "is_marked": "call",
    "lacks_loss": "torch_loss",
    "module_of": "memory.run_code",
    "moved": "checks.nearby",
    "named_state": "call",
    "names_in": "memory.run_code",
    "observe_gradients": "checks.observed_gradients",
    "refuse_synchronized": "call",
    "runner_of": "checks.check",
    "with_more_rows": "module",
    "with_others_for": "checks.other_values",
}

__all__ = [
    "OUTSIDE",
    "ROUNDING",
    "Asked",
    "Beside",
    "Conditions",
    "ForwardGraph",
    "LossModule",
    "Read",
    "WidenedOperands",
    "as_real",
    "attach_loss",
    "behind_zeros",
    "called",
    "check_layers",
    "check_postprocessed",
    "count_outputs",
    "export_module",
    "from_onnx",
    "in_train_mode",
    "is_installed",
    "is_marked",
    "lacks_loss",
    "module_of",
    "moved",
    "named_state",
    "names_in",
    "observe_gradients",
    "refuse_synchronized",
    "runner_of",
    "with_more_rows",
    "with_others_for",
]

if TYPE_CHECKING:
    from orttrainer.export.call import (
        OUTSIDE,
        check_layers,
        in_train_mode,
        is_marked,
        named_state,
        refuse_synchronized,
    )
    from orttrainer.export.checks.check import runner_of
    from orttrainer.export.checks.nearby import ROUNDING, moved
    from orttrainer.export.checks.observed_gradients import observe_gradients
    from orttrainer.export.checks.other_values import behind_zeros, with_others_for
    from orttrainer.export.checks.widened import WidenedOperands
    from orttrainer.export.counted import count_outputs
    from orttrainer.export.forward_graph import ForwardGraph
    from orttrainer.export.initializers import as_real
    from orttrainer.export.memory.run_code import Read, is_installed, module_of, names_in
    from orttrainer.export.module import Beside, export_module, with_more_rows
    from orttrainer.export.onnx_model import from_onnx
    from orttrainer.export.postprocess import check_postprocessed
    from orttrainer.export.torch_loss import attach_loss, lacks_loss
    from orttrainer.export.values.conditions import Asked, Conditions


def __getattr__(name: str):
    """Import an exporter when it is first used: onnxscript takes a while."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value  # also over a submodule of that name
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
