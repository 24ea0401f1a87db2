"""Whether the installed ONNX Runtime adds few numbers at places that repeat one after the other."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from orttrainer import runtime
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.pieces import PIECE

ROWS = (1, 64)  # numbers in each
TIMES = 5


@functools.cache
def adds_in_turn() -> bool:
    """Whether ScatterND loses none of `PIECE` numbers that are added at one place.

    It goes through them with several threads from 210,000 on, in 1.19.2 and 1.31.1, and then loses some in each of 60
    runs. What else may fail, such as an operator that is missing, counts as well.
    """
    try:
        return all(_loses_none(row) for row in ROWS)
    except Exception:  # ONNX Runtime raises a dozen classes without a common base; without this form all works as well
        return False


def _loses_none(row: int) -> bool:
    float32, rows = ir.TensorType(ir.DataType.FLOAT), PIECE // row
    updates = ir.Value(name="updates", type=float32, shape=ir.Shape([rows, row]))
    graph = ir.Graph([updates], [], nodes=[], opset_imports={"": 18}, name="probe")
    op = Builder(graph)
    zeros, places = np.zeros((2, row), np.float32), np.zeros((rows, 1), np.int64)
    graph.outputs.append(op.ScatterND(zeros, places, updates, reduction="add"))
    session = runtime.checking_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    ones = {"updates": np.ones((rows, row), np.float32)}
    return all(np.all(session.run(None, ones)[0][0] == rows) for _ in range(TIMES))
