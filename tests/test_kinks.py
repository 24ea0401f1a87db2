"""At kinks, ties, zeros and infinities, where finite differences say nothing, gradients are PyTorch's."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from orttrainer import build_gradient
from orttrainer.differentiate.build import gradient_of
from orttrainer.testing import evaluate

INF = np.inf


def gradients(op_type, *inputs, opset=18, **attributes):
    """Gradients of sum(op(inputs) * dy) by the rule on the reference evaluator, with dy = 1, 2, 3, ..."""
    inputs = [np.asarray(x, np.float64) if not isinstance(x, np.ndarray) else x for x in inputs]
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs)
    ]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "kink", infos, [onnx.ValueInfoProto(name="y")])
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    feeds = dict(zip(names, inputs))
    y = evaluate(model, feeds)["y"]
    wrt = [n for n, x in feeds.items() if x.dtype == np.float64]
    gradient = gradient_of(ir.from_proto(model), wrt=wrt)  # ONNX has Celu in float32 only
    dy = np.arange(1.0, y.size + 1).reshape(y.shape)
    if y.ndim:
        feeds["y_cotangent"] = dy
    with np.errstate(all="ignore"):
        found = evaluate(gradient, feeds)
    return [found[f"{n}_grad"] for n in wrt]


def torch_gradients(function, *inputs):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    y = function(*tensors)
    dy = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).reshape(y.shape)
    return [g.numpy() for g in torch.autograd.grad(y, tensors, dy)]


def shrink(x):
    return F.hardshrink(x, 0.5)


UNARY = [
    ("Abs", {}, torch.abs, [0.0, -0.0]),
    ("Relu", {}, F.relu, [0.0, -0.0, -INF, INF]),
    ("LeakyRelu", {"alpha": 0.25}, lambda x: F.leaky_relu(x, 0.25), [0.0]),
    ("LeakyRelu", {"alpha": 1.5}, lambda x: F.leaky_relu(x, 1.5), [0.0]),
    ("ThresholdedRelu", {"alpha": 1.0}, lambda x: F.threshold(x, 1.0, 0.0), [1.0]),
    ("Shrink", {"lambd": 0.5}, shrink, [0.5, -0.5, 0.0]),
    ("HardSigmoid", {"alpha": 0.25, "beta": 0.5}, lambda x: F.hardsigmoid(x * 1.5), [-2.0, 2.0, -3.0, 3.0]),
    ("HardSwish", {}, F.hardswish, [-4.0, 0.0, 4.0]),  # at +-3 releases of PyTorch differ
    ("Elu", {"alpha": 0.5}, lambda x: F.elu(x, 0.5), [0.0, -INF]),
    ("Celu", {"alpha": 0.5}, lambda x: F.celu(x, 0.5), [0.0]),
    ("Softsign", {}, F.softsign, [0.0]),
    ("Softplus", {}, F.softplus, [-800.0, 0.0, 800.0]),
    ("Sigmoid", {}, torch.sigmoid, [-800.0, 800.0]),
    ("Tanh", {}, torch.tanh, [-800.0, 800.0]),
    ("Mish", {}, F.mish, [-800.0, 800.0]),
    ("Sqrt", {}, torch.sqrt, [0.0]),
    ("Log", {}, torch.log, [0.0]),
]


@pytest.mark.parametrize("op_type, attributes, function, x", UNARY, ids=lambda p: p if isinstance(p, str) else "")
def test_subgradient_of_a_function_at_its_kink_is_that_of_pytorch(op_type, attributes, function, x):
    x = np.array(x)
    (actual,) = gradients(op_type, x, **attributes)
    (expected,) = torch_gradients(function, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x", [-6.0, 0.0, 6.0, 40.0, -40.0])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_slope_of_gelu_is_right_far_from_0(x, approximate):
    (actual,) = gradients("Gelu", np.array([x]), opset=20, approximate=approximate)
    (expected,) = torch_gradients(lambda x: F.gelu(x, approximate=approximate), np.array([x]))
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("op_type, function", [("Max", torch.maximum), ("Min", torch.minimum)])
def test_two_inputs_of_max_and_min_that_tie_share_equally(op_type, function):
    a, b = np.array([[1.0, 2.0], [3.0, 3.0]]), np.array([1.0, 3.0])
    for actual, expected in zip(gradients(op_type, a, b), torch_gradients(function, a, b)):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("op_type", ["Max", "Min"])
def test_three_inputs_of_max_and_min_that_tie_share_equally(op_type):
    sign = 1.0 if op_type == "Max" else -1.0
    found = gradients(op_type, *(sign * np.array(x) for x in ([2.0, 2.0], [2.0, 1.0], [2.0, 2.0])))
    np.testing.assert_array_equal(found, [[1 / 3, 1.0], [1 / 3, 0.0], [1 / 3, 1.0]])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_of_one_value_with_itself_has_slope_1(count):
    node = helper.make_node("Max", ["x"] * count, ["y"])
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [2]) for n in "xy"]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    found = evaluate(build_gradient(model), {"x": np.array([1.0, -1.0]), "y_cotangent": np.array([1.0, 2.0])})
    np.testing.assert_allclose(found["x_grad"], [1.0, 2.0], rtol=1e-15)


@pytest.mark.parametrize("op_type, function", [("ReduceMax", torch.amax), ("ReduceMin", torch.amin)])
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_that_tie_in_a_reduction_share_equally(op_type, function, axis):
    x = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    (actual,) = gradients(op_type, x, np.array([axis]), keepdims=0)
    (expected,) = torch_gradients(lambda x: function(x, axis), x)
    np.testing.assert_allclose(actual, expected, rtol=1e-15)


@pytest.mark.parametrize("low, high", [(-INF, 1.0), (0.0, INF), (-INF, INF), (INF, INF), (-INF, -INF)])
def test_clip_by_infinity_has_the_slope_that_it_has_by_one_bound(low, high):
    x = np.array([-2.0, 0.0, 0.5, 1.0, 3.0])
    between = (low <= x) & (x <= high)  # as PyTorch has it before 2.14
    found, *_ = gradients("Clip", x, np.array(low), np.array(high))
    np.testing.assert_array_equal(found, [1.0, 2.0, 3.0, 4.0, 5.0] * between)


@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (1.0, -1.0)], ids=["low-below-high", "low-above-high"])
def test_clip_passes_the_gradient_on_its_bounds(low, high):
    x = np.array([-2.0, -1.0, 0.5, 2.0, 3.0]) if low < high else np.array([-2.0, 0.0, 3.0])
    found = gradients("Clip", x, np.array(low), np.array(high))
    dy = np.arange(1.0, x.size + 1)
    below, above = (
        (x < low) & (low < high),
        np.maximum(x, low) > high,
    )  # as PyTorch has it before 2.14, and since then apart
    for actual, where in zip(found, (~(below | above), below, above)):
        np.testing.assert_array_equal(actual, (dy * where).sum() if actual.ndim == 0 else dy * where)


def test_pow_at_zeros_and_of_negative_bases_is_pytorch():
    """Also where that is infinite, or NaN: (-2)^p is a number at whole p alone, and has no slope there."""
    values = [-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0]
    base, exponent = (x.ravel() for x in np.meshgrid(values, values))
    found, expected = gradients("Pow", base, exponent), torch_gradients(torch.pow, base, exponent)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.0, 1.5])
def test_pow_with_a_constant_exponent_at_zero_is_pytorch(exponent):
    node = helper.make_node("Pow", ["x", "p"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2])
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, [2])
    p = onnx.numpy_helper.from_array(np.array(exponent), "p")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [p]), opset_imports=[helper.make_opsetid("", 18)]
    )
    feeds = {"x": np.array([0.0, 2.0]), "y_cotangent": np.array([1.0, 2.0])}
    with np.errstate(all="ignore"):
        actual = evaluate(build_gradient(model, wrt="x"), feeds)["x_grad"]
    (expected,) = torch_gradients(lambda x: x**exponent, feeds["x"])
    np.testing.assert_allclose(actual, expected)


def test_an_exponent_that_is_trained_is_not_taken_for_a_constant():
    """GeM pooling: x^p with a parameter p. A slope 3 x^2 for p = 3 would be wrong one step later."""
    node = helper.make_node("Pow", ["x", "p"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2])
    y = helper.make_tensor_value_info("y", TensorProto.DOUBLE, [2])
    p = onnx.numpy_helper.from_array(np.array(3.0), "p")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [p]), opset_imports=[helper.make_opsetid("", 18)]
    )
    gradient = build_gradient(model, wrt=["x", "p"])
    (initializer,) = [t for t in gradient.graph.initializer if t.name == "p"]
    initializer.CopyFrom(onnx.numpy_helper.from_array(np.array(2.5), "p"))
    found = evaluate(gradient, {"x": np.array([2.0, 3.0]), "y_cotangent": np.array([1.0, 2.0])})
    dx, dp = torch_gradients(torch.pow, np.array([2.0, 3.0]), 2.5)
    np.testing.assert_allclose(found["x_grad"], dx)
    np.testing.assert_allclose(found["p_grad"], dp)


@pytest.mark.parametrize("row", [[1.0, 2.0], [0.0, 3.0], [0.0, 0.0]], ids=["no-zero", "one-zero", "two-zeros"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reduce_prod_is_right_with_any_number_of_zeros(row, keepdims):
    x = np.array([[*row, 5.0], [-1.0, 2.0, -3.0]])
    (actual,) = gradients("ReduceProd", x, np.array([1]), keepdims=keepdims)
    (expected,) = torch_gradients(lambda x: x.prod(1, bool(keepdims)), x)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("op_type", ["ReduceL1", "ReduceL2", "ReduceSumSquare"])
def test_norm_of_a_zero_vector_has_gradient_0(op_type):
    (actual,) = gradients(op_type, np.zeros((2, 3)), np.array([1]))
    np.testing.assert_array_equal(actual, np.zeros((2, 3)))


def test_logsumexp_takes_minus_infinity():
    x = np.array([[-INF, 0.0, 1.0], [-INF, -INF, -INF], [1000.0, 999.0, -INF]])
    (actual,) = gradients("ReduceLogSumExp", x, np.array([1]))
    (expected,) = torch_gradients(lambda x: x[::2].logsumexp(1, True), x)
    expected[2] *= 3 / 2  # the third row is the second one of x[::2]
    np.testing.assert_allclose(actual, expected, atol=1e-15)


@pytest.mark.parametrize("op_type, function", [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)])
def test_softmax_takes_masked_logits(op_type, function):
    x = np.array([[-INF, 0.0, 1.0], [0.5, -INF, -INF]])
    finite_dy = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    mask = finite_dy != 0
    node = helper.make_node(op_type, ["x"], ["y"])
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [2, 3]) for n in "xy"]
    model = helper.make_model(
        helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=[helper.make_opsetid("", 18)]
    )
    actual = evaluate(build_gradient(model), {"x": x, "y_cotangent": finite_dy})["x_grad"]
    tensor = torch.tensor(x, requires_grad=True)
    (function(tensor, -1)[torch.tensor(mask)] * torch.tensor(finite_dy[mask])).sum().backward()
    np.testing.assert_allclose(actual, tensor.grad.numpy(), atol=1e-15)


def test_where_keeps_an_infinite_gradient_on_its_side():
    condition = np.array([True, False])
    node = helper.make_node("Where", ["c", "a", "b"], ["y"])
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, [2]) for n in "aby"]
    c = onnx.numpy_helper.from_array(condition, "c")
    model = helper.make_model(
        helper.make_graph([node], "g", infos[:2], infos[2:], [c]), opset_imports=[helper.make_opsetid("", 18)]
    )
    found = evaluate(
        build_gradient(model, wrt=["a", "b"]), {"a": np.ones(2), "b": np.ones(2), "y_cotangent": np.array([1.0, INF])}
    )
    np.testing.assert_array_equal(found["a_grad"], [1.0, 0.0])
    np.testing.assert_array_equal(found["b_grad"], [0.0, INF])


@pytest.mark.parametrize("op_type", ["Ceil", "Floor", "Round", "Sign"])
def test_rounding_has_gradient_0(op_type):
    (actual,) = gradients(op_type, np.array([-1.5, 0.0, 0.3, 2.0]))
    np.testing.assert_array_equal(actual, np.zeros(4))


@pytest.mark.parametrize("fmod, function", [(1, torch.fmod), (0, torch.remainder)])
def test_mod_rounds_to_the_integer_that_it_took_away(fmod, function):
    a, b = np.array([1e6 + 0.3, -7.0, 0.9999999, -0.3]), np.array([0.7, 2.0, 1.0, 5.0])
    for actual, expected in zip(gradients("Mod", a, b, fmod=fmod), torch_gradients(function, a, b)):
        np.testing.assert_array_equal(actual, expected)


def test_rows_of_a_softmax_that_are_masked_whole_have_no_gradient():
    """-inf everywhere gives NaN, which Where drops; 0 * NaN is NaN, and would spread from there."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3] x, float[2, 3] bias, bool[2, 1] masked) => (float[2, 3] y)
        { z = Add (x, bias) p = Softmax (z) zero = Constant <value = float {0}> () y = Where (masked, zero, p) }""")
    gradient = build_gradient(model, of="y", wrt="x")
    x = np.array([[0.1, 0.7, -0.3], [0.2, 0.4, 0.5]], np.float32)
    bias, masked = np.array([[0, 0, -np.inf], [-np.inf] * 3], np.float32), np.array([[False], [True]])
    dy = np.array([[1.0, 2.0, 3.0]] * 2, np.float32)
    with np.errstate(invalid="ignore"):
        dx = evaluate(gradient, {"x": x, "bias": bias, "masked": masked, "y_cotangent": dy})["x_grad"]
    p = 1 / (1 + np.exp(0.6))  # of two classes, the first
    np.testing.assert_allclose(dx, [[-p * (1 - p), p * (1 - p), 0], [0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("align_corners, size", [(True, 5), (True, 3), (True, 1), (False, 4), (False, 2), (False, 1)])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_on_pixels_and_the_rim_and_beyond_the_slope_of_grid_sample_is_pytorch_s(
    mode, padding_mode, align_corners, size
):
    """At whole pixels and halves: on the rim, and at each reflection of it, PyTorch's slope of the bilinear is 0."""
    at = np.arange(-4 * size - 2, 5 * size + 2) / 2  # in pixels; each is exact, in [-1, 1] as well
    x = (2 * at + (0 if align_corners else 1)) / max(size - align_corners, 1) - 1
    if mode == "nearest" and padding_mode == "reflection":
        x = x[at == np.floor(at)]  # of halves the runtime rounds before it reflects
    grid = np.stack(np.meshgrid(x, np.array([-1.0, -0.5, 0.25, 1.0])), -1)[None]
    image = np.random.default_rng(0).standard_normal((1, 2, 3, size))
    options = dict(mode=mode, padding_mode=padding_mode)
    found = gradients("GridSample", image, grid, align_corners=int(align_corners), **options)
    expected = torch_gradients(lambda x, g: F.grid_sample(x, g, align_corners=align_corners, **options), image, grid)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
