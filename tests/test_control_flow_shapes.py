"""Sizes, ranks and types in branches and bodies, which may differ from those around them, or be said nowhere."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_models import assert_trains_like, model
from test_control_flow import check, parsed, randoms

from orttrainer import build_gradient
from orttrainer.testing.check import _gradients, _run_onnxruntime


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("other", ["Sin", "Sub", "Mul"])
def test_branches_of_other_sizes_share_a_cotangent(taken, other):
    """Each undoes the broadcasting of an operand of its own."""
    operands = "x" if other == "Sin" else "x, v"
    body = f"""g (bool c, real[B,4] x, real[4,2] w, real[1,2] b, real[1,4] v) => (real[B,C] y) {{
      z = If (c) <then_branch = t () => (real[B,2] o) {{ a = MatMul(x, w) o = Add(a, b) }},
                  else_branch = e () => (real[B,4] p) {{ p = {other}({operands}) }}>
      y = Sin(z) }}"""

    def twin(x, w, b, v):
        there = {"Sin": torch.sin(x), "Sub": x - v, "Mul": x * v}[other]
        return torch.sin(x @ w + b if taken else there)

    check(body, {"c": np.array(taken), **randoms(x=(3, 4), w=(4, 2), b=(1, 2), v=(1, 4))}, twin)


WITH_AXES = {
    "If": """v = If (c) <then_branch = t () => (a) { INSIDE a = Unsqueeze(x, k) },
                        else_branch = e () => (b) { INSIDE d = Sin(x) b = Unsqueeze(d, k) }>
             y = Gather <axis = 1> (v, i)""",
    "Loop": """f, y = Loop (n, c, x) <body = b (int64 t, bool ci, s) => (co, so, o) {
                 INSIDE co = Identity(ci) v = Unsqueeze(s, k) o = Gather <axis = 1> (v, i) so = Sin(s) }>""",
    "Scan": """xs = Unsqueeze(x, zero)
               f, y = Scan <num_scan_inputs = 1, body = b (s, xi) => (so, o) {
                 INSIDE v = Unsqueeze(s, k) o = Gather <axis = 1> (v, i) so = Mul(s, xi) }> (x, xs)""",
}


@pytest.mark.parametrize("where", ["in the body", "of the body", "around it", "of the graph"])
@pytest.mark.parametrize("op_type", WITH_AXES)
def test_the_rank_inside_comes_from_axes_wherever_they_are(op_type, where):
    node, initializer = "k = Constant <value_ints = [0]> ()", "int64[1] k = {0}"
    text = WITH_AXES[op_type].replace("INSIDE", node if where == "in the body" else "")
    if where == "of the body":
        text = text.replace(") {", f") <{initializer}> {{")
    outside = node if where == "around it" else ""
    given = f", {initializer}" if where == "of the graph" else ""
    sizes = "1,2,6" if op_type == "If" else "T,1,2,6"
    body = f"""g (bool c, real[B,6] x) => (real[{sizes}] y)
      <int64[2] i = {{0, 2}}, int64[1] zero = {{0}}, int64 n = {{2}}{given}> {{ {outside} {text} }}"""

    def twin(x):
        if op_type == "If":
            return x[None, [0, 2]]
        states = [x, torch.sin(x)] if op_type == "Loop" else [x]
        return torch.stack([s[None, [0, 2]] for s in states])

    check(body, {"c": np.array(True), **randoms(x=(3, 6))}, twin)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a branch"])
def test_a_state_of_a_scan_has_the_rank_that_the_body_gives_it(inside):
    """ONNX Runtime's Scan writes out no state of an unknown rank."""
    steps = """s = Reshape(s0, sizes)
               f, y = Scan <num_scan_inputs = 1, body = b (h, xi) => (real[2,3] hn, real[2,3] yi) {
                 p = Mul(h, xi) hn = Tanh(p) yi = Mul(hn, xi) }> (s, x)"""
    if inside:
        steps = f"""y = If (c) <then_branch = t () => (y1) {{ {steps.replace("f, y =", "f, y1 =")} }},
                                else_branch = e () => (y2) {{ y2 = Sin(x) }}>"""
    body = f"g (bool c, real[6] s0, int64[K] sizes, real[T,2,3] x) => (real[T,2,3] y) {{ {steps} }}"

    def twin(s0, x):
        h, ys = s0.reshape(2, 3), []
        for xi in x:
            h = torch.tanh(h * xi)
            ys.append(h * xi)
        return torch.stack(ys)

    check(body, {"c": np.array(True), **randoms(s0=6), "sizes": np.array([2, 3]), **randoms(x=(4, 2, 3))}, twin)


@pytest.mark.parametrize("op_type", ["Scan", "Loop"])
def test_a_body_may_read_a_value_of_an_unknown_rank(op_type):
    steps = {
        "Scan": "Scan <num_scan_inputs = 1, body = b (real[2,3] h, real[2,3] xi) => (real[2,3] hn, real[2,3] yi) { STEP }> (s, x)",
        "Loop": """Loop <body = b (int64 t, bool ci, real[2,3] h) => (bool co, real[2,3] hn, real[2,3] yi) {
                     co = Identity(ci) xi = Gather(x, t) STEP }> (n, c, s)""",
    }[op_type].replace("STEP", "p = Mul(h, u) q = Mul(p, xi) hn = Tanh(q) yi = Mul(hn, u)")
    body = f"""g (real[2,3] s, real[6] v, int64[K] sizes, real[T,2,3] x) => (real[T,2,3] y) <int64 n = {{4}}, bool c = {{1}}> {{
      u = Reshape(v, sizes) f, y = {steps} }}"""

    def twin(h, v, x):
        u, ys = v.reshape(2, 3), []
        for xi in x:
            h = torch.tanh(h * u * xi)
            ys.append(h * u)
        return torch.stack(ys)

    check(body, {**randoms(s=(2, 3), v=6), "sizes": np.array([2, 3]), **randoms(x=(4, 2, 3))}, twin)


LOOPS = {
    "behind": """f = Loop (n, c, x) <body = b (int64 t, bool ci, s) => (co, so) { co = Identity(ci) m = Mul(s, w) so = Sin(m) }>
                 z = Cos(f)
                 y = Loop (n, c, z) <body = d (int64 u, bool di, r) => (do, ro) { do = Identity(di) ro = Mul(r, w) }>""",
    "inside": """y = Loop (n, c, x) <body = b (int64 t, bool ci, s) => (co, so) {
                   co = Identity(ci) z = Cos(s)
                   so = Loop (n, c, z) <body = d (int64 u, bool di, r) => (do, ro) { do = Identity(di) ro = Mul(r, w) }> }>""",
    "behind one that shrinks": """
      f = Loop (n, c, x) <body = b (int64 t, bool ci, s) => (co, so) {
        co = Identity(ci) m = Mul(s, w) so = Slice(m, one, many, zero) }>
      z = Cos(f)
      y = Loop (n, c, z) <body = d (int64 u, bool di, r) => (do, ro) { do = Identity(di) ro = Mul(r, w) }>""",
    "behind one that gains axes": """
      f = Loop (n, c, x) <body = b (int64 t, bool ci, s) => (co, so) {
        co = Identity(ci) m = Mul(s, w) so = Unsqueeze(m, zero) }>
      k = Reshape(f, flat) z = Cos(k)
      y = Loop (n, c, z) <body = d (int64 u, bool di, r) => (do, ro) { do = Identity(di) ro = Mul(r, w) }>""",
}  # fmt: skip


@pytest.mark.parametrize("where", LOOPS)
def test_the_first_shape_of_a_state_may_follow_from_what_another_loop_makes(where):
    """With an operator between them: what is known of its output hangs on what is assumed of the other."""
    body = f"""g (real[4,3] x, real[3] w) => (real[M,3] y) <int64 n = {{2}}, bool c = {{1}}, int64[1] zero = {{0}},
      int64[1] one = {{1}}, int64[1] many = {{9}}, int64[2] flat = {{-1, 3}}> {{ {LOOPS[where]} }}"""

    def twin(x, w):
        if where == "inside":
            return torch.cos(torch.cos(x) * w * w) * w * w
        step = {"behind": lambda s: torch.sin(s * w), "behind one that shrinks": lambda s: (s * w)[1:]}
        step = step.get(where, lambda s: s * w)
        return torch.cos(step(step(x))) * w * w

    check(body, randoms(x=(4, 3), w=3), twin)


@pytest.mark.parametrize("declared", ["[rows,3]", "[B,3]", "[4,3]", "[B,C]"])
def test_what_a_loop_ends_with_has_a_rank_where_its_body_declares_one(declared):
    """ONNX's inference leaves it open, as other steps might give it another."""
    state = f"real{declared}"
    body = f"""g (real[rows,3] x, real[3] w) => (real[rows] y) <int64 n = {{2}}, bool c = {{1}}, int64 one = {{1}}> {{
      z = Cos(x)
      f = Loop (n, c, z) <body = b (int64 t, bool ci, {state} s) => (bool co, {state} so) {{
        co = Identity(ci) m = Mul(s, w) so = Sin(m) }}>
      k = Sin(f) y = Gather <axis = 1> (k, one) }}"""
    check(body, randoms(x=(4, 3), w=3), lambda x, w: torch.sin(torch.sin(torch.sin(torch.cos(x) * w) * w))[:, 1])


@pytest.mark.parametrize("state, result", [("[rows,3]", "[rows]"), ("[rows]", "[rows,3]"), ("[3]", "[3,rows,3]")])
def test_a_wrong_rank_that_is_declared_of_a_state_is_not_taken(state, result):
    """ONNX Runtime warns, and ONNX's checker says nothing."""
    body = f"""g (real[rows,3] x, real[3,3] w) => (real y) <real{result} f, int64 n = {{2}}, bool c = {{1}}> {{
      z = Cos(x)
      f = Loop (n, c, z) <body = b (int64 t, bool ci, real{state} s) => (bool co, real[rows,3] so) {{
        co = Identity(ci) m = MatMul(s, w) so = Sin(m) }}>
      k = Mul(f, f) y = ReduceMean <keepdims = 0> (k) }}"""
    check(body, randoms(x=(4, 3), w=(3, 3)), lambda x, w: torch.sin(torch.sin(torch.cos(x) @ w) @ w).square().mean())


def test_a_rank_that_is_declared_of_a_state_that_gains_axes_is_taken():
    body = """g (real[4,3] x, real[3] w) => (real[A,B,4] y) <real[A,B,4,3] f, int64 n = {2}, bool c = {1}, int64[1] zero = {0}, int64 one = {1}> {
      z = Cos(x)
      f = Loop (n, c, z) <body = b (int64 t, bool ci, s) => (co, so) { co = Identity(ci) m = Mul(s, w) so = Unsqueeze(m, zero) }>
      k = Sin(f) y = Gather <axis = 3> (k, one) }"""
    check(body, randoms(x=(4, 3), w=3), lambda x, w: torch.sin(torch.cos(x) * w * w)[None, None, :, 1])


BEHIND = """h = MatMul (x, W) n = Constant <value = int64 {2}> () always = Constant <value = bool {1}> ()
    last = Loop (n, always, h) <body = steps (int64 k, bool go, float[] before) => (bool on, float[] after)
    { on = Identity (go) after = Sin (before) }> p = com.microsoft.FusedMatMul <transB = 1> (last, V)
    first = Constant <value = int64[2] {0, 2}> () r = Gather <axis = 1> (p, first)"""


def test_an_operator_of_onnx_runtime_behind_a_loop_has_a_rank():
    """ONNX knows nothing of it, and its input has a rank once the states of the Loop have one."""
    rng = np.random.default_rng(0)
    W, V = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5, 4)))
    proto = model(BEHIND, "3", 18, W=W, V=V)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    body = next(node.attribute[0].g for node in proto.graph.node if node.op_type == "Loop")
    for state in (body.input[2], body.output[1]):
        state.type.tensor_type.ClearField("shape")
    batches = [torch.rand(k + 2, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(proto, lambda x, W, V: (x @ W).sin().sin() @ V.T[:, [0, 2]], batches, W=W, V=V)


RETURNS = {
    "Loop": """g (int64 n, real[3] w, real[T,3] x) => (real loss) <bool c = {1}, int64[1] k = {0}> {
      v = ReduceMean <keepdims = 0> (x, k)
      s_out = Tanh(v)
      f, h, y0, y1, y2 = Loop (n, c, w, s_out) <body = b (int64 i, bool go, VEC s, VEC r) =>
        (BOOL go, VEC r, VEC s, VEC s, VEC m, VEC m) { m = Mul(s, r) }>
      LOSS }""",
    "Scan": """g (int64 n, real[3] w, real[T,3] x) => (real loss) {
      f, y0, y1, y2 = Scan <num_scan_inputs = 1, body = b (VEC s, VEC r) => (VEC r, VEC s, VEC m, VEC m) { m = Mul(s, r) }> (w, x)
      LOSS }""",
}


def states_and_products(op_type, w, x):
    if op_type == "Scan":
        before = torch.cat([w[None], x[:-1]])
        return x[-1], before, before * x
    v = torch.tanh(x.mean(0))
    return v, torch.stack([w, v, w]), torch.stack([w * v] * 3)


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("op_type", RETURNS)
def test_a_body_may_return_what_it_was_given_and_one_value_twice(op_type, typed):
    """Of which ONNX's inference finds no type, and of which ONNX Runtime's Scan gives whatever is in the memory."""
    loss = """p = Mul(y1, y2) q = Mul(y0, y0) a = Mul(p, q) b = Add(a, f) d = Mul(b, b)
              loss = ReduceSum <keepdims = 0> (d)"""
    body = RETURNS[op_type].replace("LOSS", loss)
    body = body.replace("VEC", "real[3]" if typed else "").replace("BOOL", "bool" if typed else "")
    feeds = {"n": np.array(3), **randoms(w=3, x=(4, 3))}
    gradient = build_gradient(parsed(body), of="loss", wrt=["w", "x"])
    found = _run_onnxruntime(gradient, {x.name: feeds[x.name] for x in gradient.graph.input})

    w, x = (torch.tensor(feeds[name], requires_grad=True) for name in ("w", "x"))
    last, states, products = states_and_products(op_type, w, x)
    total = ((products * states) ** 2 + last).square().sum()
    np.testing.assert_allclose(found["loss"], total.item(), rtol=1e-12)
    for name, expected in zip(("w", "x"), torch.autograd.grad(total, (w, x))):
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-10)


WITHOUT_STATES = {  # what comes out of a step, and the next state: the gradient of neither reads the state
    "it does not depend on the last": ("Identity(h)", "Mul(w, w)"),
    "it adds up": ("Add(h, w)", "Add(h, w)"),
    "what comes out does not depend on it": ("Tanh(w)", "Add(h, w)"),
}


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("size", ["2", "K"])
@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_the_steps_back_need_not_read_a_state(name, size, count):
    y, after = WITHOUT_STATES[name]
    body = f"""g (real[2] h0, real[2] w) => (real[{size}] s, real[T,{size}] y) <int64 n = {{{count}}}, bool c = {{1}}> {{
      s, y = Loop (n, c, h0) <body = b (int64 i, bool ci, real[{size}] h) => (bool co, real[{size}] hn, real[{size}] yi) {{
        co = Identity(ci) yi = {y} hn = {after} }}> }}"""

    def twin(h0, w):
        h, ys = h0, [torch.empty(0, 2, dtype=torch.float64)]
        for _ in range(count):
            step = {"Identity(h)": h, "Add(h, w)": h + w, "Tanh(w)": torch.tanh(w)}[y]
            ys, h = [*ys, step[None]], w * w if after == "Mul(w, w)" else h + w
        return h, torch.cat(ys)

    feeds, cotangents = randoms(h0=(2,), w=(2,)), randoms(s=(2,), y=(count, 2))
    found = _gradients(parsed(body), feeds, cotangents, run=_run_onnxruntime)  # ONNX's reference needs an iteration
    given = {name: torch.tensor(value, requires_grad=True) for name, value in feeds.items()}
    total = sum((z * torch.tensor(c)).sum() for z, c in zip(twin(**given), cotangents.values()))
    for name, expected in zip(given, torch.autograd.grad(total, given.values(), materialize_grads=True)):
        np.testing.assert_allclose(found[name], expected.detach(), rtol=1e-12)


ALWAYS = """{y} = If (c) <then_branch = yes () => (float[rows, 4] a) {{ [node] inner = {op} (h) a = Neg (inner) }},
    else_branch = no () => (float[rows, 4] a) {{ [node] inner = {op} (h) a = Exp (inner) }}>"""


def test_branches_that_are_always_taken_may_have_the_same_names_within():
    """They are put in the place of the If."""
    body = f"""c = Constant <value = bool {{1}}> () [node] h = MatMul (x, W) {ALWAYS.format(y="p", op="Sin")}
        {ALWAYS.format(y="q", op="Tanh")} r = Mul (p, q)"""
    W = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    batches = [torch.rand(k + 2, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    assert_trains_like(model(body, "3", 18, W=W), lambda x, W: (x @ W).sin() * (x @ W).tanh(), batches, W=W)
