"""Attention with fewer passes over its scores computes the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from orttrainer.differentiate import differentiate
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.attention import AddMaskPass, SoftmaxGradientPass
from orttrainer.testing import evaluate

BATCH, HEADS, TIME, SIZE = 2, 3, 7, 4
PLAIN = "y = MatMul(a, v)"
DROPPED = "p = Mul(a, m)  y = MatMul(p, v)"


def attention(values: str) -> ir.Model:
    model = ir.from_onnx_text(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[B,3,7,7] s, float[B,3,7,7] m, float[B,3,7,4] v) => (float[B,3,7,4] y) {{
      a = Softmax <axis=-1> (s)
      {values}
    }}""")
    return common.ShapeInferencePass()(model).model


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    scores, values = (BATCH, HEADS, TIME, TIME), (BATCH, HEADS, TIME, SIZE)
    mask = (rng.random(scores) < 0.8) / 0.8
    given = {"s": rng.standard_normal(scores), "m": mask, "v": rng.standard_normal(values)}
    return {name: x.astype(np.float32) for name, x in (given | {"dy": rng.standard_normal(values)}).items()}


def with_gradients(model: ir.Model) -> ir.Model:
    """The model with the cotangents of s and v as outputs, given that of y."""
    op, graph = Builder(model.graph, "step"), model.graph
    (y,) = graph.outputs
    dy = ir.Value(name="dy", type=y.type, shape=y.shape)
    graph.inputs.append(dy)
    wanted = [value for value in graph.inputs if value.name in ("s", "v")]
    for value, found in differentiate(op, {y: dy}, wanted).items():
        found.name = f"d{value.name}"
        graph.outputs.append(found)
    common.RemoveUnusedNodesPass()(model)
    return model


@pytest.mark.parametrize("values, left", [(PLAIN, 2), (DROPPED, 4)])
def test_the_gradient_of_attention_is_as_before(values, left):
    model = with_gradients(attention(values))
    before = evaluate(ir.to_proto(model), feeds())
    assert SoftmaxGradientPass()(model).modified
    common.RemoveUnusedNodesPass()(model)
    after = evaluate(ir.to_proto(model), feeds())
    for name in ("y", "ds", "dv"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)
    large = [n for n in model.graph if n.op_type in ("Mul", "Sub") and n.outputs[0].shape[-1] == TIME]
    assert len(large) == left  # with dropout also its own product in the forward


def test_the_mask_of_a_dropout_is_not_kept_for_the_backward():
    model = with_gradients(attention(DROPPED))
    SoftmaxGradientPass()(model)
    common.RemoveUnusedNodesPass()(model)
    mask = next(value for value in model.graph.inputs if value.name == "m")
    assert len(mask.uses()) == 1


@pytest.mark.parametrize(
    "values",
    [
        "p = Mul(a, m)  o = MatMul(a, v)  q = MatMul(p, v)  y = Add(o, q)",  # two cotangents of a, added
        "n = Mul(a, a)  y = MatMul(n, v)",
    ],
)
def test_other_gradients_through_a_softmax_are_as_before(values):
    model = with_gradients(attention(values))
    before = evaluate(ir.to_proto(model), feeds())
    SoftmaxGradientPass()(model)
    after = evaluate(ir.to_proto(model), feeds())
    for name in ("y", "ds", "dv"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)


def build(c: np.ndarray, low: float = -np.inf, rest: str = "Softmax") -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["B", TIME, TIME]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph, "g")
    w = op.Where(op.const(c), x, np.float32(low))
    y = op.Softmax(w, axis=-1) if rest == "Softmax" else op.node(rest, w)
    y.name = "y"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=8)


CAUSAL = np.tril(np.ones((TIME, TIME), bool))


def test_a_constant_mask_is_added():
    model = build(CAUSAL)
    x = feeds()["s"][0]
    before = evaluate(ir.to_proto(model), {"x": x})["y"]
    assert AddMaskPass()(model).modified
    np.testing.assert_array_equal(evaluate(ir.to_proto(model), {"x": x})["y"], before)
    (where,) = [node for node in model.graph if node.op_type == "Where"]
    assert where.inputs[0].const_value is not None  # of constants alone: computed once


def test_masks_that_are_equal_are_made_once():
    model = build(CAUSAL)
    op, graph = Builder(model.graph, "again"), model.graph
    z = op.Softmax(op.Where(op.const(CAUSAL), graph.inputs[0], np.float32(-np.inf)), axis=-1)
    graph.outputs.append(z)
    AddMaskPass()(model)
    assert [node.op_type for node in model.graph].count("Where") == 1


@pytest.mark.parametrize(
    "c, low, rest",
    [
        (CAUSAL & (np.arange(TIME) > 0), -np.inf, "Softmax"),  # of a row without any, 0 is not what is masked
        (CAUSAL, 0.0, "Softmax"),
        (CAUSAL, -np.inf, "Neg"),
    ],
)
def test_other_selections_stay(c, low, rest):
    assert not AddMaskPass()(build(c, low, rest)).modified
