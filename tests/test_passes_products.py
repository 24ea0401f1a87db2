"""The passes for products of unequal operands compute what they replace, and leave alone what does not allow it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes import common

from orttrainer.graph.passes.speed import products
from orttrainer.testing import evaluate

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(products.ScaleSmallOperandPass, "LARGE", 12)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def rewritten(text: str, rewrite, feeds: dict[str, np.ndarray]) -> list[str]:
    """Operators of the graph after the pass, whose outputs are as before."""
    model = ir.from_onnx_text('<ir_version: 8, opset_import: ["" : 18]>\n' + text)
    before = evaluate(ir.to_proto(model), feeds)
    rewrite(model)
    common.RemoveUnusedNodesPass()(model)
    after = evaluate(ir.to_proto(model), feeds)
    assert before.keys() == after.keys()
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=2e-6, atol=2e-6)  # another order of products
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(
    "shape, declared", [((4, 1), "float[4,1]"), ((), "float"), ((1,), "float[1]"), ((1, 1), "float[1,1]")]
)
@pytest.mark.parametrize("first", ["q, c", "c, q"])
def test_the_scale_of_a_large_operand_goes_to_the_small_ones(shape, declared, first):
    ops = rewritten(
        f"""g (float[4,16] q, {declared} c, float[16,3] b, float[4,2] a) => (float[4,3] y, float[2,16] z) {{
          s = Mul({first})
          y = MatMul(s, b)
          t = Transpose <perm=[1, 0]> (a)
          z = MatMul(t, s)
        }}""",
        products.ScaleSmallOperandPass(),
        {"q": array(4, 16), "c": array(*shape), "b": array(16, 3), "a": array(4, 2)},
    )
    assert sorted(ops) == ["MatMul", "MatMul", "Mul", "Mul", "Transpose"]


@pytest.mark.parametrize(
    "reader, output",
    [
        ("z = Relu(s)", "float[4,16] z"),
        ("z = MatMul(s, w)", "float[4,16] z"),  # no smaller than q
        ("z = MatMul(a, s)", "float[2,16] z"),  # not a transposed matrix: its columns are not the rows of c
    ],
)
def test_a_scale_stays_where_a_reader_cannot_do_without(reader, output):
    ops = rewritten(
        f"""g (float[4,16] q, float[4,1] c, float[16,3] b, float[16,16] w, float[2,4] a) => (float[4,3] y, {output}) {{
          s = Mul(q, c)
          y = MatMul(s, b)
          {reader}
        }}""",
        products.ScaleSmallOperandPass(),
        {"q": array(4, 16), "c": array(4, 1), "b": array(16, 3), "w": array(16, 16), "a": array(2, 4)},
    )
    assert ops[0] == "Mul" and ops.count("Mul") == 1


def test_scales_of_one_row_that_is_repeated_for_them_stay():
    ops = rewritten(
        """g (float[1,16] q, float[n,1] c, float[n,2] a) => (float[2,16] z) {
          s = Mul(q, c)
          t = Transpose <perm=[1, 0]> (a)
          z = MatMul(t, s)
        }""",
        products.ScaleSmallOperandPass(),
        {"q": array(1, 16), "c": array(4, 1), "a": array(4, 2)},
    )
    assert ops == ["Mul", "Transpose", "MatMul"]


def test_a_factor_for_each_column_stays():
    ops = rewritten(
        """g (float[4,16] q, float[1,16] c, float[16,3] b) => (float[4,3] y) {
          s = Mul(q, c)
          y = MatMul(s, b)
        }""",
        products.ScaleSmallOperandPass(),
        {"q": array(4, 16), "c": array(1, 16), "b": array(16, 3)},
    )
    assert ops == ["Mul", "MatMul"]


@pytest.mark.parametrize("target, left", [("[-1, 6]", 0), ("[-1, 3]", 2)])
def test_a_matrix_that_is_reshaped_and_back_is_read_as_it_is(target, left):
    columns = target.strip("[]").split(",")[1].strip()
    model = ir.from_onnx_text(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[n,6] x) => (float[m,{columns}] y) <int64[3] s = {{2, -1, 3}}, int64[2] t = {{-1, {columns}}}> {{
      a = Reshape(x, s)
      b = Reshape(a, t)
      y = Neg(b)
    }}""")
    for node in model.graph:
        if node.outputs[0].name == "b":
            node.outputs[0].shape = ir.Shape([None, int(columns)])
    feeds = {"x": array(4, 6)}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    products.CancelReshapePairsPass()(model)
    common.RemoveUnusedNodesPass()(model)
    assert sum(node.op_type == "Reshape" for node in model.graph) == left
    np.testing.assert_array_equal(evaluate(ir.to_proto(model), feeds)["y"], before)


@pytest.mark.parametrize("columns, kept", [(8, True), (5, True), (3, False)])
def test_the_runtime_copies_a_small_transposed_operand_instead_of_reading_it_in_strides(tmp_path, columns, kept):
    model = ir.from_onnx_text(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[n,5] a, float[n,{columns}] b) => (float[5,{columns}] y) {{
      t = Transpose <perm=[1, 0]> (a)
      y = MatMul(t, b)
    }}""")
    feeds = {"a": array(4, 5), "b": array(4, columns)}
    before = evaluate(ir.to_proto(model), feeds)["y"]
    assert products.TransposeSmallOperandPass()(model).modified is kept
    np.testing.assert_allclose(evaluate(ir.to_proto(model), feeds)["y"], before, rtol=1e-6)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph]
    assert ("Transpose" in operators) is kept


@pytest.mark.parametrize("rows, applies", [(8, True), ("n", True), (257, False), ("m", False)])
@pytest.mark.parametrize("columns", [3, 512])
def test_a_wide_product_of_few_rows_comes_out_transposed(rows, columns, applies):
    wide, many = 4 * columns, rows if isinstance(rows, int) else 8
    ops = rewritten(
        f"""g (float[{rows},{columns}] a, float[{rows},{wide}] b) => (float[{wide},{columns}] y) {{
          t = Transpose <perm=[1, 0]> (a)
          kept = Flatten <axis=1> (t)
          p = MatMul(kept, b)
          y = Transpose <perm=[1, 0]> (p)
        }}""",
        products.FewRowsProductPass({"n": 256}),
        {"a": array(many, columns) / many, "b": array(many, wide)},
    )
    copied = ["Flatten"] if columns == 512 else []
    assert ops == (["Transpose", *copied, "MatMul"] if applies else ["Transpose", "Flatten", "MatMul", "Transpose"])


@pytest.mark.parametrize("wide, reader", [(11, "Neg(a)"), (12, "Neg(p)")], ids=["not wide enough", "read as it is"])
def test_other_products_are_transposed_behind(wide, reader):
    ops = rewritten(
        f"""g (float[8,3] a, float[8,{wide}] b) => (float[{wide},3] y, float[?,?] z) {{
          t = Transpose <perm=[1, 0]> (a)
          p = MatMul(t, b)
          y = Transpose <perm=[1, 0]> (p)
          z = {reader}
        }}""",
        products.FewRowsProductPass(),
        {"a": array(8, 3), "b": array(8, wide)},
    )
    assert ops.count("Transpose") == 2
