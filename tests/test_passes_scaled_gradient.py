"""A gradient is multiplied in the product that makes it: the same moments with a pass over memory less."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from small import train_with_torch
from test_passes_sparse_update import Bag, batch, engine, train

from orttrainer import runtime
from orttrainer.graph.passes.speed import scaled_gradient
from orttrainer.graph.passes.speed.scaled_gradient import ScaledGradientPass

PASS = ScaledGradientPass.__name__


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(scaled_gradient, "LEAST_ELEMENTS", 1)


def model_of(between: str, shape: str = "4,6", c: float = 0.1, more: str = "", rows: bool = False) -> ir.Model:
    total = (
        "squares = ReduceSumSquare <keepdims = 0> (g, last) sum = ReduceSum <keepdims = 0> (squares)"
        if rows
        else "sum = ReduceSumSquare <keepdims = 0> (g)"
    )
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[4,3] a, float[3,6] b, float[{shape}] m, float[{shape}] v, int64[2,6] i, float[2,6] u)
    => (float[{shape}] n, float[{shape}] w, float norm)
    <float c = {{{c}}}, float d = {{0.001}}, int64[1] last = {{1}}> {{
      p = MatMul(a, b)
      {between}
      gc = Mul(g, c)
      n = Add(m, gc)
      gg = Mul(g, g)
      ggd = Mul(gg, d)
      w = Add(v, ggd)
      {total}
      norm = Sqrt(sum)
      {more}
    }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True))


def results(model: ir.Model) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(v.shape.numpy()).astype(np.float32) for v in model.graph.inputs}
    if "i" in feeds:
        feeds["i"] = np.array([[1] * 6, [3] * 6])
    return runtime.checking_session(ir.to_proto(model).SerializeToString()).run(None, feeds)


PATHS = {
    "the product itself": ("g = Identity(p)", "4,6"),
    "its transpose": ("g = Transpose <perm = [1, 0]> (p)", "6,4"),
    "with rows added to it": ('g = ScatterElements <axis = 0, reduction = "add"> (p, i, u)', "4,6"),
    "both": ('q = ScatterElements <axis = 0, reduction = "add"> (p, i, u) g = Transpose <perm = [1, 0]> (q)', "6,4"),
}


@pytest.mark.parametrize(("between", "shape"), PATHS.values(), ids=PATHS)
def test_moments_and_norm_are_the_same(between, shape):
    plain, changed = model_of(between, shape), model_of(between, shape)
    assert ScaledGradientPass()(changed).modified
    names = [node.op_type for node in changed.graph]
    assert "FusedMatMul" in names and "MatMul" not in names
    for found, expected in zip(results(changed), results(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_product_that_is_split_as_well_stays_as_it_is():
    model = model_of("g = Identity(p)", more="s, t = Split <axis = 0, num_outputs = 2> (g)")
    assert not ScaledGradientPass()(model).modified


def test_squares_are_multiplied_once_they_are_summed():
    """So that the rows of a wide gradient may be summed in the tiles of its update."""
    plain, changed = (model_of("g = Identity(p)", rows=True) for _ in range(2))
    assert ScaledGradientPass()(changed).modified
    (rows,) = (node for node in changed.graph if node.op_type == "ReduceSumSquare")
    assert [reader.op_type for reader, _ in rows.outputs[0].uses()] == ["ReduceSum"]
    for found, expected in zip(results(changed), results(plain)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("change", [
    {"c": 1.0}, {"c": 0.0}, {"c": 1e-4}, {"between": "g = Relu(p)"},
    {"between": "g = ScatterElements <axis = 0> (p, i, u)"}, {"more": "other = Neg(g)"}, {"more": "other = Mul(gg, m)"},
], ids=str)  # fmt: skip
def test_other_gradients_stay(change):
    """Nothing is spared, the square may underflow, what is between is not linear, or others read the gradient."""
    model = model_of(**{"between": "g = Identity(p)"} | change)
    names = [node.op_type for node in model.graph]
    assert not ScaledGradientPass()(model).modified and [node.op_type for node in model.graph] == names


@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.8, "beta": 0.99}], ids=str)
def test_training_is_the_same(attributes):
    trainers = [
        engine(Bag(tied=True), "Adam", {"epsilon": 1e-3} | attributes, disabled_passes=off) for off in ((), (PASS,))
    ]
    found, expected = map(train, trainers)
    for name, value in expected.items():
        # a product adds up parts that are each multiplied, which rounds otherwise: 8e-7 after four steps of 0.05
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(trainers[0].gradient_norm, trainers[1].gradient_norm, rtol=1e-5, atol=0)


def test_training_equals_torch():
    module, reference = Bag(tied=True), Bag(tied=True)
    train(engine(module, "Adam", {"epsilon": 1e-3}))
    train_with_torch(reference, "Adam", 0.05, map(batch, range(4)), eps=1e-3)
    for (name, found), expected in zip(module.named_parameters(), reference.parameters()):
        # torch's own numbers in float32 are 7e-6 from those in float64, of steps of 0.05
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}")
