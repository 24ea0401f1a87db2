"""Whole numbers divided by 0, where ONNX Runtime would end the process; the others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer.graph.passes.divisors import CheckedDivisorsPass, NonzeroDivisorsPass


@pytest.mark.parametrize("operator, expected", [("Div", [3, 7, 2]), ("Mod", [1, 0, 1])])
def test_a_divisor_of_zero_is_one(operator, expected):
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (int64[3] a, int64[3] b) => (int64[3] y) {{ y = {operator}(a, b) }}""")
    assert NonzeroDivisorsPass()(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"a": np.array([7, 7, 7]), "b": np.array([2, 0, 3])}
    assert session.run(None, feeds)[0].tolist() == expected


@pytest.mark.parametrize("operator, expected", [("Div", [[3, 7, 2], [5, 11, 3]]), ("Mod", [[1, 0, 1], [1, 0, 2]])])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_a_divisor_of_zero_fails_and_no_other(operator, expected, dtype):
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g ({np.dtype(dtype)}[2, 3] a, {np.dtype(dtype)}[3] b) => ({np.dtype(dtype)}[2, 3] y, {np.dtype(dtype)}[3] z) {{
        y = {operator}(a, b)
        z = {operator}(b, b)
    }}""")
    assert CheckedDivisorsPass()(model).modified
    assert [node.op_type for node in model.graph].count("Gather") == 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    a, b = np.array([[7, 7, 7], [11, 11, 11]], dtype), np.array([2, 1, 3], dtype)
    assert session.run(None, {"a": a, "b": b})[0].tolist() == expected
    with pytest.raises(Exception, match="no_divisor_is_0"):
        session.run(None, {"a": a, "b": b - 1})


@pytest.mark.parametrize(
    "text", ["float[3] a, float[3] b) => (float[3] y) {", "int64[3] a) => (int64[3] y) <int64 b = {3}> {"]
)
def test_floats_and_constants_stay(text):
    model = ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 18]> g ({text} y = Div(a, b) }}')
    assert not NonzeroDivisorsPass()(model).modified and not CheckedDivisorsPass()(model).modified
