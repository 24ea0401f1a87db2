"""Products with vectors come out right on ONNX Runtime with all its optimizations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.passes.matmul import VectorMatMulPass
from orttrainer.testing import evaluate

# shape of the matrix, its permutation, length of the vector, operands of MatMul
PRODUCTS = [
    ([4, 5], [1, 0], 4, "t, v"),
    ([4, 5], [1, 0], 5, "v, t"),
    ([2, 5, 4], [0, 2, 1], 5, "t, v"),
    ([4], [0], 4, "t, v"),
]


@pytest.mark.parametrize("matrix, perm, length, operands", PRODUCTS)
def test_a_transposed_matrix_times_a_vector_is_what_onnx_says(matrix, perm, length, operands):
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float{matrix} a, float[{length}] v) => (float[N] y) {{
      t = Transpose <perm = {perm}> (a)
      y = MatMul({operands})
    }}"""
    model = ir.from_onnx_text(text)
    model.graph.outputs[0].shape = None
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal(value.shape.numpy()).astype(np.float32) for value in model.graph.inputs}
    expected = evaluate(ir.to_proto(model), feeds)["y"]
    VectorMatMulPass()(prepare(model))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["y"], feeds)[0], expected, rtol=1e-5)
