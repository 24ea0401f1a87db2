"""The transpose pass removes what does nothing, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from orttrainer.graph.passes.speed.transpose import CancelTransposePairsPass, TransposedProductPass
from orttrainer.testing import evaluate

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[2,3,4] x) => (float[P,Q,R] y) {
  a = Transpose <perm=%s> (x)
  b = Transpose <perm=%s> (a)
  y = Neg(b)
}
"""


@pytest.mark.parametrize(
    "p, q, left",
    [([0, 2, 1], [0, 2, 1], 0), ([1, 2, 0], [2, 0, 1], 0), ([1, 2, 0], [1, 2, 0], 2), ([0, 2, 1], [2, 1, 0], 2)],
)
def test_only_transposes_that_undo_each_other_go(p, q, left):
    model = ir.from_onnx_text(TEXT % (p, q))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    CancelTransposePairsPass()(model)
    common.RemoveUnusedNodesPass()(model)
    assert sum(node.op_type == "Transpose" for node in model.graph) == left
    np.testing.assert_array_equal(evaluate(ir.to_proto(model), feeds)["y"], before)


def test_a_product_that_is_transposed_afterwards_comes_out_transposed():
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[5,2] a, float[5,3] b) => (float[3,2] y) {
      t = Transpose <perm=[1, 0]> (a)
      p = MatMul(t, b)
      y = Transpose <perm=[1, 0]> (p)
    }""")
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((5, n)).astype(np.float32) for name, n in (("a", 2), ("b", 3))}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    assert TransposedProductPass()(model).modified
    common.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    np.testing.assert_allclose(evaluate(ir.to_proto(model), feeds)["y"], before, rtol=1e-6)


def stack(b: str = "B,3,5,9") -> ir.Model:
    return common.ShapeInferencePass()(
        ir.from_onnx_text(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[B,3,5,2] a, float[{b}] b) => (float[B,3,9,2] y) {{
      t = Transpose <perm=[0, 1, 3, 2]> (a)
      p = MatMul(t, b)
      y = Transpose <perm=[0, 1, 3, 2]> (p)
    }}""")
    ).model


def test_products_in_a_stack_come_out_transposed():
    model = stack()
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((4, 3, 5, n)).astype(np.float32) for name, n in (("a", 2), ("b", 9))}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    assert TransposedProductPass()(model).modified
    common.RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]
    np.testing.assert_allclose(evaluate(ir.to_proto(model), feeds)["y"], before, rtol=1e-6)


@pytest.mark.parametrize("b", ["5,9", "B,1,5,9"])
def test_a_product_that_repeats_an_operand_stays(b):
    assert not TransposedProductPass()(stack(b)).modified


def test_a_product_that_is_read_as_it_is_stays():
    model = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[5,2] a, float[5,3] b) => (float[3,2] y, float[2,3] z) {
      t = Transpose <perm=[1, 0]> (a)
      p = MatMul(t, b)
      y = Transpose <perm=[1, 0]> (p)
      z = Neg(p)
    }""")
    assert not TransposedProductPass()(model).modified
