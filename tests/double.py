"""Graphs of float64 on ONNX Runtime, as a trainer runs them."""

import onnx_ir as ir

from orttrainer.differentiate.double.kernels import DoubleKernelsPass, lacks_kernels
from orttrainer.graph.optimizers import left_out
from orttrainer.testing.check import _run_onnxruntime


def written_out(model, feeds):
    """Outputs of a float64 model, whose operators without kernels of that type are written out."""
    model = ir.from_proto(model)
    DoubleKernelsPass()(model)
    assert not lacks_kernels(model)
    return _run_onnxruntime(ir.to_proto(model), feeds, left_out(model))
