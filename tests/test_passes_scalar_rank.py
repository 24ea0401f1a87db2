"""A scalar beside a column gets the axes of the column; the numbers stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer.graph.passes.speed.scalar_rank import ScalarRankPass

SCALARS = {"constant": ("", "float c = {3.0}"), "constant of one axis": ("", "float[1] c = {3.0}")}
SCALARS["computed"] = ("c = ReduceMax <keepdims = 0> (b)", "")


def model_of(operator: str, scalar: str, shape: str, order: str) -> onnx.ModelProto:
    computed, constant = SCALARS[scalar]
    constants = f"<{constant}>" if constant else ""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{shape}] a, float[2] b) => (float[{shape}] y, float[2] rest) {constants} {{
      {computed}
      y = {operator}({order})
      rest = Mul(b, c)
    }}"""
    return ir.to_proto(ir.from_onnx_text(text))


def rewritten(model: onnx.ModelProto):
    model = onnx.shape_inference.infer_shapes(model)
    result = ScalarRankPass()(ir.from_proto(model))
    return ir.to_proto(result.model), result.modified


def run(model, feeds):
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("order", ["a, c", "c, a"])
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("shape", ["5, 1", "N, 1", "2, 3, 1"])
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
def test_a_column_and_a_scalar_of_its_rank_make_the_same(operator, shape, scalar, order):
    before = model_of(operator, scalar, shape, order)
    after, modified = rewritten(before)
    assert modified
    dims = [4 if size.strip() == "N" else int(size) for size in shape.split(",")]
    rng = np.random.default_rng(0)
    feeds = {"a": rng.uniform(1, 4, dims).astype(np.float32), "b": np.array([3.0, 2.0], np.float32)}
    for expected, found in zip(run(before, feeds), run(after, feeds)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", ["5, 2", "5", "N, M", "1, 1"])
def test_a_scalar_beside_anything_else_stays(shape):
    assert not rewritten(model_of("Mul", "constant", shape, "a, c"))[1]
