"""Mixed precision: which operators compute in half precision, what is cast, and how the CPU computes it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from half import BFLOAT16, FLOAT, FLOAT16, run_model

from orttrainer.differentiate.prepare import prepare
from orttrainer.errors import InvalidArgumentError, UnsupportedFeatureError
from orttrainer.graph.passes.half_kernels import EmulateHalfPass, has_cuda_kernel
from orttrainer.graph.passes.half_precision import HalfPrecisionPass

HALVES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])


def converted(text, dtype=FLOAT16, parameters=("w", "v", "b"), opset=18, **options):
    """A graph in ONNX's text form, prepared and in mixed precision."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    model = prepare(ir.from_proto(onnx.parser.parse_model(header + text)))
    HalfPrecisionPass(dtype, parameters, **options)(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=all(not node.domain for node in model.graph.all_nodes()))
    return model


def dtypes(model) -> dict[str, ir.DataType]:
    return {value.name: value.dtype for node in model.graph for value in node.outputs}


def casts(model) -> list[tuple[str, ir.DataType]]:
    """What is cast, and to what."""
    nodes = [node for node in model.graph if node.op_type == "Cast"]
    return sorted((node.inputs[0].name, node.outputs[0].dtype) for node in nodes)


# -- which operators ----------------------------------------------------------------------------


@HALVES
def test_a_product_is_half_and_so_is_the_bias_that_follows(dtype):
    model = converted(
        """ g (float[n, 4] x, float[4, 3] w, float[3] b) => (float loss, float[n, 3] y)
        { a = MatMul(x, w)  y = Add(a, b)  t = Tanh(y)  loss = ReduceMean<keepdims = 0>(t) }""",
        dtype,
    )
    found = dtypes(model)
    assert {found[name] for name in ("a", "y", "t")} == {dtype}
    assert casts(model) == sorted([("x", dtype), ("w", dtype), ("b", dtype), ("t", FLOAT)])
    assert [value.dtype for value in model.graph.outputs] == [FLOAT, dtype]
    assert [value.name for value in model.graph.outputs] == ["loss", "y"]


# The float32 list of CUDA autocast in PyTorch's documentation, in ONNX's words; Reciprocal also as 1 / x.
FLOAT32 = [
    "Acos(h)", "Asin(h)", "Cosh(h)", "Exp(h)", "Log(h)", "Pow(h, two)", "Reciprocal(h)", "Div(two, h)", "Sinh(h)",
    "Softplus(h)", "Tan(h)", "Softmax(h)", "LogSoftmax(h)", "LayerNormalization(h, b)", "CumSum(h, axis)",
    "ReduceSum(h)", "ReduceMean(h)", "ReduceProd(h)", "ReduceL1(h)", "ReduceL2(h)", "ReduceLogSumExp(h)",
    "Resize(h, none, scales)", "Mul(h, h)",  # of mse_loss
]  # fmt: skip


@pytest.mark.parametrize("node", FLOAT32)
def test_what_autocast_lists_as_float32_is_float32(node):
    node = node.replace(" none,", ",")
    model = converted(
        f""" g (float[2, 4] x, float[4, 3] w, float[3] b) => (float loss)
        <float two = {{2}}, int64 axis = {{1}}, float[2] scales = {{1, 2}}>
        {{ h = MatMul(x, w)  y = {node}  loss = ReduceSum<keepdims = 0>(y) }}"""
    )
    assert dtypes(model)["h"] == FLOAT16 and dtypes(model)["y"] == FLOAT
    assert ("h", FLOAT) in casts(model)


@pytest.mark.parametrize(
    "node",
    ["Relu(h)", "Gelu(h)", "Sigmoid(h)", "Erf(h)", "Sqrt(h)", "Abs(h)", "Transpose(h)", "ReduceMax(h)", "Add(h, h)"],
)
def test_what_is_on_no_list_keeps_the_dtype_of_its_input(node):
    model = converted(
        f""" g (float[n, 4] x, float[4, 3] w) => (float loss)
        {{ h = MatMul(x, w)  y = {node}  f = {node.replace("h", "x")}  l = ReduceSum<keepdims = 0>(y)
          k = ReduceSum<keepdims = 0>(f)  loss = Add(l, k) }}""",
        opset=20,
    )
    assert dtypes(model)["y"] == FLOAT16 and dtypes(model)["f"] == FLOAT


@pytest.mark.parametrize("node", ["Add(h, x)", "Where(c, x, h)", "Concat<axis = 0>(h, x)", "Max(x, h)"])
def test_half_and_float32_activations_together_are_float32(node):
    model = converted(
        f""" g (float[4, 4] x, float[4, 4] w, bool[4, 4] c) => (float loss)
        {{ h = MatMul(x, w)  y = {node}  loss = ReduceSum<keepdims = 0>(y) }}"""
    )
    assert dtypes(model)["y"] == FLOAT and ("h", FLOAT) in casts(model)


@pytest.mark.parametrize(
    "number, dtype, expected",
    [
        ("0.125", FLOAT16, FLOAT16),
        ("0", FLOAT16, FLOAT16),
        ("-inf", FLOAT16, FLOAT16),
        ("-3.4028234663852886e38", FLOAT16, FLOAT),  # a mask of numpy.finfo(float32).min
        ("-3.4028234663852886e38", BFLOAT16, FLOAT),  # rounds to infinity there as well
        ("70000", FLOAT16, FLOAT),
        ("70000", BFLOAT16, BFLOAT16),
        ("1e-8", FLOAT16, FLOAT),  # 0 in float16
        ("1e-5", FLOAT16, FLOAT),  # below the smallest normal number
        ("1e-8", BFLOAT16, BFLOAT16),
    ],
)
def test_a_constant_that_half_cannot_hold_makes_float32(number, dtype, expected):
    value = onnx.numpy_helper.from_array(np.array([number], np.float32).astype(np.float32), "c")
    text = """ g (float[n, 4] x, float[4, 3] w) => (float loss)
        { h = MatMul(x, w)  k = Unsqueeze(c, first)  y = Add(h, k)  loss = ReduceSum<keepdims = 0>(y) }"""
    proto = onnx.parser.parse_graph(text)
    proto.initializer.extend([value, onnx.numpy_helper.from_array(np.array([0]), "first")])
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = prepare(ir.from_proto(onnx.helper.make_model(proto, opset_imports=opsets, ir_version=10)))
    HalfPrecisionPass(dtype, ["w"])(model)
    assert dtypes(model)["y"] == expected


def test_a_frozen_tensor_counts_as_a_constant_and_one_that_changes_as_an_activation():
    text = """ g (float[n, 4] x, float[4, 3] w, float[3] mask, float[3] mean) => (float loss, float[3] next)
        { h = MatMul(x, w)  y = Add(h, mask)  z = Sub(h, mean)  c = Concat<axis = 0>(y, z)
          last = ReduceMax<keepdims = 0>(h, axes)  next = Add(mean, last)  loss = ReduceSum<keepdims = 0>(c) }"""
    text = text.replace("        { h", "        <int64[1] axes = {0}> { h", 1)
    for mask, expected in ((-1.0, FLOAT16), (-1e9, FLOAT)):
        frozen = {"mask": ir.tensor(np.full(3, mask, np.float32))}
        model = converted(text, frozen=frozen, updates=["next"])
        assert dtypes(model)["y"] == expected
        assert dtypes(model)["z"] == FLOAT and model.graph.outputs[1].dtype == FLOAT


def test_a_scalar_made_of_parameters_does_not_widen_what_it_scales():
    """As in PyTorch, where a 0-d tensor has no say in the dtype of a product."""
    model = converted(
        """ g (float[n, 4] x, float[4, 3] w, float b) => (float loss)
        { h = MatMul(x, w)  s = Exp(b)  y = Mul(h, s)  loss = ReduceSum<keepdims = 0>(y) }"""
    )
    assert dtypes(model)["s"] == FLOAT and dtypes(model)["y"] == FLOAT16


def test_a_count_of_the_run_is_no_half():
    """Float16 ends at 65504."""
    model = converted(
        """ g (float[n, 4] x, float[4, 3] w) => (float loss)
        { h = MatMul(x, w)  i = Size(x)  s = Cast<to = 1>(i)  y = Div(h, s)  loss = ReduceSum<keepdims = 0>(y) }"""
    )
    assert dtypes(model)["y"] == FLOAT


def test_integers_and_explicit_casts_to_float32_stay():
    model = converted(
        """ g (float[n, 4] x, float[4, 3] w) => (float loss, int64[n] i)
        { h = MatMul(x, w)  i = ArgMax<axis = 1, keepdims = 0>(h)  f = Cast<to = 1>(h)  r = Relu(f)
          loss = ReduceSum<keepdims = 0>(r) }"""
    )
    assert dtypes(model)["i"] == ir.DataType.INT64 and dtypes(model)["r"] == FLOAT
    assert casts(model).count(("h", FLOAT)) == 1


def test_what_onnx_does_not_define_in_bfloat16_stays_float32():
    """Conv has bfloat16 from opset 22 on."""
    text = """ g (float[1, 2, 5, 5] x, float[3, 2, 3, 3] w) => (float loss)
        { y = Conv(x, w)  loss = ReduceSum<keepdims = 0>(y) }"""
    assert dtypes(converted(text, FLOAT16))["y"] == FLOAT16
    assert dtypes(converted(text, BFLOAT16))["y"] == FLOAT
    assert dtypes(converted(text, BFLOAT16, opset=22))["y"] == BFLOAT16


def test_operators_of_com_microsoft_follow_the_same_policy():
    model = converted(
        """ g (float[n, 4] x, float[4, 4] w, float[4] b) => (float loss)
        { h = com.microsoft.FusedMatMul(x, w)  y = com.microsoft.BiasGelu(h, b)
          z = com.microsoft.SkipLayerNormalization(x, x, b)  u = MatMul(z, w)  a = Add(y, u)
          loss = ReduceSum<keepdims = 0>(a) }"""
    )
    found = dtypes(model)
    assert [found[name] for name in "hyzua"] == [FLOAT16, FLOAT16, FLOAT, FLOAT16, FLOAT16]


@HALVES
def test_a_row_that_a_mask_hides_altogether_stays_finite(dtype):
    """The mask's smallest number would be minus infinity in half precision, and a softmax of nothing else NaN."""
    text = """ g (float[1, 1, 2, 4] x, float[4, 4] w, bool[2, 2] seen) => (float loss, float[1, 1, 2, 4] y)
        <float zero = {0}, float least = {-3.4028234663852886e38}>
        { q = MatMul(x, w)  mask = Where(seen, zero, least)  y = Attention(q, q, q, mask)
          loss = ReduceSum<keepdims = 0>(y) }"""
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 4)).astype(np.float32)
    feeds = {"x": x, "w": np.eye(4, dtype=np.float32), "seen": np.array([[True, False], [False, False]])}
    y = run_model(converted(text, dtype, opset=23), feeds)["y"].float().numpy()[0, 0]
    np.testing.assert_allclose(y[0], x[0, 0, 0], rtol=2e-2, atol=2e-2)  # the first row sees itself alone
    assert np.isfinite(y).all()


def test_batch_normalization_is_half_with_float32_statistics():
    model = converted(
        """ g (float[n, 2, 5] x, float[3, 2, 3] w, float[3] v, float[3] b, float[3] mean, float[3] var)
            => (float loss, float[3] mean_new, float[3] var_new)
        { h = Conv(x, w)  y, mean_new, var_new = BatchNormalization<training_mode = 1>(h, v, b, mean, var)
          loss = ReduceSum<keepdims = 0>(y) }""",
        updates=["mean_new", "var_new"],
    )
    node = next(node for node in model.graph if node.op_type == "BatchNormalization")
    assert [x.dtype for x in node.inputs] == [FLOAT16, FLOAT, FLOAT, FLOAT, FLOAT]
    assert [y.dtype for y in node.outputs] == [FLOAT16, FLOAT, FLOAT]


def test_control_flow_computes_in_float32():
    text = """ g (float[2, 4] x, float[4, 4] w, bool c) => (float loss)
        { h = MatMul(x, w)
          y = If (c) <then_branch = one () => (float[2, 4] p) { p = Exp(h) },
                      else_branch = two () => (float[2, 4] q) { r = Add(h, x)  q = Relu(r) }>
          z = MatMul(y, w)  loss = ReduceSum<keepdims = 0>(z) }"""
    model = converted(text)
    assert dtypes(model)["y"] == FLOAT and casts(model).count(("h", FLOAT)) == 1
    x, w = (np.random.default_rng(seed).standard_normal((4, 4)).astype(np.float32) for seed in (1, 2))
    for condition in (True, False):
        h = torch.tensor(x[:2]) @ torch.tensor(w)
        y = h.exp() if condition else torch.relu(h + torch.tensor(x[:2]))
        want = (y @ torch.tensor(w)).sum()
        got = run_model(converted(text), {"x": x[:2], "w": w, "c": np.array(condition)})["loss"]
        torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3)  # float16 rounds at 5e-4


# -- casts --------------------------------------------------------------------------------------


def test_a_parameter_is_cast_once_and_before_its_transposes():
    """So that the products and their gradients still see a Transpose of what is stored."""
    model = converted(
        """ g (float[n, 4] x, float[3, 4] w) => (float loss)
        { t = Transpose<perm = [1, 0]>(w)  a = MatMul(x, t)  u = Transpose<perm = [1, 0]>(w)  b = MatMul(x, u)
          y = Mul(a, b)  loss = ReduceSum<keepdims = 0>(y) }"""
    )
    assert casts(model) == sorted([("x", FLOAT16), ("w", FLOAT16), ("y", FLOAT)])
    for node in model.graph:
        if node.op_type == "MatMul":
            transpose = node.inputs[1].producer()
            assert transpose.op_type == "Transpose" and transpose.inputs[0].producer().inputs[0].name == "w"
    assert sum(node.op_type == "Transpose" for node in model.graph) == 2


def test_an_embedding_is_read_in_float32_and_cast_for_the_decoder_that_shares_it():
    model = converted(
        """ g (int64[n] i, float[7, 4] w) => (float loss)
        { e = Gather(w, i)  t = Transpose<perm = [1, 0]>(w)  y = MatMul(e, t)  loss = ReduceSum<keepdims = 0>(y) }"""
    )
    assert dtypes(model)["e"] == FLOAT
    assert casts(model) == sorted([("w", FLOAT16), ("e", FLOAT16), ("y", FLOAT)])


def test_readers_of_one_activation_share_a_cast_through_views():
    model = converted(
        """ g (float[n, 4] x, float[4, 4] w, float[4, 4] v, float[4] b) => (float loss)
        <int64[2] shape = {-1, 4}>
        { z = LayerNormalization(x, b)  r = Reshape(z, shape)  p = MatMul(z, w)  q = MatMul(r, v)
          s = Add(p, q)  y = Add(s, z)  loss = ReduceSum<keepdims = 0>(y) }"""
    )
    assert casts(model).count(("z", FLOAT16)) == 1
    assert not any(name == "r" for name, _ in casts(model)) and "r" not in dtypes(model)  # only a MatMul reads it


def test_half_to_float32_and_back_over_views_is_no_cast_at_all():
    model = converted(
        """ g (float[n, 4] x, float[4, 4] w) => (float loss)
        <int64[2] shape = {-1, 4}>
        { h = MatMul(x, w)  f = Cast<to = 1>(h)  r = Reshape(f, shape)  y = MatMul(r, w)
          loss = ReduceSum<keepdims = 0>(y) }"""
    )
    product = next(node for node in model.graph if node.op_type == "MatMul" and node.outputs[0].name == "y")
    assert product.inputs[0].producer().op_type == "Reshape"
    assert product.inputs[0].producer().inputs[0].name == "h"
    assert all(node.inputs[0].producer() is None or node.inputs[0].producer().op_type != "Cast"
               for node in model.graph if node.op_type == "Cast")  # fmt: skip


def test_equal_models_become_equal_models():
    text = """ g (float[n, 4] x, float[4, 3] w, float[3] b) => (float loss)
        { a = MatMul(x, w)  y = Add(a, b)  s = Softmax(y)  loss = ReduceMean<keepdims = 0>(s) }"""
    first, second = (ir.to_proto(converted(text)).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


# -- bad input ----------------------------------------------------------------------------------


def test_only_float32_parameters_are_trained():
    with pytest.raises(UnsupportedFeatureError, match=r"not so: 'w' \(DOUBLE\). Make float32 of them"):
        converted(
            """ g (double[n, 4] x, double[4, 3] w) => (double loss)
            { a = MatMul(x, w)  loss = ReduceMean<keepdims = 0>(a) }"""
        )


def test_only_two_dtypes_are_half():
    with pytest.raises(InvalidArgumentError, match="FLOAT16 or BFLOAT16, not"):
        HalfPrecisionPass(FLOAT, ["w"])


# -- the CPU ------------------------------------------------------------------------------------


@HALVES
def test_on_the_cpu_every_operator_rounds_as_half_arithmetic_does(dtype):
    """Against NumPy, which rounds each result too; ONNX Runtime by itself keeps float32 between operators."""
    kind = dtype.numpy()
    text = """ g (float[300, 8] x, float[8, 5] w, float[5] b) => (float loss, float[300, 5] y, float[300, 5] z)
        { a = MatMul(x, w)  y = Add(a, b)  s = Mul(y, y)  z = Sub(s, y)  loss = ReduceMax<keepdims = 0>(z) }"""
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((300, 8), (8, 5), (5,)))
    found = run_model(converted(text, dtype), {"x": x, "w": w, "b": b})
    a = (x.astype(kind).astype(np.float32) @ w.astype(kind).astype(np.float32)).astype(kind)
    y = a + b.astype(kind)
    z = y * y - y
    for name, want in (("y", y), ("z", z)):
        got = found[name].float().numpy()
        # The sums of the product come in another order: about one in a thousand rounds the other way.
        assert np.mean(got != want.astype(np.float32)) < 0.01
    assert found["y"].dtype == found["z"].dtype == (torch.float16 if dtype == FLOAT16 else torch.bfloat16)


def test_on_the_cpu_float16_overflows_between_two_operators():
    text = """ g (float[n, 1] x, float[1, 1] w) => (float loss)
        { a = MatMul(x, w)  b = Mul(a, a)  c = Sqrt(b)  loss = ReduceMax<keepdims = 0>(c) }"""
    feeds = {"x": np.full((1, 1), 300, np.float32), "w": np.ones((1, 1), np.float32)}
    assert run_model(converted(text), feeds)["loss"] == np.inf
    assert run_model(converted(text, BFLOAT16), feeds)["loss"] == 300


def test_emulation_reaches_into_subgraphs():
    text = """ g (float16[3] x, bool c) => (float16[3] y)
        { y = If (c) <then_branch = one () => (float16[3] p) { m = Mul(x, x)  p = Sqrt(m) },
                      else_branch = two () => (float16[3] q) { q = Neg(x) }> }"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>{text}'))
    x = np.array([1, 300, 2], np.float16)
    assert run_model(model, {"x": x, "c": np.array(True)})["y"].tolist() == [1, np.inf, 2]


def test_what_cuda_lacks_in_bfloat16_is_computed_in_float32():
    model = converted(
        """ g (float[n, 4] x, float[4, 3] w) => (float loss)
        { h = MatMul(x, w)  y = LeakyRelu(h)  loss = ReduceSum<keepdims = 0>(y) }""",
        BFLOAT16,
        opset=22,
    )
    EmulateHalfPass(has_cuda_kernel)(model)
    found = {node.op_type: [x.dtype for x in node.inputs] for node in model.graph}
    assert found["LeakyRelu"] == [FLOAT] and found["MatMul"] == [BFLOAT16, BFLOAT16]
