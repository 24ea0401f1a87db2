"""Reductions that are given no axes: of each number by itself, or of all."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_models import assert_trains_like, model

from orttrainer.differentiate.prepare import prepare
from orttrainer.graph.passes.no_axes import NOOP

EACH = {
    "ReduceSum": lambda x: x, "ReduceMean": lambda x: x, "ReduceMax": lambda x: x, "ReduceMin": lambda x: x,
    "ReduceProd": lambda x: x, "ReduceLogSumExp": lambda x: x, "ReduceL1": torch.abs, "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square, "ReduceLogSum": torch.log,
}  # fmt: skip
ALL = {
    "ReduceSum": torch.sum, "ReduceMean": torch.mean, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceProd": torch.prod, "ReduceLogSumExp": lambda x: torch.logsumexp(x, (0, 1)),
    "ReduceL1": lambda x: x.abs().sum(), "ReduceL2": lambda x: x.square().sum().sqrt(),
    "ReduceSumSquare": lambda x: x.square().sum(), "ReduceLogSum": lambda x: x.sum().log(),
}  # fmt: skip
SPELLINGS = {"left out": "", "left out by name": ", ", "empty": ", e"}


def reductions(spelling: str, attributes: str) -> str:
    """The sum of all reductions: of `w`, which is 1 x 3, and of exponentials where there is a logarithm."""
    made = [
        f"{name}_y = {name} <{attributes}> ({'p' if name == 'ReduceLogSum' else 'w'}{SPELLINGS[spelling]})"
        for name in EACH
    ]
    return f"""e = Constant <value = int64[0] {{}}> () p = Exp (w) {" ".join(made)}
               v = Sum ({", ".join(f"{name}_y" for name in EACH)})"""


def twin(functions, w):
    return sum(function(w.exp() if name == "ReduceLogSum" else w) for name, function in functions.items())


@pytest.mark.parametrize("noop", [0, 1])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_trains_as_in_pytorch(spelling, keepdims, noop):
    body = reductions(spelling, f"keepdims = {keepdims}, noop_with_empty_axes = {noop}") + " r = Mul (x, v)"
    x, w = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]]), [[-0.5, 1.5, 0.7]]
    functions = EACH if noop else ALL
    assert_trains_like(model(body, "3", 18, w=w), lambda x, w: x * twin(functions, w), [x], w=w)


@pytest.mark.parametrize("noop", [0, 1])
def test_behind_the_pass_a_reduction_without_axes_is_of_all(noop):
    how = f"<noop_with_empty_axes = {noop}>"
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (float[2, 3] x, int64[n] k) => (float[a, b] y, float[c, d] z)
      <int64[0] e = {{}}, int64[1] i = {{1}}> {{
        p = ReduceMax {how} (x, e) q = ReduceL1 {how} (p, ) y = ReduceSum {how} (q, i) z = ReduceSum {how} (x, k) }}"""
    nodes = list(prepare(ir.from_onnx_text(text)).graph)
    found = [(node.op_type, len(node.inputs), node.attributes.get_int(NOOP, 0)) for node in nodes]
    first = ("Identity", "Abs") if noop else ("ReduceMax", "ReduceL1")
    assert found == [*((op_type, 1, 0) for op_type in first), ("ReduceSum", 2, 0), ("ReduceSum", 2, noop)]


@pytest.mark.parametrize("op_type", EACH)
def test_integers_and_bodies_have_what_onnx_runtime_makes_of_them(op_type):
    text = f"""<ir_version: 8, opset_import: ["" : 18]> g (int32[1, 2] x, bool c) => (int32[a, b] y) {{
      y = If (c) <then_branch = t () => (int32[A, B] p) {{ p = {op_type} <noop_with_empty_axes = 1, keepdims = 0> (x) }},
                  else_branch = o () => (int32[C, D] q) {{ q = Identity (x) }}> }}"""
    original = onnx.parser.parse_model(text)
    outputs = []
    for proto in (original, ir.to_proto(prepare(ir.from_proto(original)))):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": np.array([[3, 2]], np.int32), "c": np.array(True)})[0].tolist())
    assert outputs[0] == outputs[1]
