"""Checks of places: left out where they are never negative, and made before places are repeated."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from orttrainer.graph.passes.from_front import NOWHERE, PlacesFromFrontPass

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
MADE = {  # how places i are made of numbers x of a batch; whether they may be negative
    "inputs that are asked": ("i = Identity(asked)", False),
    "sums of such": ("s = Add(asked, asked) i = Mul(s, two)", False),
    "inputs that are not asked": ("i = Identity(x)", True),
    "differences": ("i = Sub(asked, two)", True),
    "sums of others": ("i = Add(asked, x)", True),
    "floats that are asked": ("i = Cast<to = 7>(float_asked)", True),
    "short numbers": ("n = Cast<to = 6>(asked) i = Cast<to = 7>(n)", True),
    "the largest": ("i = ArgMax<axis = 1, keepdims = 0>(scores)", False),
    "an order": ("v, k = TopK(scores, two) i = Squeeze(k)", False),
    "what is sorted": ("v, i = TopK(x, two)", False),
    "the numbers in order": ("i, k = TopK(x, two)", True),
    "clipped": ("i = Clip(x, zero)", False),
    "clipped from above": ("i = Clip(x, , zero)", True),
    "at least 0": ("i = Max(x, two)", False),
    "at most 2": ("i = Min(x, two)", True),
    "a remainder": ("i = Mod(x, two)", False),
    "a remainder with its sign": ("i = Mod<fmod = 1>(x, two)", True),
    "one or the other": ("c = Less(x, zero) i = Where(c, two, asked)", False),
    "one or such": ("c = Less(x, zero) i = Where(c, two, x)", True),
    "truths": ("c = Less(x, zero) i = Cast<to = 7>(c)", False),
    "places of truths": ("k = NonZero(scores) i = Gather(k, zero)", False),
    "what is checked": ("c = Less(x, zero) i = Where(c, nowhere, x)", False),
}


def checked(made: str) -> ir.Model:
    text = f"""g (int64[n] x, int64[n] asked, float[n] float_asked, float[n, 4] scores, float[n] data) => (float[m] y)
    <int64 zero = {{0}}, int64[1] two = {{2}}, int64 nowhere = {{{NOWHERE}}}> {{
        {made} negative = Less(i, zero) at = Where(negative, nowhere, i) y = Gather(data, at)
    }}"""
    model = ir.from_onnx_text(HEADER + text)
    for value in model.graph.initializers.values():
        value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape
    inferred = ir.passes.common.ShapeInferencePass()(model).model
    return PlacesFromFrontPass(["asked", "float_asked"])(inferred).model


@pytest.mark.parametrize("case", MADE)
def test_only_places_that_may_be_negative_are_asked(case):
    made, may_be_negative = MADE[case]
    lookup = next(node for node in checked(made).graph if node.outputs[0].name == "y")
    assert (lookup.inputs[1].name == "at") == may_be_negative


def test_places_are_asked_before_they_are_repeated():
    lookup = next(node for node in checked("i = Expand(x, two)").graph if node.outputs[0].name == "y")
    repeated = lookup.inputs[1].producer()
    assert repeated.op_type == "Expand" and repeated.inputs[0].producer().op_type == "Where"
