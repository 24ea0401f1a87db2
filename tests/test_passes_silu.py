"""The gradient of SiLU is taken from its result: the same to rounding, in fewer operators, and nothing keeps the input."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from fidelity import assert_trains_with_and_without
from onnx_ir.passes import common
from torch import nn

from orttrainer.differentiate import differentiate
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.silu import SiluGradientPass
from orttrainer.testing import evaluate

FORMS = {"of torch": "s = Sigmoid(x) y = Mul(x, s)", "turned around": "s = Sigmoid(x) y = Mul(s, x)"}
OTHERS = {
    "a gate of something else": "h = Neg(x) s = Sigmoid(h) y = Mul(x, s)",
    "a gate alone": "s = Sigmoid(x) y = Mul(s, s)",
    "a sum": "s = Sigmoid(x) y = Add(x, s)",
}
X = np.concatenate([np.linspace(-80, 80, 397), [0.0, 1e-30, 1e30]]).reshape(-1, 1)


def gradient(body: str, dtype="float") -> ir.Model:
    """The model with an output more: the cotangent of x where that of y is c."""
    graph = ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["" : 18]> g ({dtype}[N,1] x, {dtype}[N,1] c) => ({dtype}[N,1] y) {{ {body} }}'
    )
    graph = common.ShapeInferencePass()(graph).model
    op = Builder(graph.graph, "step")
    (x, c), (y,) = graph.graph.inputs, graph.graph.outputs
    dx = op.Identity(differentiate(op, {y: c}, [x])[x])
    dx.name = "dx"
    graph.graph.outputs.append(dx)
    return graph


def used(graph: ir.Model) -> list[ir.Node]:
    common.RemoveUnusedNodesPass()(graph)
    return list(graph.graph)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_is_that_of_torch_and_does_not_read_the_input(form, dtype):
    graph = gradient(FORMS[form], {"float32": "float", "float64": "double"}[dtype])
    before = len(used(graph))
    assert SiluGradientPass()(graph).modified
    nodes = used(graph)
    assert len(nodes) == before - 2
    assert [node.op_type for node in nodes if graph.graph.inputs[0] in node.inputs] == ["Sigmoid", "Mul"]  # the forward
    x, c = X.astype(dtype), np.linspace(-2, 2, X.size).reshape(X.shape).astype(dtype)
    y, dx = evaluate(ir.to_proto(graph), {"x": x, "c": c}).values()
    module = torch.from_numpy(x).requires_grad_()
    expected = nn.functional.silu(module)
    expected.backward(torch.from_numpy(c))
    rounding = np.finfo(dtype).eps
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=8 * rounding)
    np.testing.assert_allclose(dx, module.grad.numpy(), rtol=8 * rounding, atol=8 * rounding)


@pytest.mark.parametrize("form", OTHERS)
def test_other_gates_keep_their_gradient(form):
    assert not SiluGradientPass()(gradient(OTHERS[form])).modified


def test_a_product_within_a_branch_is_no_result_to_take_the_gradient_from():
    branches = (
        "then_branch = a () => (float[N,1] y) { y = Mul(x, s) }, else_branch = b () => (float[N,1] z) { z = Neg(x) }"
    )
    body = f"""s = Sigmoid(x) out = If (is) <{branches}> one = Constant <value = float {{1}}> () rest = Sub(one, s)
        through = Mul(c, s) dgate = Mul(c, x) slope = Mul(s, rest) gated = Mul(dgate, slope) dx = Add(through, gated)"""
    graph = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[N,1] x, float[N,1] c, bool is) => (float[N,1] out, float[N,1] dx) {{ {body} }}"""
    )
    assert not SiluGradientPass()(common.ShapeInferencePass()(graph).model).modified


def test_what_else_reads_the_input_adds_its_gradient():
    graph = gradient("s = Sigmoid(x) z = Mul(x, s) w = Exp(x) y = Add(z, w)")
    SiluGradientPass()(graph)
    x = np.linspace(-3, 3, 8, dtype=np.float32).reshape(-1, 1)
    module = torch.from_numpy(x).requires_grad_()
    (nn.functional.silu(module) + module.exp()).sum().backward()
    found = evaluate(ir.to_proto(graph), {"x": x, "c": np.ones_like(x)})["dx"]
    np.testing.assert_allclose(found, module.grad.numpy(), rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """A gated layer, a layer with a residual sum, and one of images."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        x = x + nn.functional.silu(self.c(nn.functional.silu(self.a(x)) * self.b(x)))
        image = nn.functional.silu(self.norm(self.conv(x.reshape(-1, 1, 2, 4))))
        return (x + image.mean(1).flatten(1)).square().mean()


def test_modules_with_it_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("SiluGradientPass", Gated, [8], replaces="Mul", some=True)
