"""The rules in dtypes and opsets that `tests/test_rules.py` does not try.

float16, bfloat16, float64 on ONNX Runtime, opsets 18 to 26, and axes and shapes that only the run knows.
"""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from cases import activation, elementwise, reduction
from marks import in_turn, of_each_operator, slow
from onnx import TensorProto, helper

from orttrainer import build_gradient
from orttrainer.testing import Case, evaluate
from orttrainer.testing.check import _model, _run_onnxruntime

CASES = [
    case
    for module in (elementwise, activation, reduction)
    for case in module.CASES
    if case.opset >= 18 and case.runtime and case.domain == "" and case.op_type != "Celu"  # float32 only
]
# What is far from 0 has no digits left in float16.
HALF_CASES = [case for case in CASES if "far-from-0" not in str(case)]


def in_opset(case, opset):
    return Case(
        case.op_type, *case.inputs, low=case.low, high=case.high, distinct=case.distinct, outputs=case.outputs,
        opset=opset, name=case.name, **case.attributes,
    )  # fmt: skip


def gradient_and_feeds(case, dtype):
    """The gradient model of a case in a dtype, checked against every schema, and inputs for it."""
    model, feeds = _model(case, dtype)
    wrt = list(feeds)
    gradient = build_gradient(model, of="y0", wrt=wrt)
    onnx.checker.check_model(gradient, full_check=True)
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert {v.type.tensor_type.elem_type for v in gradient.graph.output} == {elem}
    reference, reference_feeds = _model(case, np.float64)
    dy = np.random.default_rng(5).standard_normal(evaluate(reference, reference_feeds)["y0"].shape)
    if any(value.name == "y0_cotangent" for value in gradient.graph.input):
        feeds["y0_cotangent"], reference_feeds["y0_cotangent"] = np.asarray(dy.astype(dtype)), np.asarray(dy)
    expected = evaluate(build_gradient(reference, of="y0", wrt=wrt), reference_feeds)
    return gradient, feeds, {name: expected[f"{name}_grad"] for name in wrt}


def assert_near(found, expected, tolerance):
    for name, want in expected.items():
        got = found[f"{name}_grad"].astype(np.float64)
        assert got.shape == want.shape
        scale = max(np.max(np.abs(want), initial=0.0), 0.1)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def loads(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


@pytest.mark.parametrize("case", of_each_operator(HALF_CASES), ids=str)
def test_float16_gradients_run_on_onnxruntime(case):
    gradient, feeds, expected = gradient_and_feeds(case, np.float16)
    assert_near(_run_onnxruntime(gradient, feeds), expected, 2e-2)  # float16 rounds at 5e-4; inputs do too


def with_bfloat16(opset):
    """The uses that may be of bfloat16 in this opset, or that they need."""
    schemas = [(case, onnx.defs.get_schema(case.op_type, max(opset, case.opset))) for case in HALF_CASES]
    return of_each_operator([case for case, schema in schemas if "tensor(bfloat16)" in schema.inputs[0].types])


@pytest.mark.parametrize("case", with_bfloat16(18), ids=str)
def test_bfloat16_gradients_are_bfloat16(case):
    check_bfloat16(case, 18)


@pytest.mark.parametrize("case", with_bfloat16(22), ids=str)  # which gave bfloat16 to many operators
def test_bfloat16_gradients_are_bfloat16_in_a_newer_opset(case):
    check_bfloat16(case, 22)


def check_bfloat16(case, opset):
    """ONNX Runtime's CPU has no bfloat16 kernels: the schemas check the types, the reference evaluator the values."""
    opset = max(opset, case.opset)
    gradient, feeds, expected = gradient_and_feeds(in_opset(case, opset), ml_dtypes.bfloat16)
    assert_near(evaluate(gradient, feeds), expected, 6e-2)  # bfloat16 rounds at 4e-3


@pytest.mark.parametrize("case", of_each_operator(CASES), ids=str)
def test_float64_gradients_run_on_onnxruntime_where_the_operator_does(case):
    gradient, feeds, expected = gradient_and_feeds(case, np.float64)
    if loads(_model(case, np.float64)[0]):
        assert_near(_run_onnxruntime(gradient, feeds), expected, 1e-9)


@pytest.mark.parametrize("opset", [20, slow(21), 22, slow(23), 26])
@pytest.mark.parametrize("case", of_each_operator(CASES), ids=str)
def test_gradients_are_valid_in_every_opset(case, opset):
    opset = max(opset, case.opset)
    case = in_opset(case, opset)
    gradient, feeds, expected = gradient_and_feeds(case, np.float32)
    assert gradient.opset_import[0].version == opset
    runs = opset <= 24 or loads(_model(case, np.float32)[0])  # Swish has no kernel in ONNX Runtime
    assert_near(_run_onnxruntime(gradient, feeds) if runs else evaluate(gradient, feeds), expected, 2e-4)


FLOAT, DOUBLE, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16


@pytest.mark.parametrize(
    "source, target",
    [(FLOAT, DOUBLE), (DOUBLE, FLOAT), (FLOAT, FLOAT16), (FLOAT16, FLOAT), (FLOAT, BFLOAT16), (BFLOAT16, FLOAT)],
)
def test_cast_gives_the_gradient_in_the_dtype_of_its_input(source, target):
    x, y = helper.make_tensor_value_info("x", source, [2]), helper.make_tensor_value_info("y", target, [2])
    node = helper.make_node("Cast", ["x"], ["y"], to=target)
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    gradient = build_gradient(model)
    onnx.checker.check_model(gradient, full_check=True)
    dtypes = [helper.tensor_dtype_to_np_dtype(t) for t in (source, target)]
    found = evaluate(gradient, {"x": np.array([0.5, 2.0], dtypes[0]), "y_cotangent": np.array([1.5, -3.0], dtypes[1])})
    assert found["x_grad"].dtype == dtypes[0]
    np.testing.assert_array_equal(found["x_grad"].astype(np.float64), [1.5, -3.0])


def test_cast_to_an_integer_and_back_has_gradient_0():
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("Cast", ["i"], ["y"], to=TensorProto.FLOAT),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    found = _run_onnxruntime(
        build_gradient(model), {"x": np.array([0.5, 2.0], np.float32), "y_cotangent": np.ones(2, np.float32)}
    )
    np.testing.assert_array_equal(found["x_grad"], [0.0, 0.0])


def test_mean_of_more_elements_than_float16_can_count():
    x, y = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT16, []),
    )
    node = helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    found = _run_onnxruntime(build_gradient(model), {"x": np.ones(100_000, np.float16)})
    np.testing.assert_allclose(found["x_grad"].astype(np.float64), 1e-5, rtol=1e-2)


@pytest.mark.parametrize("op_type", sorted(reduction.FORMS))
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("shape", [["a", "b", "c"], None], ids=["symbolic", "unknown-rank"])
@pytest.mark.parametrize("noop, axes", in_turn([0, 1], [[1], [-1, 0], []]))
def test_reduction_over_axes_that_only_the_run_knows(op_type, keepdims, shape, axes, noop):
    """Against the same reduction with constant axes and static shapes."""
    data = reduction.POSITIVE
    node = helper.make_node(op_type, ["x0", "x1"], ["y0"], keepdims=keepdims, noop_with_empty_axes=noop)
    inputs = [
        helper.make_tensor_value_info("x0", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("x1", TensorProto.INT64, ["k"]),
    ]
    output = helper.make_tensor_value_info("y0", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [output]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    case = Case(op_type, data, np.array(axes, np.int64), keepdims=keepdims, noop_with_empty_axes=noop)
    _, feeds, expected = gradient_and_feeds(case, np.float32)
    feeds.setdefault("y0_cotangent", np.ones((), np.float32))
    feeds["x1"] = np.array(axes, np.int64)
    assert_near(_run_onnxruntime(build_gradient(model, wrt="x0"), feeds), expected, 1e-5)


def test_operators_of_com_microsoft_are_typed_through_a_chain():
    """ONNX infers nothing for them, nor for what follows."""
    nodes = [
        helper.make_node("BiasGelu", ["x", "bias"], ["a"], domain="com.microsoft"),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("FastGelu", ["b"], ["c"], domain="com.microsoft"),
        helper.make_node("QuickGelu", ["c"], ["y"], domain="com.microsoft"),
    ]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3]) for n in "xy"]
    bias = onnx.numpy_helper.from_array(np.array([0.1, -0.2, 0.3], np.float32), "bias")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos[:1], infos[1:], [bias]), opset_imports=opsets, ir_version=8
    )
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    found = _run_onnxruntime(
        build_gradient(model, wrt=["x", "bias"]), {"x": x, "y_cotangent": np.ones((2, 3), np.float32)}
    )

    tensors = [torch.tensor(v, requires_grad=True) for v in (x, np.array([0.1, -0.2, 0.3], np.float32))]
    y = F.gelu(torch.tanh(F.gelu(tensors[0] + tensors[1])), approximate="tanh")
    (y * torch.sigmoid(1.702 * y)).sum().backward()
    np.testing.assert_allclose(found["x_grad"], tensors[0].grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(found["bias_grad"], tensors[1].grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("op_type, more", [("Max", [0.7]), ("Max", [0.7, 0.2]), ("Min", [0.7]), ("Clip", [0.3, 1.2])])
def test_float16_winners_are_found_where_onnxruntime_keeps_float32(op_type, more):
    """ORT keeps h in float32 where it can, rounds it for Max and Clip, and rounds output r: h == r is never true."""
    names = [f"c{i}" for i in range(len(more))]
    nodes = [
        helper.make_node("Exp", ["x"], ["h"]),
        helper.make_node(op_type, ["h", *names], ["r"]),
        helper.make_node("Sin", ["r"], ["y"]),
    ]
    x_info, y_info, r_info = (helper.make_tensor_value_info(n, FLOAT16, [256]) for n in "xyr")
    constants = [onnx.numpy_helper.from_array(np.array(c, np.float16), n) for n, c in zip(names, more)]
    graph = helper.make_graph(nodes, "g", [x_info], [y_info, r_info], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.random.default_rng(0).standard_normal(256).astype(np.float16)
    found = _run_onnxruntime(build_gradient(model, of="y", wrt="x"), {"x": x, "y_cotangent": np.ones(256, np.float16)})

    tensor = torch.tensor(x.astype(np.float64), requires_grad=True)
    h, bounds = tensor.exp(), torch.tensor(more)
    r = {
        "Max": lambda: h.clamp(min=bounds.max()),
        "Min": lambda: h.clamp(max=bounds.min()),
        "Clip": lambda: h.clamp(*more),
    }
    r[op_type]().sin().sum().backward()
    np.testing.assert_allclose(found["x_grad"].astype(np.float64), tensor.grad.numpy(), rtol=0.01, atol=0.01)
