"""Sizes that ONNX's inference finds, or an operator's definition, have one name only where they are equal."""

import onnx
import torch

from orttrainer import build_gradient
from orttrainer.testing.check import _run_onnxruntime


def test_two_of_one_operator_have_sizes_of_their_own():
    """Of one name ONNX Runtime takes them for equal, and reuses the memory of one for the other."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[?,?] a, float[?,?] b, float[?,?] c) => (float s)
    { u = com.microsoft.FusedMatMul <transB = 1> (a, b) v = com.microsoft.FusedMatMul <transB = 1> (b, c)
      t = Atan (u) p = ReduceSum <keepdims = 0> (t) w = Mul (v, v) q = ReduceSum <keepdims = 0> (w) s = Add (p, q) }"""
    gradient = build_gradient(onnx.parser.parse_model(text), of="s", wrt=["a", "b", "c"])
    values = {
        name: torch.linspace(-1, 1, 2 * rows).reshape(rows, 2).requires_grad_() for name, rows in zip("abc", (1, 3, 4))
    }
    a, b, c = values.values()
    ((a @ b.T).atan().sum() + (b @ c.T).square().sum()).backward()
    found = _run_onnxruntime(gradient, {name: x.detach().numpy() for name, x in values.items()})
    for name, x in values.items():
        torch.testing.assert_close(torch.from_numpy(found[f"{name}_grad"]), x.grad)
    sizes = {v.name: {d.dim_param for d in v.type.tensor_type.shape.dim} - {""} for v in gradient.graph.value_info}
    assert not sizes["u"] & sizes["v"]
