"""Gelu is one operator while it is differentiated, however it was written, and the fewest operators afterwards."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common

from orttrainer.differentiate import differentiate
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.gelu import ExpandGeluPass, FuseGeluPass
from orttrainer.testing import evaluate

FORMS = {
    "inner": "s = Div(x, root)  e = Erf(s)  p = Add(e, one)  h = Mul(half, p)  y = Mul(x, h)",
    "outer": "s = Mul(x, inverse)  e = Erf(s)  p = Add(one, e)  h = Mul(x, p)  y = Mul(h, half)",
    "before": "s = Div(x, root)  e = Erf(s)  p = Add(e, one)  h = Mul(x, half)  y = Mul(h, p)",
}
OTHERS = {
    "another factor": "s = Div(x, one)  e = Erf(s)  p = Add(e, one)  h = Mul(half, p)  y = Mul(x, h)",
    "another sum": "s = Div(x, root)  e = Erf(s)  p = Add(e, half)  h = Mul(half, p)  y = Mul(x, h)",
    "another x": "s = Div(x, root)  e = Erf(s)  p = Add(e, one)  h = Mul(half, p)  y = Mul(s, h)",
    "turned around": "s = Div(root, x)  e = Erf(s)  p = Add(e, one)  h = Mul(half, p)  y = Mul(x, h)",
    "read elsewhere": "s = Div(x, root)  e = Erf(s)  p = Add(e, one)  h = Mul(half, p)  z = Mul(x, h)  y = Add(z, e)",
}


def model(body: str, dtype="float") -> ir.Model:
    return ir.from_onnx_text(f"""
    <ir_version: 8, opset_import: ["" : 18]>
    g ({dtype}[N,4] x) => ({dtype}[N,4] y)
    <{dtype} root = {{1.4142135}}, {dtype} inverse = {{0.70710677}}, {dtype} one = {{1}}, {dtype} half = {{0.5}}> {{
      {body}
    }}""")


def typed(graph: ir.Model) -> ir.Model:
    return common.ShapeInferencePass()(graph).model


def gradient(graph: ir.Model) -> ir.Model:
    """The model with an output more: the cotangent of x where that of y is x itself."""
    op = Builder(graph.graph, "step")
    (x,), (y,) = graph.graph.inputs, graph.graph.outputs
    dx = op.Identity(differentiate(op, {y: x}, [x])[x])
    dx.name = "dx"
    graph.graph.outputs.append(dx)
    return graph


X = np.concatenate([np.linspace(-9, 9, 397), [0.0, 1e-30, -1e30]]).astype(np.float32).reshape(-1, 4)


@pytest.mark.parametrize("form", FORMS)
def test_each_way_of_writing_gelu_trains_as_in_torch(form):
    graph = typed(model(FORMS[form]))
    assert FuseGeluPass()(graph).modified
    assert [node.op_type for node in graph.graph] == ["Gelu"]
    gradient(graph)
    ExpandGeluPass()(graph)
    common.RemoveUnusedNodesPass()(graph)
    operators = [node.op_type for node in graph.graph if node.op_type != "Identity"]
    assert len(operators) == 10 and operators.count("Erf") == 1
    assert {node.domain for node in graph.graph} == {""} and list(graph.graph.opset_imports) == [""]
    found = evaluate(ir.to_proto(graph), {"x": X})
    x = torch.from_numpy(X.astype(np.float64)).requires_grad_()
    y = torch.nn.functional.gelu(x)
    y.backward(x.detach())
    np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-6, atol=5e-6)  # float32: 1 + erf cancels below -3
    np.testing.assert_allclose(found["dx"], x.grad, rtol=1e-6, atol=1e-5)


def test_what_is_not_a_number_stays_so():
    graph = typed(model(FORMS["inner"]))
    FuseGeluPass()(graph)
    gradient(graph)
    ExpandGeluPass()(graph)
    found = evaluate(ir.to_proto(graph), {"x": np.float32([[np.nan, 1, 2, 3]])})
    for name in ("y", "dx"):
        np.testing.assert_array_equal(np.isnan(found[name]), [[True, False, False, False]])


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_gelu_stays(form):
    assert not FuseGeluPass()(typed(model(OTHERS[form]))).modified


def test_in_double_precision_it_stays():
    assert not FuseGeluPass()(typed(model(FORMS["inner"], "double"))).modified
