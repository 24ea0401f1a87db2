"""Sums over rows are products with a row of ones where that is faster, and are left alone elsewhere."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from orttrainer.graph.passes.speed.column_sums import ColumnSumsPass
from orttrainer.testing import evaluate

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
g ({dtype}[{shape}] x) => ({dtype}[{out}] y)
<int64[{count}] axes = {{{axes}}}> {{
  y = ReduceSum <keepdims={keep}> (x, axes)
}}
"""


def model(shape="B,T,6", out="6", axes=(0, 1), keep=0, dtype="float"):
    text = TEXT.format(shape=shape, out=out, axes=", ".join(map(str, axes)), count=len(axes), keep=keep, dtype=dtype)
    return ir.from_onnx_text(text)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"axes": (-3, -2)},
        {"shape": "B,6", "axes": (0,)},
        {"keep": 1, "out": "1,1,6"},
        {"shape": "4,5,6"},
        {"shape": "B,2,2,6", "axes": (2, 0, 1)},
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sum_over_all_rows_is_a_product_with_ones(changed, batch):
    graph = model(**changed)
    sizes = {"B": batch, "T": 5}
    shape = [sizes.get(d.strip()) or int(d) for d in changed.get("shape", "B,T,6").split(",")]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert ColumnSumsPass()(graph).modified
    assert "ReduceSum" not in {node.op_type for node in graph.graph}
    (y,) = evaluate(ir.to_proto(graph), {"x": x}).values()
    keep = bool(changed.get("keep", 0))
    expected = x.astype(np.float64).sum(tuple(range(x.ndim - 1)), keepdims=keep)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


def test_no_rows_have_the_sum_0():
    graph = model()
    ColumnSumsPass()(graph)
    (y,) = evaluate(ir.to_proto(graph), {"x": np.empty((0, 5, 6), np.float32)}).values()
    np.testing.assert_array_equal(y, np.zeros(6))


def test_what_is_not_finite_stays_in_its_column():
    x = np.ones((2, 3, 6), np.float32)
    x[0, 0, 1], x[1, 2, 3] = np.inf, np.nan
    graph = model()
    ColumnSumsPass()(graph)
    (y,) = evaluate(ir.to_proto(graph), {"x": x}).values()
    np.testing.assert_array_equal(y, x.sum((0, 1)))


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "double"},
        {"axes": (1, 2), "out": "B"},
        {"axes": (0, 2), "out": "T"},
        {"shape": "B,T,C", "out": "C"},
        {"shape": "B,T,1", "out": "1"},
    ],
)
def test_other_sums_stay(changed):
    assert not ColumnSumsPass()(model(**changed)).modified


def test_sums_over_as_many_rows_share_the_ones():
    graph = ir.from_onnx_text("""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[B,5,6] x, float[5,B,2] z) => (float[6] y, float[2] w)
    <int64[2] axes = {0, 1}> {
      y = ReduceSum <keepdims=0> (x, axes)
      w = ReduceSum <keepdims=0> (z, axes)
    }""")
    ColumnSumsPass()(graph)
    assert [node.op_type for node in graph.graph].count("Expand") == 1
    rng = np.random.default_rng(0)
    x, z = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 6), (5, 3, 2)))
    found = evaluate(ir.to_proto(graph), {"x": x, "z": z})
    np.testing.assert_allclose(found["y"], x.sum((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(found["w"], z.sum((0, 1)), rtol=1e-5)
