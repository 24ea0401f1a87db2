"""Gradients through If, Scan and Loop: against finite differences, ONNX Runtime and PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from orttrainer import build_gradient
from orttrainer.errors import GradientError, MissingGradientError
from orttrainer.testing import check_gradient
from orttrainer.testing.check import _compare, _gradients, _run_onnxruntime

RNG = np.random.default_rng(5)


def parsed(body: str, real: str = "double", opset: int = 18) -> onnx.ModelProto:
    """A model in ONNX's text form, where `real` is the dtype of the floats."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> ' + body.replace("real", real))
    onnx.checker.check_model(model)
    return model


def randoms(**shapes):
    return {name: RNG.standard_normal(shape) for name, shape in shapes.items()}


def check(body, feeds, twin=None, opset=18):
    """float64 against finite differences, float32 on ONNX Runtime, and a PyTorch function of the float inputs."""
    gradients, cotangents = check_gradient(parsed(body, opset=opset), feeds)
    single = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in feeds.items()}
    seeds = {k: v.astype(np.float32) for k, v in cotangents.items()}
    run = _gradients(parsed(body, "float", opset), single, seeds, run=_run_onnxruntime)
    _compare(run, gradients, 2e-4, "float32 on ONNX Runtime")
    if twin is not None:
        given = {name: torch.tensor(feeds[name], requires_grad=True) for name in gradients}
        outputs = twin(*given.values())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((y * torch.tensor(c)).sum() for y, c in zip(outputs, cotangents.values(), strict=True))
        found = torch.autograd.grad(total, list(given.values()), allow_unused=True)
        expected = {n: np.zeros_like(feeds[n]) if g is None else g.numpy() for n, g in zip(given, found)}
        _compare(gradients, expected, 1e-12, "PyTorch")
    return gradients


# -- If ----------------------------------------------------------------------------------------

BRANCHES = """g (bool c, real[2,3] x, real[3] w, real[3] v) => (real[2,3] y) {
  z = Mul(x, w)
  y = If (c) <then_branch = t () => (real[2,3] a) { s = Sin(z) a = Mul(s, w) },
              else_branch = e () => (real[2,3] b) { b = Mul(x, v) }> }"""


@pytest.mark.parametrize("taken", [True, False])
def test_if_has_the_gradient_of_the_branch_that_is_taken(taken):
    def twin(x, w, v):
        return torch.sin(x * w) * w if taken else x * v

    gradients = check(BRANCHES, {"c": np.array(taken), **randoms(x=(2, 3), w=3, v=3)}, twin)
    assert np.any(gradients["v"]) is not np.bool_(taken)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_of_different_shapes_and_ranks(taken):
    body = """g (bool c, real[2,N] x) => (real y) {
      z = If (c) <then_branch = t () => (real[2,N] a) { a = Exp(x) },
                  else_branch = e () => (real b) { b = ReduceSumSquare <keepdims = 0> (x) }>
      s = Sin(z)
      y = ReduceSum <keepdims = 0> (s) }"""
    check(
        body,
        {"c": np.array(taken), **randoms(x=(2, 3))},
        lambda x: torch.sin(torch.exp(x) if taken else (x * x).sum()).sum(),
    )


@pytest.mark.parametrize("outer, inner", [(True, True), (True, False), (False, True)])
def test_if_inside_if(outer, inner):
    body = """g (bool c, bool d, real[3] x, real[3] w) => (real[3] y, real[3] k) {
      y, k = If (c) <
        then_branch = t () => (real[3] a, real[3] m) {
          p = Mul(x, w)
          a = If (d) <then_branch = tt () => (real[3] aa) { aa = Mul(p, p) },
                      else_branch = te () => (real[3] ab) { ab = Identity(w) }>
          m = Constant <value = real[3] {1.0, 2.0, 3.0}> () },
        else_branch = e () => (real[3] b, real[3] n) { b = Identity(x) n = Tanh(w) }> }"""

    def twin(x, w):
        if not outer:
            return x, torch.tanh(w)
        return ((x * w) ** 2 if inner else w), torch.ones(3, dtype=torch.float64)

    check(body, {"c": np.array(outer), "d": np.array(inner), **randoms(x=3, w=3)}, twin)


def test_if_that_nothing_depends_on_is_left_alone():
    body = """g (bool c, real[3] x, int64[3] k) => (real[3] y) {
      j = If (c) <then_branch = t () => (int64[3] a) { a = Neg(k) }, else_branch = e () => (int64[3] b) { b = Abs(k) }>
      f = CastLike(j, x)
      y = Mul(f, x) }"""
    check(body, {"c": np.array(True), "k": np.array([1, 2, 3]), **randoms(x=3)})


@pytest.mark.parametrize("op_type, gates, states", [("LSTM", 4, "h, k"), ("GRU", 3, "h"), ("RNN", 1, "h")])
@pytest.mark.parametrize("axes", [2, 3])
def test_recurrent_operators_in_a_branch_with_states_of_an_unknown_rank(op_type, gates, states, axes):
    """As TorchScript exports cells, which take batches and single samples."""
    whole = {name: f"u{name}" for name in states.split(", ")}
    raised = "\n".join(
        f"""{to} = If (flat) <then_branch = t{name} () => (real[] a{name}) {{ a{name} = Unsqueeze({name}, zero) }},
                            else_branch = e{name} () => (real[] b{name}) {{ b{name} = Identity({name}) }}>"""
        for name, to in whole.items()
    )
    body = f"""g (bool c, real[...] x, {", ".join(f"real[...] {name}" for name in whole)},
               real[1,{gates * 4},3] W, real[1,{gates * 4},4] R) => (real y) {{
      zero = Constant <value = int64[1] {{0}}> ()
      found = If (c) <
        then_branch = t () => (real[] z) {{
          shape = Shape(x)
          rank = Size(shape)
          two = Constant <value = int64 {{2}}> ()
          flat = Equal(rank, two)
          ux = If (flat) <then_branch = tx () => (real[] ax) {{ ax = Unsqueeze(x, zero) }},
                          else_branch = ex () => (real[] bx) {{ bx = Identity(x) }}>
          {raised}
          v, last = {op_type} <hidden_size = 4> (ux, W, R, "", "", {", ".join(whole.values())})
          z = Squeeze(last, zero) }},
        else_branch = e () => (real[] b) {{ b = Identity(x) }}>
      y = ReduceSumSquare <keepdims = 0> (found) }}"""
    shape = (1, 2)[3 - axes :]
    check(
        body.replace("[...]", "[" + ",".join("NMK"[:axes]) + "]"),
        {
            "c": np.array(True),
            **randoms(x=(*shape, 3), **dict.fromkeys(whole, (*shape, 4)), W=(1, gates * 4, 3), R=(1, gates * 4, 4)),
        },
    )


# -- Scan --------------------------------------------------------------------------------------

CELL = "p = MatMul(w, h) q = Add(p, xi) hn = Tanh(q) yi = Mul(hn, xi)"


def cell(h, x, w):
    h_next = torch.tanh(w @ h + x)
    return h_next, h_next * x


@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize("writes", [0, 1])
def test_scan_in_every_direction(reads, writes):
    body = f"""g (real[2] s0, real[T,2] x, real[2,2] w) => (real[2] s, real[T,2] y) {{
      s, y = Scan <num_scan_inputs = 1, scan_input_directions = [{reads}], scan_output_directions = [{writes}],
                   body = b (real[2] h, real[2] xi) => (real[2] hn, real[2] yi) {{ {CELL} }}> (s0, x) }}"""

    def twin(h, x, w):
        ys = []
        for xi in x.flip(0) if reads else x:
            h, y = cell(h, xi, w)
            ys.append(y)
        return h, torch.stack(ys[::-1] if writes else ys)

    check(body, randoms(s0=2, x=(5, 2), w=(2, 2)), twin)


def test_scan_along_other_axes_with_several_states():
    body = """g (real[2] s0, real s1, real[2,T] x, real[2,T,3] u) => (real[2] s, real r, real[2,T] y, real[3,T] v) {
      s, r, y, v = Scan <num_scan_inputs = 2, scan_input_axes = [1, -2], scan_output_axes = [1, 1],
        body = b (real[2] h, real k, real[2] xi, real[2,3] ui) => (real[2] hn, real kn, real[2] yi, real[3] vi) {
          a = Mul(h, xi) hn = Sin(a) m = ReduceSum <keepdims = 0> (ui) kn = Mul(k, m)
          yi = Add(hn, k) vi = ReduceMax <axes = [0], keepdims = 0> (ui) }> (s0, s1, x, u) }"""
    body = body.replace("ReduceMax <axes = [0], keepdims = 0> (ui)", "ReduceMax <keepdims = 0> (ui, zero)")
    body = body.replace("{\n      s, r", "<int64[1] zero = {0}> {\n      s, r")

    def twin(h, k, x, u):
        ys, vs = [], []
        for t in range(x.shape[1]):
            y_next = torch.sin(h * x[:, t])
            ys.append(y_next + k)
            vs.append(u[:, t].max(0).values)
            h, k = y_next, k * u[:, t].sum()
        return h, k, torch.stack(ys, 1), torch.stack(vs, 1)

    check(body, randoms(s0=2, x=(2, 4), u=(2, 4, 3)) | {"s1": np.array(0.7)}, None)
    feeds = {"s0": RNG.standard_normal(2), "s1": np.array(0.7), **randoms(x=(2, 4), u=(2, 4, 3))}
    check(body, feeds, twin)


def test_scan_with_integer_states_and_inputs():
    body = """g (int64 n0, real[T] x, int64[T] k, real[5] w) => (real[T] y) <int64 one = {1}> {
      n, y = Scan <num_scan_inputs = 2, body = b (int64 c, real xi, int64 ki) => (int64 cn, real yi) {
        cn = Add(c, one) f = CastLike(cn, xi) wk = Gather(w, ki) p = Mul(f, wk) yi = Mul(p, xi) }> (n0, x, k) }"""

    def twin(x, w):
        return torch.arange(1, 5) * w[torch.tensor([4, 0, 4, 1])] * x

    check(body, {"n0": np.array(0), **randoms(x=4), "k": np.array([4, 0, 4, 1]), **randoms(w=5)}, twin)


def test_scan_whose_state_only_adds_up_stores_nothing():
    body = """g (real[2] s0, real[T,2] x) => (real[2] s) {
      s = Scan <num_scan_inputs = 1, body = b (real[2] h, real[2] xi) => (real[2] hn) { hn = Add(h, xi) }> (s0, x) }"""
    check(body, randoms(s0=2, x=(3, 2)), lambda s, x: s + x.sum(0))
    gradient = build_gradient(parsed(body), of="s", wrt=["s0", "x"])
    forward = next(node for node in gradient.graph.node if node.op_type == "Scan")
    assert len(forward.output) == 1


# -- Loop --------------------------------------------------------------------------------------

TIMES = """g (int64 n, bool c, real[2] s0, real[2,2] w) => (real[2] s, real[T,2] y) {
  s, y = Loop <body = b (int64 i, bool ci, real[2] h) => (bool co, real[2] hn, real[2] yi) {
    co = Identity(ci) p = MatMul(w, h) f = CastLike(i, h) q = Add(p, f) hn = Tanh(q) yi = Mul(hn, h) }> (n, c, s0) }"""


def times(count):
    def twin(h, w):
        ys = []
        for i in range(count):
            h_next = torch.tanh(w @ h + i)
            ys.append(h_next * h)
            h = h_next
        return h, torch.stack(ys)

    return twin


@pytest.mark.parametrize("count", [1, 4])
def test_loop_with_a_trip_count_that_is_an_input(count):
    check(TIMES, {"n": np.array(count), "c": np.array(True), **randoms(s0=2, w=(2, 2))}, times(count))


def test_loop_of_no_iterations():
    feeds = {"n": np.array(0), "c": np.array(True), "s0": np.ones(2, np.float32), "w": np.ones((2, 2), np.float32)}
    gradient = build_gradient(parsed(TIMES, "float"), of="s", wrt=["s0", "w"])
    found = _run_onnxruntime(gradient, feeds | {"s_cotangent": np.array([3, 4], np.float32)})
    assert found["s0_grad"].tolist() == [3, 4] and not found["w_grad"].any()


def test_loop_that_ends_by_its_condition():
    body = """g (real[2] s0, real[2] w) => (real[2] s) <int64 n = {100}, bool c = {1}> {
      s = Loop <body = b (int64 i, bool ci, real[2] h) => (bool co, real[2] hn) {
        hn = Mul(h, w) t = ReduceL1 <keepdims = 0> (hn) limit = Constant <value_float = 9.0> ()
        l = CastLike(limit, t) co = Less(t, l) }> (n, c, s0) }"""

    def twin(h, w):
        while True:
            h = h * w
            if h.abs().sum() >= 9:
                return h

    check(body, {"s0": np.array([0.5, -0.25]), "w": np.array([1.7, 1.3])}, twin)


def test_state_that_the_loop_keeps_and_state_that_becomes_active_late():
    """u depends on w from the second iteration on, through s."""
    body = """g (real[2] s0, real[2] u0, real[2] w) => (real[2] u) <int64 n = {3}, bool c = {1}> {
      s, u = Loop <body = b (int64 i, bool ci, real[2] a, real[2] d) => (bool co, real[2] an, real[2] dn) {
        co = Identity(ci) an = Mul(a, w) dn = Add(d, a) }> (n, c, s0, u0) }"""
    check(body, randoms(s0=2, u0=2, w=2), lambda s, u, w: u + s + s * w + s * w * w)


def test_loop_inside_if_inside_scan():
    body = """g (real[2] s0, real[T,2] x, bool[T] m, real[2] w) => (real[2] s) <int64 n = {2}, bool c = {1}> {
      s = Scan <num_scan_inputs = 2, body = b (real[2] h, real[2] xi, bool mi) => (real[2] hn) {
        hn = If (mi) <
          then_branch = t () => (real[2] a) {
            a = Loop <body = l (int64 i, bool ci, real[2] r) => (bool co, real[2] rn) {
              co = Identity(ci) p = Mul(r, w) rn = Add(p, xi) }> (n, c, h) },
          else_branch = e () => (real[2] d) { d = Mul(h, xi) }> }> (s0, x, m) }"""
    mask = np.array([True, False, True])

    def twin(h, x, w):
        for xi, taken in zip(x, mask):
            h = (h * w + xi) * w + xi if taken else h * xi
        return h

    check(body, {**randoms(s0=2, x=(3, 2)), "m": mask, **randoms(w=2)}, twin)


def test_loop_behind_a_loop_knows_its_shapes():
    body = """g (real[A,B] x, real[B,B] w) => (real[A,B] z) <int64 n = {2}, bool c = {1}> {
      y = Loop <body = b (int64 i, bool ci, real h) => (bool co, real hn) { co = Identity(ci) hn = MatMul(h, w) }> (n, c, x)
      z = Loop <body = d (int64 j, bool cj, real k) => (bool cp, real kn) { cp = Identity(cj) kn = MatMul(k, w) }> (n, c, y)
    }"""
    model = parsed(body)
    for node in model.graph.node:  # as exporters write it: the states of a Loop have no shape
        for value in (*node.attribute[0].g.input[2:], *node.attribute[0].g.output[1:]):
            value.type.tensor_type.ClearField("shape")
    check_gradient(model, randoms(x=(2, 3), w=(3, 3)))


GROWS = """g (int64 n, real[2] s0, real[2] w) => (real[M] s, real[T] y) <bool c = {1}> {
  s, y = Loop <body = b (int64 i, bool ci, real[K] h) => (bool co, real[L] hn, real yi) {
    co = Identity(ci) p = Mul(w, w) m = ReduceSumSquare <keepdims = 0> (h) q = Mul(p, m) t = Tanh(h)
    hn = Concat <axis = 0> (t, q) yi = ReduceSum <keepdims = 0> (hn) }> (n, c, s0) }"""


@pytest.mark.parametrize("used", [["s", "y"], ["y"]])
@pytest.mark.parametrize("count", [1, 3])
def test_a_state_that_grows_from_step_to_step(count, used):
    def twin(h, w):
        ys = []
        for _ in range(count):
            h = torch.cat([torch.tanh(h), w * w * (h * h).sum()])
            ys.append(h.sum())
        return [{"s": h, "y": torch.stack(ys)}[name] for name in used]

    feeds = {"n": np.array(count), "s0": RNG.standard_normal(2), "w": RNG.standard_normal(2) / 2}
    sizes = {"s": 2 + 2 * count, "y": count}
    cotangents = {name: RNG.standard_normal(sizes[name]) for name in used}
    model = parsed(GROWS)
    for value in model.graph.node[0].attribute[0].g.input[2:]:  # as exporters write it
        value.type.tensor_type.ClearField("shape")
    gradient = build_gradient(model, of=used, wrt=["s0", "w"])
    assert [node.op_type for node in gradient.graph.node].count("Loop") == 3  # forward, once more, and back
    seeds = {f"{name}_cotangent": value for name, value in cotangents.items()}
    found = _run_onnxruntime(gradient, feeds | seeds)
    given = [torch.tensor(feeds[name], requires_grad=True) for name in ("s0", "w")]
    total = sum((y * torch.tensor(cotangents[name])).sum() for name, y in zip(used, twin(*given)))
    for name, expected in zip(("s0", "w"), torch.autograd.grad(total, given)):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-10)


def test_second_derivative_through_each():
    for body, feeds in (
        (BRANCHES, {"c": np.array(True), **randoms(x=(2, 3), w=3, v=3)}),
        (TIMES, {"n": np.array(3), "c": np.array(True), **randoms(s0=2, w=(2, 2))}),
    ):
        model = parsed(body)
        of = model.graph.output[0].name
        wrt = [v.name for v in model.graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE]
        gradient = build_gradient(model, of=of, wrt=wrt)
        shape = [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
        feeds[f"{of}_cotangent"] = RNG.standard_normal(shape)
        slopes = [v for v in gradient.graph.output if v.name.endswith("_grad")]
        for node in gradient.graph.node:  # the names of gradients are taken in the next gradient
            for names in (node.input, node.output):
                names[:] = [name.replace("_grad", "_slope") for name in names]
        del gradient.graph.output[:]
        for value in slopes:
            value.name = value.name.replace("_grad", "_slope")
        gradient.graph.output.extend(slopes)
        check_gradient(gradient, feeds, rtol=1e-6)


# -- refused -----------------------------------------------------------------------------------


def test_random_numbers_inside_are_refused_by_name():
    body = """g (bool c, real[3] x) => (real[3] y) {
      y = If (c) <then_branch = t () => (real[3] a) { r = RandomNormalLike(x) a = Mul(r, x) },
                  else_branch = e () => (real[3] b) { b = Identity(x) }> }"""
    with pytest.raises(GradientError, match=r"then_branch of 'If' node .* draws random numbers \(RandomNormalLike"):
        build_gradient(parsed(body), wrt="x", of="y")


def test_an_operator_without_a_rule_is_named_with_the_node_around_it():
    body = """<ir_version: 8, opset_import: ["" : 18, "example" : 1]> g (bool c, float[3] x) => (float[3] y) {
      y = If (c) <then_branch = t () => (float[3] a) { a = example.Strange(x) },
                  else_branch = e () => (float[3] b) { b = Identity(x) }> }"""
    with pytest.raises(MissingGradientError, match=r"inside If '.*': no gradient rule for 'Strange' \(domain example"):
        build_gradient(onnx.parser.parse_model(body), wrt="x", of="y")
