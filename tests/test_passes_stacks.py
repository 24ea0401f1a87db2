"""What is taken from a stack is what was put there."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from orttrainer.graph.passes.speed.stacks import TakeFromStackPass


def model_of(
    take: str, stack: str = "p = Unsqueeze(a, one) q = Unsqueeze(b, one) s = Concat<axis=1>(p, q)"
) -> ir.Model:
    """y = what `take` makes of s."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[3,4] a, float[3,4] b) => (float[m,n] y)
    <int64[1] one = {{1}}, int64[1] last = {{-1}}, int64 i = {{0}}, int64 j = {{-1}}, int64[1] k = {{0}}, int64[2] two = {{0, 1}}>
    {{ {stack} {take} }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize(("take", "source"), [
    ("t = Gather<axis=1>(s, i) y = Neg(t)", "a"),
    ("t = Gather<axis=1>(s, j) y = Neg(t)", "b"),
    ("t = Gather<axis=-2>(s, i) y = Neg(t)", "a"),
], ids=["first", "last", "axis from behind"])  # fmt: skip
def test_the_tensor_itself_is_taken(take, source):
    model = model_of(take)
    assert TakeFromStackPass()(model).modified
    assert model.graph.outputs[0].producer().inputs[0].name == source


@pytest.mark.parametrize("take", [
    "t = Gather<axis=0>(s, i) y = Neg(t)",  # another axis
    "t = Gather<axis=1>(s, k) t2 = Squeeze(t, one) y = Neg(t2)",  # which keeps it
    "t = Gather<axis=1>(s, two) t2 = ReduceSum<keepdims=0>(t, one) y = Neg(t2)",  # several
])  # fmt: skip
def test_what_takes_something_else_stays(take):
    assert not TakeFromStackPass()(model_of(take)).modified


@pytest.mark.parametrize("stack", [
    "p = Unsqueeze(a, one) s = Concat<axis=1>(p, p, p)",
    "p = Unsqueeze(a, last) q = Unsqueeze(b, last) s = Concat<axis=1>(p, q)",  # not a stack, though it looks alike
])  # fmt: skip
def test_only_stacks_are_stacks(stack):
    model = model_of("t = Gather<axis=1>(s, i) y = Neg(t)", stack)
    assert TakeFromStackPass()(model).modified == ("last" not in stack)


def test_what_was_taken_from_a_stack_may_be_stacked_again():
    take = "t = Gather<axis=1>(s, i) u = Unsqueeze(t, one) v = Concat<axis=1>(u, u) w = Gather<axis=1>(v, i) y = Neg(w)"
    model = model_of(take)
    TakeFromStackPass()(model)
    assert model.graph.outputs[0].producer().inputs[0].name == "a"
    assert all(x is not None for node in model.graph for x in node.inputs)
