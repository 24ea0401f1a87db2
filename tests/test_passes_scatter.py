"""ScatterND with a reduction becomes ScatterElements, whose sums are the same in every run; sums take one tensor."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from small import LR, assert_same, make, snapshot
from test_control_flow import parsed
from torch import nn

from orttrainer import IODescription, ModelDescription, build_gradient
from orttrainer.graph.passes.scatter import ScatterIntoSumPass, ScatterReductionPass


def session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "shape, indices",
    [((5, 64), [[0], [4], [-5], [0]]), ((2, 3, 8), [[0, -1], [1, 2], [0, 2]]), ((2, 3), [[0, 1], [0, 1], [1, -3]])],
)
def test_the_gradient_of_gather_adds_up_at_repeated_places(shape, indices, symbolic):
    dims = ",".join("ABC"[k] if symbolic else str(n) for k, n in enumerate(shape))
    indices = np.array(indices)
    out = (len(indices), *shape[indices.shape[1] :])
    body = f"g (real[{dims}] x, int64[{indices.shape[0]},{indices.shape[1]}] i) => (real[{','.join(map(str, out))}] y) {{ y = GatherND(x, i) }}"
    gradient = build_gradient(parsed(body, "float"), of="y", wrt="x")
    assert "ScatterND" not in {node.op_type for node in gradient.graph.node}
    dy = np.random.default_rng(0).standard_normal(out).astype(np.float32)
    x, expected = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    np.add.at(expected, tuple(indices.T), dy)
    found = session(gradient).run(["x_grad"], {"x": x, "i": indices, "y_cotangent": dy})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "x, indices, y, table, updates",
    [
        ("A,64", "N,1", "N,64", ["A", 64], ["N", 64]),
        ("5,7,8", "N,2", "N,8", [35, 8], ["N", 8]),
        ("A,4,2", "3,5,1", "3,5,4,2", ["A", 8], [15, 8]),
    ],
)
def test_the_sizes_that_are_known_stay_so(x, indices, y, table, updates):
    """Later passes place whole rows where they know how long these are, and how many."""
    body = f"""g (real[{x}] x, int64[{indices}] i, real[{y}] u) => (real[{x}] y) {{
      y = ScatterND <reduction = "add"> (x, i, u) }}"""
    model = ir.from_proto(parsed(body, "float"))
    assert ScatterReductionPass()(model).modified
    scatter = next(node for node in model.graph if node.op_type == "ScatterElements")
    assert [list(value.shape) for value in scatter.inputs] == [table, updates, updates]


def test_many_updates_of_few_places_are_the_same_in_every_run():
    """With ONNX Runtime's ScatterND on several threads some are lost, in most runs."""
    body = "g (real[4,512] x, int64[7,64,1] i) => (real[7,64,512] y) { y = GatherND(x, i) }"
    gradient = build_gradient(parsed(body, "float"), of="y", wrt="x")
    rng = np.random.default_rng(0)
    feeds = {
        "x": np.zeros((4, 512), np.float32),
        "i": rng.integers(0, 4, (7, 64, 1)),
        "y_cotangent": rng.standard_normal((7, 64, 512)).astype(np.float32),
    }
    expected = np.zeros((4, 512))
    np.add.at(expected, feeds["i"][..., 0], feeds["y_cotangent"].astype(np.float64))
    run = session(gradient)
    for _ in range(20):
        np.testing.assert_allclose(run.run(["x_grad"], feeds)[0], expected, atol=1e-4)


def test_a_forward_scatter_is_rewritten_too_also_inside_a_branch():
    body = """g (bool c, real[4,3] x, int64[5,1] i, real[5,3] u) => (real[4,3] y) {
      y = If (c) <then_branch = t () => (real[4,3] a) { a = ScatterND <reduction = "add"> (x, i, u) },
                  else_branch = e () => (real[4,3] b) { b = Identity(x) }> }"""
    gradient = build_gradient(parsed(body, "float"), of="y", wrt=["x", "u"])
    onnx.checker.check_model(gradient, full_check=True)
    assert 'op_type: "ScatterND"' not in str(gradient.graph)
    rng = np.random.default_rng(0)
    feeds = {
        "c": np.array(True),
        "x": rng.standard_normal((4, 3)).astype(np.float32),
        "i": np.array([[0], [0], [3], [0], [3]]),
    }
    feeds |= {"u": rng.standard_normal((5, 3)).astype(np.float32), "y_cotangent": np.ones((4, 3), np.float32)}
    expected = feeds["x"].copy()
    np.add.at(expected, feeds["i"][:, 0], feeds["u"])
    y, dx, du = session(gradient).run(["y", "x_grad", "u_grad"], feeds)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert (dx == 1).all() and (du == 1).all()


TIED = """<ir_version: 8, opset_import: ["" : 18]>
g (float[5,3] w, int64[4,3] i, float[4,3] u, int64[2,3] j, float[2,3] t) => (float[5,3] y, float[5,3] z) <int64[2] shape = {5, 3}> {
  a = Exp(w)
  zeros = ConstantOfShape VALUE (shape)
  s = ScatterElements <axis = 0, reduction = "add"> (zeros, i, u)
  r = ScatterElements <axis = 0, reduction = "add"> (zeros, j, t)
  ORDER
  y = Add(b, r)
  OTHER
}"""


def sums_of_scatters(order="b = Add(a, s)", other="z = Neg(w)", value=""):
    text = TIED.replace("ORDER", order).replace("OTHER", other).replace("VALUE", value)
    return onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text)))


def results(model):
    rng = np.random.default_rng(0)
    feeds = {
        "w": rng.standard_normal((5, 3)).astype(np.float32),
        "i": rng.integers(-5, 5, (4, 3)),
        "u": rng.standard_normal((4, 3)).astype(np.float32),
        "j": np.ones((2, 3), np.int64),
        "t": rng.standard_normal((2, 3)).astype(np.float32),
    }
    return session(model).run(["y", "z"], feeds)


@pytest.mark.parametrize("order", ["b = Add(a, s)", "b = Add(s, a)"])
def test_sums_with_what_is_added_to_zeros_are_made_in_one_tensor(order):
    before = sums_of_scatters(order)
    result = ScatterIntoSumPass()(ir.from_proto(before))
    after = ir.to_proto(result.model)
    onnx.checker.check_model(after, full_check=True)
    assert result.modified and "Add" not in [node.op_type for node in after.graph.node]
    for found, expected in zip(results(after), results(before)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "change, sums",
    [
        ({"other": "z = Neg(a)"}, 0),  # a copy of a
        ({"other": "z = Neg(s)"}, 1),
        ({"value": "<value = float[1] {1.0}>"}, 2),
        ({"order": "b = Add(w, s)"}, 1),
    ],
)
def test_a_sum_stays_where_the_scattered_is_read_elsewhere_is_an_input_or_not_zeros(change, sums):
    before = sums_of_scatters(**change)
    after = ir.to_proto(ScatterIntoSumPass()(ir.from_proto(before)).model)
    assert [node.op_type for node in after.graph.node].count("Add") == sums
    for found, expected in zip(results(after), results(before)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Picked(nn.Module):
    """A table of which single elements are taken, by two indices each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Parameter(torch.randn(5, 7)), nn.Linear(6, 3)

    def forward(self, rows, columns):
        return self.linear(self.table[rows, columns])


def picked(**options):
    index = [IODescription(name, [4, 6], torch.int64) for name in ("rows", "columns")]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", [4, 3], torch.float32)]
    return make(Picked(), desc=ModelDescription([*index, IODescription("label", [4], torch.int64)], outputs), **options)


def test_gradients_of_a_table_that_is_read_by_two_indices_accumulate():
    generator = torch.Generator().manual_seed(1)
    batch = [
        torch.randint(0, size, shape, generator=generator) for size, shape in ((5, (4, 6)), (7, (4, 6)), (3, (4,)))
    ]
    once, twice = picked(), picked(gradient_accumulation_steps=2)
    once.train_step(*batch, LR)
    for _ in range(2):
        twice.train_step(*batch, LR)
    assert_same(snapshot(twice), snapshot(once))
