"""Recurrent layers with their gradients as graphs of Scans, and the cases that these are compared on."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from cases import recurrent
from onnx_ir.passes import common

from orttrainer.differentiate import differentiate
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.builder import Builder

KINDS = sorted(recurrent.TORCH)
ENDED = np.array([5, 0, 3], np.int32)


def with_gradients(model, *passes):
    """The model with the gradients of its float inputs, given a cotangent of each output, after these passes."""
    model = prepare(ir.from_proto(model))
    graph = model.graph
    floats = [value for value in graph.inputs if value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)]
    op, seeds = Builder(graph), {}
    for value in list(graph.outputs):
        seed = ir.Value(name=f"{value.name}_cotangent", type=value.type, shape=value.shape)
        graph.inputs.append(seed)
        seeds[value] = seed
    for value, gradient in differentiate(op, seeds, floats).items():
        gradient = op.Identity(gradient)
        gradient.name = f"{value.name}_grad"
        graph.outputs.append(gradient)
    for each in passes:
        each(model)
    common.RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)


CASES = [
    *(recurrent.case(kind, direction, direction, **recurrent.RESET[kind])
      for kind in KINDS for direction in ("forward", "reverse", "bidirectional")),
    *(recurrent.case(kind, "bare", "bidirectional", bias=False, states=False, **recurrent.RESET[kind])
      for kind in KINDS),
    *(recurrent.case(kind, "no-bias", bias=False, **recurrent.RESET[kind]) for kind in KINDS),
    *(recurrent.case(kind, "one-time", shape=(1, 3, 2), **recurrent.RESET[kind]) for kind in KINDS),
    *(recurrent.case(kind, f"lengths-{direction}", direction, lengths=recurrent.LENGTHS, **recurrent.RESET[kind])
      for kind in KINDS for direction in ("forward", "bidirectional")),
    recurrent.case("RNN", "relu", activations=["Relu"], options={"nonlinearity": "relu"}),
]  # fmt: skip


UNKNOWN_TO_PYTORCH = [
    *(recurrent.case("GRU", f"reset-before-{direction}", direction, twin=False)
      for direction in ("forward", "reverse", "bidirectional")),
    recurrent.case("GRU", "reset-before-bare", bias=False, states=False, twin=False),
    recurrent.case("GRU", "reset-before-lengths", "bidirectional", lengths=recurrent.LENGTHS, twin=False),
    *(recurrent.case(kind, f"no-length-{direction}", direction, lengths=ENDED, twin=False, **recurrent.RESET[kind])
      for kind in KINDS for direction in ("forward", "reverse")),
    recurrent.case("RNN", "tanh-relu", "bidirectional", activations=["Tanh", "Relu"], twin=False),
]  # fmt: skip
