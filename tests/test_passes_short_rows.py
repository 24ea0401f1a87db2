"""What is repeated for many short rows is repeated before, to the same bits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from torch import nn

from orttrainer.graph.passes.speed.short_rows import ShortRowsPass

AT_HAND = {"n": 2048, "m": 40, "k": 3}
NUMPY = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum,
    "Equal": np.equal, "Less": np.less, "GreaterOrEqual": np.greater_equal,
}  # fmt: skip


def model(operator: str, a: str, b: str, y: str, dtype="float", result=None) -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g ({dtype}[{a}] a, {dtype}[{b}] b) => ({result or dtype}[{y}] y) {{ y = {operator} (a, b) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def operators(changed: ir.Model) -> list[str]:
    return [node.op_type for node in changed.graph]


def run(changed: ir.Model, **feeds):
    session = onnxruntime.InferenceSession(ir.to_proto(changed).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def sizes(shape: str, **others) -> list[int]:
    known = {**AT_HAND, **others}
    return [known[size] if size in known else int(size) for size in shape.split(",")]


def numbers(shape: list[int], seed: int, dtype="float32") -> np.ndarray:
    x = np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)
    if x.dtype.kind == "f":  # -0 among them
        for k, odd in enumerate((-0.0, np.inf, -np.inf, np.nan)):
            x.reshape(-1)[k :: 7 + k] = odd
    return x


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(expected[number]))


SHAPES = [
    ("n,3", "n,1", "n,3"), ("n,1", "n,3", "n,3"), ("n,8", "8", "n,8"), ("n,1", "8", "n,8"), ("2048,3", "1,3", "2048,3"),
    ("n,m,1", "5", "n,m,5"), ("2,m,1,3", "2,1,m,3", "2,m,m,3"), ("m,1,3", "m,3", "m,m,3"), ("n,1,1", "n,2,3", "n,2,3"),
    ("n,k", "n,1", "n,k"), ("n,k", "k", "n,k"), ("1,n,1", "m,1,k", "m,n,k"),
]  # fmt: skip


@pytest.mark.parametrize("operator", ["Mul", "Div"])
@pytest.mark.parametrize("a, b, y", SHAPES)
def test_short_rows_are_what_they_were_to_the_last_bit(operator, a, b, y):
    changed = model(operator, a, b, y)
    assert ShortRowsPass(AT_HAND)(changed).modified and "Expand" in operators(changed)
    for others in ({}, {"n": 5, "m": 1}, {"n": 1}):  # batches that come later
        if "2048" in a and others:
            continue
        feeds = {"a": numbers(sizes(a, **others), 0), "b": numbers(sizes(b, **others), 1)}
        with np.errstate(all="ignore"):
            assert_same_bits(run(changed, **feeds), NUMPY[operator](feeds["a"], feeds["b"]))


@pytest.mark.parametrize("operator", NUMPY)
@pytest.mark.parametrize("dtype", ["float", "double", "int64"])
def test_of_any_dtype_and_operator(operator, dtype):
    result = "bool" if operator in ("Equal", "Less", "GreaterOrEqual") else dtype
    changed = model(operator, "n,1", "8", "n,8", dtype, result)
    assert ShortRowsPass(AT_HAND)(changed).modified
    a, b = (numbers(shape, k, dtype.replace("float", "float32")) for k, shape in enumerate(([2048, 1], [8])))
    a, b = (x + 5 if operator == "Div" and dtype == "int64" else x for x in (a, b))
    with np.errstate(all="ignore"):
        expected = a // b if operator == "Div" and dtype == "int64" else NUMPY[operator](a, b)
    assert_same_bits(run(changed, a=a, b=b), expected)


def choice(c: str, a: str, b: str, y: str) -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (bool[{c}] c, float[{a}] a, float[{b}] b) => (float[{y}] y) {{ y = Where (c, a, b) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("n", [2048, 1, 0])
@pytest.mark.parametrize("c, a, b, y", [
    ("n,1", "n,3", "n,3", "n,3"), ("n,1", "n,3", "1", "n,3"), ("8,3", "n,1,3", "n,1,3", "n,8,3"), ("n,1", "3", "n,3", "n,3"),
    ("n,3", "n,1", "3", "n,3"), ("n,3", "n,3", "n,1", "n,3"), ("n,1", "1", "n,3", "n,3"), ("n,3", "n,1", "1", "n,3"),
])  # fmt: skip
def test_choices_of_short_rows_are_the_same(c, a, b, y, n):
    changed = choice(c, a, b, y)
    assert ShortRowsPass(AT_HAND)(changed).modified and "Expand" in operators(changed)
    feeds = {"a": numbers(sizes(a, n=n), 0), "b": numbers(sizes(b, n=n), 1), "c": numbers(sizes(c, n=n), 2) > 0}
    found = run(changed, **feeds)
    np.testing.assert_array_equal(found, np.where(feeds["c"], feeds["a"], feeds["b"]))
    assert_same_bits(found, run(choice(c, a, b, y), **feeds))  # in which -0 may be 0


@pytest.mark.parametrize("c, a, b, y", [
    ("n,3", "n,3", "1", "n,3"), ("n,64", "n,1", "n,64", "n,64"), ("m,1", "m,3", "m,3", "m,3"), ("n,1", "n,1", "n,1", "n,1"),
])  # fmt: skip
def test_other_choices_stay(c, a, b, y):
    assert not ShortRowsPass(AT_HAND)(choice(c, a, b, y)).modified


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("a, b, y", [("n,1", "n,3", "n,3"), ("n,1", "8", "n,8"), ("n,1,3", "m,3", "n,m,3")])
def test_batches_of_nothing_and_of_few(a, b, y, n):
    changed = model("Sub", a, b, y)
    assert ShortRowsPass(AT_HAND)(changed).modified
    feeds = {"a": np.ones(sizes(a, n=n), np.float32), "b": numbers(sizes(b, n=n), 0)}
    with np.errstate(all="ignore"):
        assert_same_bits(run(changed, **feeds), feeds["a"] - feeds["b"])


@pytest.mark.parametrize("a, b, y", [
    ("n,64", "n,1", "n,64"), ("n,64", "64", "n,64"), ("16,3", "16,1", "16,3"), ("n,3", "n,3", "n,3"), ("n,3", "1", "n,3"),
    ("n,8,8", "n,1,1", "n,8,8"), ("n,20", "n,1", "n,20"), ("j,3", "i,3", "y,3"),
])  # fmt: skip
def test_long_rows_few_rows_and_what_is_not_repeated_stay(a, b, y):
    changed = model("Mul", a, b, y)
    assert not ShortRowsPass(AT_HAND)(changed).modified and operators(changed) == ["Mul"]


def test_the_bias_of_a_product_stays():
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 6] x, float[6, 4] w, float[4] b) => (float[n, 4] y) { p = MatMul (x, w) y = Add (p, b) }"""
    changed = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    assert not ShortRowsPass(AT_HAND)(changed).modified


@pytest.mark.parametrize("dtype", ["float", "int64", "bool"])
def test_an_expand_along_a_short_last_axis(dtype):
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g ({dtype}[n, 1] x, int64[2] s) => ({dtype}[n, 3] y) {{ y = Expand (x, s) }}"""
    changed = ir.from_proto(onnx.parser.parse_model(text))
    assert ShortRowsPass(AT_HAND)(changed).modified and "Transpose" in operators(changed)
    for n in (2048, 1, 0):
        x = numbers([n, 1], 0, dtype.replace("float", "float32"))
        assert_same_bits(run(changed, x=x, s=np.array([n, 3])), np.broadcast_to(x, [n, 3]))


class Points(nn.Module):
    """Vectors between all pairs of points, each times a number; radial functions of their lengths."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(3))
        self.register_buffer("centers", torch.linspace(0, 2, 4))

    def forward(self, x):
        between = x[:, :, None] - x[:, None]
        lengths = (between.square().sum(-1, keepdim=True) + 1).sqrt()
        radial = torch.exp(-((lengths - self.centers) ** 2))
        return (between / lengths * self.scale * self.weight(radial)).sum(2).square().mean()


def test_points_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("ShortRowsPass", Points, [24, 3], replaces=None)
