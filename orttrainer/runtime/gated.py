"""Whether the installed ONNX Runtime adds a product with a scalar in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from orttrainer import runtime
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.gated_add import LEAST_COLUMNS, GatedAddPass

SHAPES = ((3, LEAST_COLUMNS + 1), (2, 5, LEAST_COLUMNS), (7,))


def gate_sums(model: ir.Model, providers: Sequence) -> bool:
    """Let sums with a product in a graph that is about to be run on the CPU be one operator; whether any is."""
    return list(providers) == ["CPUExecutionProvider"] and is_available() and GatedAddPass()(model).modified


@functools.cache
def is_available() -> bool:
    """Whether the operator is there, and gives what product and sum give."""
    try:
        plain, gated = _model(), _model()
        if not GatedAddPass()(gated).modified:
            return False
        rng = np.random.default_rng(0)
        feeds = {v.name: rng.standard_normal(v.shape.numpy(), np.float32) for v in plain.graph.inputs}
        found, expected = (
            runtime.checking_session(ir.to_proto(model).SerializeToString()).run(None, feeds)
            for model in (gated, plain)
        )
        return all(map(np.array_equal, found, expected))
    # ONNX Runtime raises a dozen classes without a common base, and without the operator all works as well.
    except Exception:
        return False


def _model() -> ir.Model:
    """Every form that the pass writes: constant factors and others, sums and differences, several ranks."""
    float32 = ir.TensorType(ir.DataType.FLOAT)
    shapes = {"s": (1,)} | {f"{name}{k}": dims for k, dims in enumerate(SHAPES) for name in "xy"}
    inputs = {name: ir.Value(name=name, type=float32, shape=ir.Shape(dims)) for name, dims in shapes.items()}
    graph = ir.Graph(list(inputs.values()), [], nodes=[], opset_imports={"": 18}, name="probe")
    op = Builder(graph)
    for k, _ in enumerate(SHAPES):
        x, y = inputs[f"x{k}"], inputs[f"y{k}"]
        graph.outputs.append(op.Add(op.Mul(y, 0.3), x))
        graph.outputs.append(op.Sub(x, op.Mul(inputs["s"], y)))
    return ir.Model(graph, ir_version=10)
