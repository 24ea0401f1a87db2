"""Whether the installed ONNX Runtime transforms half a spectrum back."""

from __future__ import annotations

import functools

import onnx_ir as ir

from orttrainer import runtime
from orttrainer.graph.builder import Builder


@functools.cache
def are_transformed() -> bool:
    """Whether it loads such a transform, which 1.22 refuses."""
    spectrum = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 3, 2]))
    graph = ir.Graph([spectrum], [], nodes=[], opset_imports={"": 18}, name="probe")
    graph.outputs.append(Builder(graph).DFT(spectrum, axis=1, inverse=1, onesided=1))
    try:
        runtime.checking_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    except Exception:  # ONNX Runtime raises a dozen classes without a common base
        return False
    return True
