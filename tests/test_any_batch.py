"""A batch of any size costs no more than one of a known size: the same operators, those that count, make the gradient."""

from __future__ import annotations

import collections

import pytest
from test_control_flow import parsed

from orttrainer import build_gradient

# With {N} for the size of the batch; what follows "wrt" is asked for.
GRAPHS = {
    "depthwise": """g (float[{N},6,8,8] x, float[6,1,3,3] w) => (float[{N},6,8,8] y) {{
        y = Conv <group = 6, pads = [1, 1, 1, 1]> (x, w) }}""",
    "grouped": """g (float[{N},6,8,8] x, float[4,3,3,3] w) => (float[{N},4,8,8] y) {{
        y = Conv <group = 2, pads = [1, 1, 1, 1]> (x, w) }}""",
    "pointwise": """g (float[{N},64,6,6] x, float[320,64,1,1] w) => (float[{N},320,6,6] y) {{ y = Conv (x, w) }}""",
    "looked up": """g (int64[{N},5] x, float[50,8] w) => (float[{N},5,8] y) {{ y = Gather (w, x) }}""",
    "selected": """g (float[{N},3,2] x, float[3,2] w) => (float[{N},3] y)
        <int64 zero = {{0}}, int64 one = {{1}}> {{
        v = Mul (x, w) a = Gather <axis = 2> (v, zero) b = Gather <axis = 2> (v, one) y = Mul (a, b) }}""",
}
HEAVY = (
    "Conv",
    "ConvTranspose",
    "MatMul",
    "Gemm",
    "Pad",
    "Resize",
    "ScatterElements",
    "ScatterND",
    "Slice",
    "Transpose",
)


@pytest.mark.parametrize("body", GRAPHS.values(), ids=GRAPHS)
def test_the_operators_are_those_of_one_size(body):
    assert operators(body.format(N="N")) == operators(body.format(N=4))


def test_axes_that_a_resize_keeps_cost_nothing():
    body = """g (float[N,3,4,4] x, float[1] w) => (float[N,3,8,8] y) <int64[3] size = {3, 8, 8}> {
        n = Shape <end = 1> (x) all = Concat <axis = 0> (n, size) v = Mul (x, w) y = Resize <mode = "linear"> (v, , , all) }"""
    assert operators(body)["MatMul"] == 2  # one for each axis that is longer


def test_a_kernel_of_one_tap_is_not_turned_around():
    body = "g (float[N,1280,6,6] x, float[320,1280,1,1] w) => (float[N,320,6,6] y) { y = Conv (x, w) }"
    assert operators(body)["Slice"] == 0  # which takes 5 ms of so many weights, one by one


def operators(body: str) -> collections.Counter:
    gradient = build_gradient(parsed(body), of="y", wrt="w")
    return collections.Counter(node.op_type for node in gradient.graph.node if node.op_type in HEAVY)
