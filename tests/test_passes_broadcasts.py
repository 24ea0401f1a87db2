"""What is repeated only for an operator that repeats it itself is not: the same numbers, one tensor less."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from torch import nn

from orttrainer.graph.passes.speed.broadcasts import BroadcastPass

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[{x}] x, float[{y}] y) => (float[3,4,5] z) <int64[3] shape = {{3, 4, 5}}, float two = {{2}}> {{ {body} }}"""


def model(body: str, x="3,4,1", y="3,4,5") -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT.format(body=body, x=x, y=y))))


def run(changed: ir.Model, x, y):
    session = onnxruntime.InferenceSession(ir.to_proto(changed).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "y": y})[0]


def expands(changed: ir.Model) -> int:
    """That are of use to anybody."""
    return sum(node.op_type == "Expand" and bool(node.outputs[0].uses()) for node in changed.graph)


NEEDLESS = {
    "on the left": ("e = Expand (x, shape) z = Mul (e, y)", {}),
    "on the right": ("e = Expand (x, shape) z = Sub (y, e)", {}),
    "with fewer axes": ("e = Expand (x, shape) z = Div (e, y)", {"x": "4,5"}),
    "by an operand that lacks another axis": ("e = Expand (x, shape) z = Add (e, y)", {"y": "1,4,5"}),
    "behind what is done to all alike": ("e = Expand (x, shape) s = Mul (two, e) n = Neg (s) z = Max (n, y)", {}),
    "both": ("e = Expand (x, shape) f = Expand (y, shape) z = Min (e, f)", {"y": "1,4,5"}),
}


@pytest.mark.parametrize("body, sizes", NEEDLESS.values(), ids=NEEDLESS)
def test_what_the_operator_repeats_itself_is_not_repeated_before(body, sizes):
    before, after = model(body, **sizes), model(body, **sizes)
    assert BroadcastPass()(after).modified and expands(after) == 0
    rng = np.random.default_rng(0)
    x, y = (
        rng.uniform(1, 2, [int(n) for n in sizes.get(k, d).split(",")]) for k, d in (("x", "3,4,1"), ("y", "3,4,5"))
    )
    x, y = x.astype(np.float32), y.astype(np.float32)
    np.testing.assert_array_equal(run(after, x, y), run(before, x, y))


NEEDED = {
    "nobody has the size": ("e = Expand (x, shape) z = Mul (e, y)", {"y": "3,4,1"}),
    "all of it is wanted": ("z = Expand (x, shape)", {}),
    "another operator": ("e = Expand (x, shape) z = MatMul (y, e)", {"x": "3,1,5", "y": "3,4,4"}),
    "of vectors that differ": ("e = Expand (x, shape) z = Add (e, y)", {"x": "3,1,1", "y": "5"}),
}


@pytest.mark.parametrize("body, sizes", NEEDED.values(), ids=NEEDED)
def test_what_must_be_repeated_is(body, sizes):
    after = model(body, **sizes)
    assert not BroadcastPass()(after).modified


def test_an_axis_that_nobody_else_has_stays():
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[5] x, float[5] y) => (float[1,5] z)
    <int64[2] shape = {1, 5}> { e = Expand (x, shape) z = Mul (e, y) }"""
    after = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert not BroadcastPass()(after).modified


def test_means_of_images_stay_repeated():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2,16,1,1] x, float[2,16,4,4] y) => (float[2,16,4,4] z) <int64[4] shape = {2, 16, 4, 4}>
    { e = Expand (x, shape) z = Mul (e, y) }"""
    after = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert not BroadcastPass()(after).modified


class Distances(nn.Module):
    """Of all pairs, and attention, as they are written by hand."""

    def __init__(self):
        super().__init__()
        self.centers, self.linear = nn.Parameter(torch.randn(7, 6)), nn.Linear(6, 18)

    def forward(self, x):
        near = torch.exp(-(x[:, :, None] - self.centers).square().sum(-1))
        q, k, v = self.linear(x).chunk(3, -1)
        weights = (q[:, :, None] * k[:, None]).sum(-1).softmax(-1)
        return near.mean() + (weights[..., None] * v[:, None]).sum(2).square().mean()


def test_sums_over_pairs_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("BroadcastPass", Distances, [5, 6], replaces="Expand", some=True)
