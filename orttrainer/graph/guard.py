"""A node that fails where it should: an assertion within the graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder

CHECK_FAILED = "/forward_checks_hold"  # what the name of a node ends with that fails for this reason only

ENDS_DECREASE = "/ends_do_not_decrease"  # likewise, where groups of rows are split at their ends

REFUSED = "/is_refused"  # likewise, where forward is given numbers that PyTorch refuses; before it stands which

OTHER_SIZES = "/sizes_hold"  # likewise, where a loss decides by sizes within the graph; before it stands what holds


def guard(op: Builder, holds: ir.Value, asked: ir.Value) -> ir.Value:
    """Gather([0], asked and not holds): [1], whatever waits for which never runs where a check that is asked for fails.

    Args:
        holds: bool [1].
        asked: bool [].
    """
    value = op.Gather(np.zeros(1, np.float32), op.Cast(op.And(op.Not(holds), asked), to=ir.DataType.INT64))
    value.producer().name += CHECK_FAILED
    return value
