"""Sequences of known length are tensors to the gradient."""

import numpy as np
import onnx
import pytest
import torch
from double import written_out
from test_control_flow import check, parsed, randoms

from orttrainer import build_gradient
from orttrainer.errors import GradientError
from orttrainer.testing.check import _run_onnxruntime


def test_split_to_sequence_with_sizes_and_concat_from_sequence():
    body = """g (real[6,2] x) => (real[6,2] y)
    <int64[3] sizes = {1,2,3}, int64 zero = {0}, int64 one = {1}, int64 last = {-1}> {
      s = SplitToSequence <axis = 0> (x, sizes)
      a = SequenceAt(s, one) b = SequenceAt(s, last) z = SequenceAt(s, zero)
      aa = Mul(a, a) bb = Sin(b) t = SequenceConstruct(z, bb, aa)
      y = ConcatFromSequence <axis = 0> (t) }"""
    check(body, randoms(x=(6, 2)), lambda x: torch.cat([x[:1], torch.sin(x[3:]), x[1:3] ** 2]))


@pytest.mark.parametrize("keep", [0, 1])
def test_split_into_single_slices_and_stack(keep):
    body = f"""g (real[3,2] x) => (real y) <int64 two = {{2}}> {{
      s = SplitToSequence <axis = 0, keepdims = {keep}> (x)
      a = SequenceAt(s, two) e = SequenceErase(s, two) i = SequenceInsert(e, a)
      t = ConcatFromSequence <axis = -1, new_axis = 1> (i)
      p = Sin(t) y = ReduceSumSquare <keepdims = 0> (p) }}"""
    check(body, randoms(x=(3, 2)), lambda x: (torch.sin(x) ** 2).sum())


def test_chunks_of_one_size_and_a_rest():
    body = """g (real[5,2] x) => (real[5,2] y) <int64 two = {2}, int64 zero = {0}> {
      s = SplitToSequence <axis = 0> (x, two)
      a = SequenceAt(s, zero) p = Mul(a, a)
      e = SequenceErase(s, zero) i = SequenceInsert(e, p, zero)
      y = ConcatFromSequence <axis = 0> (i) }"""
    check(body, randoms(x=(5, 2)), lambda x: torch.cat([x[:2] ** 2, x[2:]]))


def test_optional_and_back():
    body = """g (real[3] x) => (real[3] y) { o = Optional(x) e = OptionalGetElement(o) y = Mul(e, x) }"""
    gradient = build_gradient(parsed(body, "float"), wrt="x", of="y")
    x, dy = np.array([1, 2, 3], np.float32), np.array([1, 10, 100], np.float32)
    assert _run_onnxruntime(gradient, {"x": x, "y_cotangent": dy})["x_grad"].tolist() == [2, 40, 600]


HOLDING = {
    "both": "o = Optional(a) h = OptionalHasElement(o) e = OptionalGetElement(o) f = Cast <to = 1> (h) y = Mul(e, f)",
    "asked only": "o = Optional(a) h = OptionalHasElement(o) f = Cast <to = 1> (h) y = Mul(a, f)",
    "not there": "o = Optional <type = float> () h = OptionalHasElement(o) n = Not(h) f = Cast <to = 1> (n) y = Mul(a, f)",
    "a list": """s = SequenceConstruct(a, x) o = Optional(s) h = OptionalHasElement(o) l = OptionalGetElement(o)
        z = Constant <value_int = 0> () e = SequenceAt(l, z) f = Cast <to = 1> (h) y = Mul(e, f)""",
    "in a branch": """o = Optional(a) c = Constant <value = bool {1}> () i = Identity(c)
        h = If (i) <then_branch = t () => (u) { u = OptionalHasElement(o) }, else_branch = e () => (v) { v = Identity(c) }>
        f = Cast <to = 1> (h) y = Mul(a, f)""",
    "read in a branch": """o = Optional(a) h = OptionalHasElement(o)
        y = If (h) <then_branch = t () => (float[3] u) { u = OptionalGetElement(o) }, else_branch = e () => (float[3] v) { v = Neg(a) }>""",
    "made in a branch": """c = Constant <value = bool {1}> () i = Identity(c)
        y = If (i) <then_branch = t () => (float[3] u) { o = Optional(a) u = OptionalGetElement(o) }, else_branch = e () => (float[3] v) { v = Neg(a) }>""",
}  # fmt: skip


@pytest.mark.parametrize("taken", [True, False])
def test_a_list_is_read_and_made_in_branches(taken):
    body = """g (real[4,2] x, bool c) => (real y) <int64 zero = {0}, int64 two = {2}> {
      s = SplitToSequence <axis = 0> (x, two) w = Sin(x)
      r = If (c) <then_branch = t () => (u) { one = Constant <value_int = 1> () u = SequenceAt(s, one) },
                  else_branch = e () => (v) { z = SequenceAt(s, zero) q = SplitToSequence <axis = 0> (w, two) i = SequenceInsert(q, z)
                                              v = ConcatFromSequence <axis = 0, new_axis = 1> (i) }>
      y = ReduceSumSquare <keepdims = 0> (r) }"""

    def twin(x):
        return ((x[2:] if taken else torch.stack([*x.sin().split(2), x[:2]])) ** 2).sum()

    check(body, {"c": np.array(taken), **randoms(x=(4, 2))}, twin)


@pytest.mark.parametrize("name", HOLDING)
def test_whether_an_optional_holds_something_is_a_number(name):
    body = f"g (float[3] x) => (float[3] y) {{ a = Sin(x) {HOLDING[name]} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {body}')
    x, dy = np.array([1, 2, 3], np.float32), np.array([1, 10, 100], np.float32)
    found = _run_onnxruntime(build_gradient(proto, wrt="x", of="y"), {"x": x, "y_cotangent": dy})
    np.testing.assert_allclose(found["y"], np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(found["x_grad"], np.cos(x) * dy, rtol=1e-6)


def test_length_is_a_number():
    body = """g (real[3] x) => (real[3] y) {
      s = SequenceEmpty() a = SequenceInsert(s, x) b = SequenceInsert(a, x)
      n = SequenceLength(b) f = CastLike(n, x) y = Mul(f, x) }"""
    check(body, randoms(x=3), lambda x: 2 * x)


def test_a_position_that_is_not_known_is_refused_by_name():
    body = """g (real[4] x, int64 k) => (real[1] y) { s = SplitToSequence(x) y = SequenceAt(s, k) }"""
    with pytest.raises(GradientError, match="'SequenceAt'"):
        build_gradient(parsed(body), wrt="x", of="y")


def test_values_stay():
    body = """g (real[4,2] x) => (real[2,2] y) <int64 one = {1}, int64 two = {2}> {
      s = SplitToSequence <axis = 0> (x, two) y = SequenceAt(s, one) }"""
    gradient = build_gradient(parsed(body, "float"), wrt="x", of="y")
    onnx.checker.check_model(gradient, full_check=True)
    assert [value.name for value in gradient.graph.output] == ["y", "x_grad"]
    assert not np.any([node.op_type.startswith("Sequence") for node in gradient.graph.node])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_list_that_a_loop_appends_to(axis):
    """As scripted PyTorch loops export: a sequence among the states, stacked after the Loop."""
    body = f"""g (int64 n, real[2,3] s0, real[3,3] w) => (real[A,B,C] y, real[2,3] s) <bool c = {{1}}> {{
      e = SequenceEmpty <dtype = 11> ()
      s, l = Loop <body = b (int64 i, bool ci, real[2,3] h, seq(real[2,3]) li) =>
                          (bool co, real[2,3] hn, seq(real[2,3]) ln) {{
        co = Identity(ci) p = MatMul(h, w) hn = Tanh(p) yi = Mul(hn, h) ln = SequenceInsert(li, yi) }}> (n, c, s0, e)
      y = ConcatFromSequence <axis = {axis}, new_axis = 1> (l) }}"""

    def twin(h, w):
        ys = []
        for _ in range(4):
            before, h = h, torch.tanh(h @ w)
            ys.append(before * h)
        return torch.stack(ys, axis), h

    feeds = {"n": np.array(4), **randoms(s0=(2, 3), w=(3, 3))}
    rng = np.random.default_rng(0)
    given = [torch.tensor(feeds[name], requires_grad=True) for name in ("s0", "w")]
    outputs = twin(*given)
    seeds = [rng.standard_normal(y.shape) for y in outputs]
    gradient = build_gradient(parsed(body), of=["y", "s"], wrt=["s0", "w"])
    found = written_out(gradient, feeds | {"y_cotangent": seeds[0], "s_cotangent": seeds[1]})
    # Sums of numbers near 1, in the order that either runtime likes: near 0 the last bits of these are left.
    np.testing.assert_allclose(found["y"], outputs[0].detach(), rtol=1e-12, atol=1e-15)
    for name, expected in zip(("s0", "w"), torch.autograd.grad(outputs, given, [torch.tensor(s) for s in seeds])):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-10)


JOINED = {"whole": ("4,3", "4,3", 0), "last": ("4,3", "4,3", -1), "of symbols": ("B,3", "4,3", 0), "of one row": ("1,B", "1,3", 0)}  # fmt: skip


@pytest.mark.parametrize("condition", ["", "c"])
@pytest.mark.parametrize("case", JOINED)
def test_a_list_that_a_loop_appends_to_and_that_is_joined_without_a_new_axis(case, condition):
    """As torch.cat after a scripted loop; with and without a condition, of which no input is then left but the count."""
    shape, sizes, axis = JOINED[case]
    body = f"""g (int64 n, real[{shape}] x, real[3] w) => (real[P,Q] y) <bool c = {{1}}> {{
      e = SequenceEmpty <dtype = 11> ()
      l = Loop <body = b (int64 i, bool ci, seq(real[{shape}]) li) => (bool co, seq(real[{shape}]) ln) {{
        co = Identity(ci) k = CastLike(i, w) p = Mul(x, w) q = Add(p, k) yi = Sin(q) ln = SequenceInsert(li, yi) }}> (n, {condition}, e)
      y = ConcatFromSequence <axis = {axis}> (l) }}"""
    feeds = {"n": np.array(3), **randoms(x=tuple(map(int, sizes.split(","))), w=3)}
    x, w = given = [torch.tensor(feeds[name], requires_grad=True) for name in ("x", "w")]
    expected = torch.cat([torch.sin(x * w + k) for k in range(3)], axis)
    seed = np.random.default_rng(0).standard_normal(expected.shape)
    gradient = build_gradient(parsed(body), of="y", wrt=["x", "w"])
    found = written_out(gradient, feeds | {"y_cotangent": seed})
    # A sine near its zero is off by a rounding of 1.
    np.testing.assert_allclose(found["y"], expected.detach(), rtol=1e-12, atol=1e-15)
    for name, value in zip(("x", "w"), torch.autograd.grad(expected, given, torch.tensor(seed))):
        np.testing.assert_allclose(found[f"{name}_grad"], value, rtol=1e-10)


def test_a_joined_list_of_tensors_that_may_differ_in_size_is_refused_by_name():
    body = """g (int64 n, real[4] x) => (real[P] y) <int64[1] one = {1}, int64[1] zero = {0}> {
      e = SequenceEmpty <dtype = 11> ()
      l = Loop <body = b (int64 i, bool ci, seq(real[R]) li) => (bool co, seq(real[R]) ln) {
        co = Identity(ci) j = Reshape(i, one) s = Slice(x, zero, j) ln = SequenceInsert(li, s) }> (n, , e)
      y = ConcatFromSequence <axis = 0> (l) }"""
    with pytest.raises(GradientError, match="'ConcatFromSequence'"):
        build_gradient(parsed(body), wrt="x", of="y")


@pytest.mark.parametrize("wrt", [None, "w", ["v", "w"]], ids=str)
def test_an_initializer_that_only_leads_to_an_identity_or_a_sequence_has_a_gradient_of_zeros(wrt):
    body = """g (float[N,3] x) => (float[N,3] y) <float[3] v = {1,2,3}, float[3] w = {4,5,6}> {
      u = Identity(w) s = SequenceConstruct(w, u) y = Mul(x, v) }"""
    gradient = build_gradient(parsed(body, "float"), wrt=wrt, of="y")
    x, dy = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 1, 1], [1, 2, 3]])
    found = _run_onnxruntime(gradient, {"x": x, "y_cotangent": dy})
    assert found["w_grad"].tolist() == [0, 0, 0]
    assert wrt == "w" or found["v_grad"].tolist() == [5, 12, 21]
