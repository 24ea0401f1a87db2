"""A product with a scalar and a sum are one operator where ONNX Runtime has it: the same numbers to the last bit."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from test_passes_sparse_update import EACH, OPTIMIZERS, Bag, engine, train

from orttrainer import runtime
from orttrainer.graph.passes.speed import gated_add
from orttrainer.graph.passes.speed.gated_add import GatedAddPass
from orttrainer.runtime import gated

PASS = GatedAddPass.__name__
needs_operator = pytest.mark.skipif(not gated.is_available(), reason="this ONNX Runtime has no GatedAdd")


def model_of(body: str, x: str = "float[5,40]", s: str = "float") -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g ({x} x, {x} y, {s} s) => ({x} z) <float c = {{0.3}}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def results(model: ir.Model, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return runtime.checking_session(ir.to_proto(model).SerializeToString()).run(None, inputs)[0]


SUMS = {
    "a constant times a tensor is added": "p = Mul(y, c) z = Add(x, p)",
    "the product comes first": "p = Mul(y, c) z = Add(p, x)",
    "the factor comes first": "p = Mul(c, y) z = Add(x, p)",
    "a factor of each run": "p = Mul(y, s) z = Add(x, p)",
    "a difference": "p = Mul(s, y) z = Sub(x, p)",
    "two products": "p = Mul(x, c) q = Mul(y, s) z = Add(p, q)",
    "in a row": "p = Mul(y, c) q = Add(x, p) r = Mul(q, s) z = Sub(x, r)",
}


@needs_operator
@pytest.mark.parametrize(
    ("x", "s"),
    [("float[5,40]", "float"), ("float[2,3,32]", "float[1]"), ("float[7]", "float[1]"), ("float[0,40]", "float")],
)
@pytest.mark.parametrize("body", SUMS.values(), ids=SUMS)
def test_sum_and_product_in_one_are_the_same_to_the_last_bit(body, x, s):
    plain, changed = model_of(body, x, s), model_of(body, x, s)
    assert GatedAddPass()(changed).modified and "GatedAdd" in operators(changed)
    assert not {"Add", "Sub"} & set(operators(changed))
    rng = np.random.default_rng(0)
    inputs = {v.name: rng.standard_normal(v.shape.numpy(), np.float32) for v in plain.graph.inputs}
    np.testing.assert_array_equal(results(changed, inputs), results(plain, inputs))


@pytest.mark.parametrize(("body", "x"), [
    ("p = Mul(y, c) z = Sub(p, x)", "float[5,40]"),  # the product is what is taken from
    ("p = Mul(y, c) q = Neg(p) r = Add(x, p) z = Mul(q, r)", "float[5,40]"),  # the product is read elsewhere too
    ("p = Mul(y, x) z = Add(x, p)", "float[5,40]"),  # no scalar
    ("p = Mul(y, c) z = Add(x, p)", "float[5,3]"),  # short rows
    ("p = Mul(y, c) z = Add(x, p)", "float[70000]"),  # one long row
    ("p = Mul(y, c) z = Add(x, p)", "float[0]"),  # an empty one
    ("p = Mul(y, c) z = Add(x, p)", "float[n,40]"),  # of unknown size
], ids=str)  # fmt: skip
def test_other_sums_stay(body, x, monkeypatch):
    monkeypatch.setattr(gated_add, "LEAST_COLUMNS", 32)
    model = model_of(body, x)
    before = operators(model)
    assert not GatedAddPass()(model).modified and operators(model) == before


def test_other_dtypes_stay():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (double[5,40] x, double s) => (double[5,40] z) { p = Mul(x, s) z = Add(x, p) }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert not GatedAddPass()(model).modified


def test_a_scalar_is_made_a_gate_once():
    model = model_of("p = Mul(y, s) q = Add(x, p) r = Mul(q, s) z = Add(x, r)")
    GatedAddPass()(model)
    assert sorted(operators(model)) == ["GatedAdd", "GatedAdd", "Mul", "Reshape"]


@needs_operator
@pytest.mark.parametrize("name", EACH)
def test_training_with_it_is_the_same_to_the_last_bit(name):
    optimizer, attributes, clip = OPTIMIZERS[name]
    found, expected = (
        train(engine(Bag(), optimizer, attributes, bool(clip), disabled_passes=off)) for off in ((), (PASS,))
    )
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_without_the_operator_the_graph_stays(monkeypatch):
    monkeypatch.setattr(gated, "is_available", lambda: False)
    model = model_of(SUMS["a difference"])
    assert not gated.gate_sums(model, ["CPUExecutionProvider"]) and operators(model) == ["Mul", "Sub"]


@pytest.mark.parametrize("providers", [["CUDAExecutionProvider", "CPUExecutionProvider"], []], ids=str)
def test_for_other_providers_the_graph_stays(providers):
    model = model_of(SUMS["a difference"])
    assert not gated.gate_sums(model, providers) and operators(model) == ["Mul", "Sub"]


def test_a_runtime_that_adds_otherwise_is_not_used(monkeypatch):
    def results(model, feeds):
        return [np.full(3, len(model))]  # other numbers for the other model

    class Session:
        def __init__(self, model):
            self.model = model

        def run(self, _, feeds):
            return results(self.model, feeds)

    monkeypatch.setattr(gated.runtime, "checking_session", Session)
    assert not gated.is_available.__wrapped__()
