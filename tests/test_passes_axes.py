"""Operators on some axes come out right on ONNX Runtime with all its optimizations, behind a Transpose."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from orttrainer import build_gradient
from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.passes.axes import AllAxesPass
from orttrainer.testing import evaluate

# operator, the constants it reads
OPERATORS = {
    "Pad, one axis": ("Pad(t, pads, , axes)", "int64[2] pads = {1, 2}, int64[1] axes = {1}"),
    "Pad, a negative axis": ("Pad(t, pads, , axes)", "int64[2] pads = {-1, 2}, int64[1] axes = {-2}"),
    "Pad, all axes in another order": (
        "Pad(t, pads, , axes)",
        "int64[8] pads = {1, 0, 0, 0, 0, 2, 0, 3}, int64[4] axes = {3, 1, 2, 0}",
    ),
    "Pad, pads that are computed": ("Pad(t, computed, , axes)", "int64[1] axes = {1}"),
    "Pad, axes that are computed": ("Pad(t, pads, , minus)", "int64[2] pads = {1, 2}"),
    "Resize by scales": ("Resize <axes = [1, 2], mode = 'nearest'> (t, , scales)", "float[2] scales = {2.0, 3.0}"),
    "Resize to sizes": ("Resize <axes = [2, 1], mode = 'linear'> (t, , , sizes)", "int64[2] sizes = {8, 9}"),
}


def _session(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_on_some_axes_behind_a_transpose_is_what_onnx_says(name):
    operator, constants = OPERATORS[name]
    operator = operator.replace("'", '"')
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3, 4, 5] x, int64[2] computed, int64[1] minus) => (float[A, B, C, D] y) <{constants}> {{
      t = Transpose <perm = [0, 2, 3, 1]> (x)
      p = {operator}
      y = Transpose <perm = [0, 3, 1, 2]> (p)
    }}"""
    model = ir.from_onnx_text(text)
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    feeds = {"x": x, "computed": np.array([2, 1]), "minus": np.array([-3])}
    expected = evaluate(ir.to_proto(model), feeds)["y"]
    AllAxesPass()(prepare(model))
    np.testing.assert_allclose(_session(ir.to_proto(model)).run(["y"], feeds)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_slice_behind_a_transpose_is_a_pad_of_all_axes():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[N, 3, M, 5] x) => (float y) <int64[1] from = {2}, int64[1] to = {9}, int64[1] axis = {3}> {
      t = Transpose <perm = [0, 2, 1, 3]> (x)
      s = Slice(t, from, to, axis)
      u = Transpose <perm = [0, 2, 1, 3]> (s)
      y = ReduceSumSquare <keepdims = 0> (u)
    }"""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    gradient = _session(build_gradient(ir.to_proto(ir.from_onnx_text(text)))).run(["x_grad"], {"x": x})[0]
    np.testing.assert_allclose(gradient, np.where(np.arange(5) >= 2, 2 * x, 0), rtol=1e-6)


def test_what_is_made_in_a_body_has_a_name_that_nothing_around_it_has():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3] x, int64[2] computed) => (float[A, B] y) <float one = {1.0}> {
      val_0 = Add(x, one)
      y = Scan <num_scan_inputs = 1, body = b (float[3] row) => (float[C] wide) <int64[1] axes = {0}> {
        wide = Pad(row, computed, , axes)
      }> (val_0)
    }"""
    model = ir.from_onnx_text(text)
    AllAxesPass()(prepare(model))
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "computed": np.array([1, 2])}
    found = _session(ir.to_proto(model)).run(["y"], feeds)[0]
    np.testing.assert_array_equal(found, np.pad(feeds["x"] + 1, ((0, 0), (1, 2))))


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_a_resize_that_keeps_the_ratio_counts_its_axes_from_the_first(policy):
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3, 4, 5] x) => (float[A, B, C, D] y) <int64[2] sizes = {{8, 9}}> {{
      y = Resize <axes = [AXES], mode = "linear", keep_aspect_ratio_policy = "{policy}"> (x, , , sizes)
    }}"""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    model = ir.from_onnx_text(text.replace("AXES", "1, -2"))
    AllAxesPass()(prepare(model))
    expected = evaluate(ir.to_proto(ir.from_onnx_text(text.replace("AXES", "1, 2"))), {"x": x})["y"]
    np.testing.assert_allclose(_session(ir.to_proto(model)).run(["y"], {"x": x})[0], expected, rtol=1e-5, atol=1e-6)
