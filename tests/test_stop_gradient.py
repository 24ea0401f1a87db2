"""`orttrainer::StopGradient` is the identity in the forward pass and a wall in the backward pass."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from orttrainer import build_gradient
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass
from orttrainer.testing import evaluate

TEXT = """
<ir_version: 8, opset_import: ["" : 18, "orttrainer" : 1]>
g (float[2,3] x) => (float y, float[2,3] z) {
  a = Mul(x, x)
  z = orttrainer.StopGradient(a)
  b = Mul(z, x)
  y = ReduceSum<keepdims=0>(b)
}
"""


def test_nothing_flows_back_through_it_and_it_is_gone_before_the_graph_runs():
    gradient = build_gradient(onnx.parser.parse_model(TEXT), of="y", wrt="x")
    assert {node.domain for node in gradient.graph.node} == {""}
    x = np.array([[1, 2, 3], [-1, 0.5, 0]], np.float32)
    values = evaluate(gradient, {"x": x})
    np.testing.assert_allclose(values["y"], (x**3).sum(), rtol=1e-6)
    np.testing.assert_array_equal(values["z"], x * x)
    np.testing.assert_array_equal(values["x_grad"], x * x)  # not 3 x^2


def test_a_stopped_output_keeps_its_name():
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    RemoveGradientMarksPass()(model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
