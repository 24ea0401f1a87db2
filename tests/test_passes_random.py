"""Equal nodes are computed once, but each draw of random numbers is a draw of its own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from orttrainer.graph.passes.random import ShareSubexpressionsPass
from orttrainer.testing import evaluate


def test_equal_nodes_on_equal_inputs_become_one():
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[3] x) => (float[3] y, float[1] z) {
      a = Exp(x)
      b = Exp(x)
      y = Mul(a, b)
      c = ReduceSum <keepdims=1> (b)
      z = Neg(c)
    }""")
    feeds = {"x": np.float32([0.5, -1.0, 2.0])}
    before = evaluate(ir.to_proto(model), feeds)
    assert ShareSubexpressionsPass()(model).modified
    assert [node.op_type for node in model.graph].count("Exp") == 1
    for name, value in evaluate(ir.to_proto(model), feeds).items():
        np.testing.assert_array_equal(value, before[name])


def test_nodes_on_equal_constants_of_other_names_become_one():
    """Each builder has constants of its own."""
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[3] x) => (float[3] y, float[3] z) <float one = {1.0}, float other = {1.0}, float zero = {0.0}, float minus = {-0.0}> {
      a = Add(x, one)
      b = Add(x, other)
      y = Mul(a, b)
      c = Mul(x, zero)
      d = Mul(x, minus)
      z = Sub(c, d)
    }""")
    feeds = {"x": np.float32([0.5, -1.0, 2.0])}
    before = evaluate(ir.to_proto(model), feeds)
    assert ShareSubexpressionsPass()(model).modified
    ops = [node.op_type for node in model.graph]
    assert (ops.count("Add"), ops.count("Mul")) == (1, 3)
    for name, value in evaluate(ir.to_proto(model), feeds).items():
        np.testing.assert_array_equal(value, before[name])


def test_two_draws_stay_two():
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[3] x) => (float[3] y) {
      a = RandomUniformLike(x)
      b = RandomUniformLike(x)
      y = Sub(a, b)
    }""")
    ShareSubexpressionsPass()(model)
    assert [node.op_type for node in model.graph].count("RandomUniformLike") == 2
    assert all(set(node.attributes) == set() for node in model.graph)


def test_a_constant_that_is_an_output_stays_and_nobody_is_told(caplog):
    """As a flag that forward sets, of two layers: the line would be onnx-ir's."""
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[3] x) => (float[3] y, bool done, bool other) <bool done = {1}, bool other = {1}> {
      y = Exp(x)
    }""")
    ShareSubexpressionsPass()(model)
    assert [value.name for value in model.graph.outputs] == ["y", "done", "other"]
    assert not caplog.records
