"""Models of opsets 8 to 17: forms that operators had then."""

import math

import numpy as np
import onnx
import pytest
import torch
from bad_input import raises
from onnx_models import LOSS, assert_trains_like, make, model
from test_control_flow import check, randoms

from orttrainer import build_gradient
from orttrainer.errors import ModelError
from orttrainer.testing.check import _run_onnxruntime

# name: opset, body, shapes of the inputs
FORMS = {
    "Squeeze-axes": (12, "g (real[2,1,3] x) => (real[2,3] y) { a = Squeeze <axes = [1]> (x) y = Sin(a) }", (2, 1, 3)),
    "Unsqueeze-axes": (12, "g (real[2,3] x) => (real[2,1,3] y) { a = Unsqueeze <axes = [1]> (x) y = Sin(a) }", (2, 3)),
    "ReduceSum-axes": (12, "g (real[2,3] x) => (real[2] y) { a = ReduceSum <axes = [1], keepdims = 0> (x) y = Sin(a) }", (2, 3)),
    "ReduceMean-axes": (17, "g (real[2,3] x) => (real[2] y) { a = ReduceMean <axes = [-1], keepdims = 0> (x) y = Sin(a) }", (2, 3)),
    "ReduceL2-axes": (17, "g (real[2,3] x) => (real[2] y) { a = ReduceL2 <axes = [-1], keepdims = 0> (x) y = Sin(a) }", (2, 3)),
    "Split-sizes": (12, "g (real[2,6] x) => (real[2,2] y) { a, b, c = Split <axis = 1, split = [1,2,3]> (x) y = Mul(b, a) }", (2, 6)),
    "Split-13": (13, "g (real[2,6] x) => (real[2,3] y) { a, b = Split <axis = 1> (x) y = Mul(b, a) }", (2, 6)),
    "Softmax-flattens": (12, "g (real[2,3,4] x) => (real[2,3,4] y) { y = Softmax <axis = 1> (x) }", (2, 3, 4)),
    "Softmax-symbolic": (12, "g (real[A,B,4] x) => (real[A,B,4] y) { y = Softmax <axis = 1> (x) }", (2, 3, 4)),
    "LogSoftmax-flattens": (12, "g (real[2,3,4] x) => (real[2,3,4] y) { y = LogSoftmax(x) }", (2, 3, 4)),
    "Softmax-captured": (12, """g (real[2,3] x) => (real y) <int64 n = {2}, bool b = {1}, real i = {0}> { v = Softmax <axis = 0> (x) y = Loop (n, b, i)
        <body = l (int64 k, bool c, real t) => (bool d, real r) { d = Identity(c) m = Mul(v, v) s = ReduceSum <keepdims = 0> (m) r = Add(t, s) }> }""", (2, 3)),
    "LogSoftmax-captured": (12, """g (real[2,3,2] x) => (real[2,3,2] y) <bool b = {1}> { v = LogSoftmax (x) y = If (b) <then_branch = t () => (real[2,3,2] p)
        { p = Mul(v, v) }, else_branch = e () => (real[2,3,2] q) { q = Neg(v) }> }""", (2, 3, 2)),
    "Pad": (12, 'g (real[2,3] x) => (real[2,5] y) <int64[4] p = {0,1,0,1}> { y = Pad <mode = "reflect"> (x, p) }', (2, 3)),
    "Dropout-outside-training": (12, "g (real[2,3] x) => (real[2,3] y) { a = Dropout(x) y = Sin(a) }", (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_an_old_form_has_the_gradient_of_what_it_meant(name):
    opset, body, shape = FORMS[name]
    check(body, randoms(x=shape), opset=opset)


@pytest.mark.parametrize("opset", [8, 10, 12])
def test_the_axes_that_are_taken_out_may_be_in_any_order(opset):
    """ONNX's inference before opset 11 leaves out the first alone, and so says that what follows has another rank."""
    proto = model("h = MatMul (x, W) g = Squeeze <axes = [2, 1]> (h) r = Mul (g, U)", "1, 1, 3", opset, **SCANNED)
    batches = [torch.rand(k + 2, 1, 1, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(proto, lambda x, W, U: (x @ W).squeeze((1, 2)) * U, batches, **SCANNED)


PARTS = {
    9: "g = Slice <starts = [1], ends = [-1]> (h)",
    10: "first = Constant <value = int64[1] {1}> () last = Constant <value = int64[1] {-1}> () g = Slice (h, first, last)",
}


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_a_part_of_the_rows_is_one(opset):
    """To ONNX's inference in opset 10 it is as long as all rows, where their number has a name."""
    proto = model(f"h = MatMul (x, W) {PARTS[min(opset, 10)]} r = Mul (g, U)", "3", opset, **SCANNED)
    batches = [torch.rand(k + 3, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(proto, lambda x, W, U: (x @ W)[1:-1] * U, batches, **SCANNED)


@pytest.mark.parametrize("within", [False, True], ids=["graph", "branch"])
@pytest.mark.parametrize("axis", ["<axis = 0>", "", "<axis = 2>"])
def test_hardmax_chooses_one_of_what_lies_behind_its_axis(axis, within):
    """ONNX's converter lets it stand, which since opset 13 chooses along the axis; its evaluator knows the new one only."""
    W, flat = SCANNED["W"], {"<axis = 0>": 0, "": 1, "<axis = 2>": 2}[axis]
    chosen = f"c = Hardmax {axis} (h) r = Mul (c, h)"
    if within:
        chosen = f"""t = ReduceMean <keepdims = 0> (x) one = Constant <value_float = 1.0> () g = Greater (t, one) r = If (g) <then_branch = yes () => (a)
          {{ a = Mul (h, h) }}, else_branch = no () => (b) {{ c = Hardmax {axis} (h) b = Mul (c, h) }}>"""
    proto = model(f"h = MatMul (x, W) {chosen}", "2, 3", 12, W=W)

    def twin(x, W):
        h = x @ W
        rows = h.reshape(math.prod(h.shape[:flat]), -1)
        return torch.where(rows == rows.amax(1, keepdim=True), rows, 0).reshape(h.shape)

    batches = [torch.rand(k + 2, 2, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(proto, twin, batches, W=W)


@pytest.mark.parametrize("opset", [12, 13])
def test_batch_normalization_in_training_form_of_five_outputs(opset):
    """ONNX has no conversion of it, and ONNX Runtime no kernel: five outputs meant training."""
    body = """g (float[4,3,2] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[4,3,2] y, float[3] mn, float[3] vn) {
      y, mn, vn, sm, sv = BatchNormalization <momentum = 0.8> (x, s, b, m, v) }"""
    proto = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]> ' + body)
    gradient = build_gradient(proto, of="y", wrt=["x", "s", "b"])
    feeds = {k: v.astype(np.float32) for k, v in randoms(x=(4, 3, 2), s=3, b=3, m=3).items()} | {
        "v": np.ones(3, np.float32)
    }
    dy = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
    found = _run_onnxruntime(gradient, {k: v.copy() for k, v in feeds.items()} | {"y_cotangent": dy})
    x, s, b = given = [torch.tensor(feeds[name], requires_grad=True) for name in "xsb"]
    y = torch.nn.functional.batch_norm(x, None, None, s, b, training=True)
    np.testing.assert_allclose(found["y"], y.detach(), atol=1e-5)
    np.testing.assert_allclose(found["mn"], 0.8 * feeds["m"] + 0.2 * feeds["x"].mean((0, 2)), atol=1e-5)
    for name, expected in zip("xsb", torch.autograd.grad(y, given, torch.tensor(dy))):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, atol=1e-4)


def test_the_converter_says_nothing(caplog):
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])
    nodes = [onnx.helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 13)]
    build_gradient(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), "y", ["x"])
    assert not [record for record in caplog.records if record.name.startswith("onnxscript")]


@pytest.mark.parametrize("wrt", [None, ["u"], ["w", "u"]], ids=["default", "u", "w-u"])
@pytest.mark.parametrize("dead", ["", "d = Mul(x, u)"], ids=["not-read", "read-by-dead-code"])
@pytest.mark.parametrize("opset", [13, 17])
def test_what_nothing_depends_on_has_zeros_for_a_gradient(opset, dead, wrt):
    """The conversion drops it."""
    body = f"g (float[B,3] x) => (float[B,3] y) <float[3] w = {{1,2,3}}, float[3] u = {{1,2,3}}> {{ y = Mul(x, w) {dead} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> ' + body)
    x, dy = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    gradient = build_gradient(proto, of="y", wrt=wrt)
    found = _run_onnxruntime(gradient, {"x": x, "y_cotangent": dy})
    expected = {"w": (x * dy).sum(0), "u": np.zeros(3)}
    assert [v.name for v in gradient.graph.output[1:]] == [f"{name}_grad" for name in wrt or expected]
    for name in wrt or expected:
        np.testing.assert_allclose(found[f"{name}_grad"], expected[name], rtol=1e-6)


def test_what_only_dead_code_of_a_branch_reads_has_zeros_for_a_gradient():
    body = """g (float[B,3] x, bool q) => (float[B,3] y) <float[3] w = {1,2,3}, float[3] u = {1,2,3}> {
      y = If (q) <then_branch = t () => (a) { a = Mul(x, w) d = Mul(x, u) }, else_branch = e () => (c) { c = Sin(x) }> }"""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 13]> ' + body)
    x = np.ones((2, 3), np.float32)
    found = _run_onnxruntime(build_gradient(proto, of="y"), {"x": x, "q": np.array(True), "y_cotangent": x})
    assert found["w_grad"].tolist() == [2, 2, 2] and found["u_grad"].tolist() == [0, 0, 0]


def scanned(attributes="", lengths="") -> onnx.ModelProto:
    """The Scan of opset 8: its first input is the lengths, then come states and sequences of a batch; the body sees one."""
    body = "(float[4] s, float[4] v) => (float[4] s2, float[4] w) { m = Mul (s, U) s2 = Add (m, v) w = Tanh (s2) }"
    call = f"last, all = Scan <num_scan_inputs = 1 {attributes}, body = b {body}> ({lengths}, start, h)"
    sums = "e = ReduceSum <axes = [1], keepdims = 0> (all) r = Add (e, last)"
    return model(
        f"h = MatMul (x, W) start = ReduceMax <axes = [1], keepdims = 0> (h) {call} {sums}",
        "time, 3",
        8,
        **SCANNED,
    )


SCANNED = {
    "W": np.random.default_rng(0).standard_normal((3, 4), np.float32) / 4,
    "U": np.float32([0.5, -0.4, 0.3, 0.2]),
}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_of_opset_8_is_one_over_each_sequence_of_a_batch(reverse):
    def twin(x, W, U):
        h = x @ W
        state, total = h.amax(1), 0
        for step in range(h.shape[1])[:: -1 if reverse else 1]:
            state = state * U + h[:, step]
            total = total + torch.tanh(state)
        return total + state

    batches = [torch.randn(k + 1, 4 - k, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(scanned(", directions = [1]" if reverse else ""), twin, batches, sizes=["time", 3], **SCANNED)


def test_the_lengths_of_the_scan_of_opset_8_are_refused():
    proto = scanned(lengths="lengths")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, 2]), "lengths"))
    with raises(
        ModelError, "the Scan that makes 'last' is told the lengths of sequences...export the model with a newer opset"
    ):
        make(proto, "time", 3)


def calling(body: str, of_function: int, opset: int) -> onnx.ModelProto:
    """Of h = x @ W and what a function of another opset makes of it."""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]> g (float[rows, 3] x) => (float loss)
        {{ h = MatMul (x, W) r = own.act (h) {LOSS} }}
        <domain: "own", opset_import: ["" : {of_function}]> act (a) => (y) {{ {body} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "W"))
    return proto


WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("of_function, opset", [(15, 18), (18, 15), (18, 21)])
def test_a_function_of_another_opset_trains_where_its_operators_are_the_same(of_function, opset):
    proto = calling("s = Sigmoid (a) y = Mul (a, s)", of_function, opset)
    batches = [torch.linspace(-1, 1, 3 * rows).reshape(rows, 3) for rows in (2, 5)]
    assert_trains_like(proto, lambda x, W: torch.nn.functional.silu(x @ W), batches, W=WEIGHT)


def test_a_function_of_another_opset_with_an_operator_that_is_another_there_is_refused(monkeypatch):
    """By ONNX's checker, which asks no model above 2 GB."""
    monkeypatch.setattr("orttrainer.graph.read._is_small", lambda proto: False)
    proto = calling("s = ReduceMax <axes = [1]> (a) y = Sub (a, s)", 17, 18)
    text = "the function 'act' of the ONNX model is of opset 17 of 'ai.onnx', the model of 18, in which 'ReduceMax' is another"
    with raises(ModelError, text):
        make(proto, 3)
