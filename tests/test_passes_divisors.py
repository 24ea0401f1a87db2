"""Whole numbers divided by 0, where ONNX Runtime would end the process; the others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer.graph.passes.divisors import NonzeroDivisorsPass


@pytest.mark.parametrize("operator, expected", [("Div", [3, 7, 2]), ("Mod", [1, 0, 1])])
def test_a_divisor_of_zero_is_one(operator, expected):
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (int64[3] a, int64[3] b) => (int64[3] y) {{ y = {operator}(a, b) }}""")
    assert NonzeroDivisorsPass()(model).modified
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"a": np.array([7, 7, 7]), "b": np.array([2, 0, 3])}
    assert session.run(None, feeds)[0].tolist() == expected


@pytest.mark.parametrize(
    "text", ["float[3] a, float[3] b) => (float[3] y) {", "int64[3] a) => (int64[3] y) <int64 b = {3}> {"]
)
def test_floats_and_constants_stay(text):
    model = ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 18]> g ({text} y = Div(a, b) }}')
    assert not NonzeroDivisorsPass()(model).modified
