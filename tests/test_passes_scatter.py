"""ScatterND with a reduction becomes ScatterElements, whose sums are the same in every run."""

import numpy as np
import onnx
import onnxruntime
import pytest
from test_control_flow import parsed

from orttrainer import build_gradient


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
