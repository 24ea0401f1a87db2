"""The weight gradients of convolutions that are added up, by one convolution: those of PyTorch in float64."""

import numpy as np
import onnx_ir as ir
import pytest
from marks import in_turn
from test_native_weights import expected, run

from orttrainer.differentiate.rules.convolution_weights import weight_gradient
from orttrainer.differentiate.rules.windows import Window
from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed import stacked_taps
from orttrainer.graph.passes.speed.stacked_taps import StackRowsOfTapsPass


def gradients_of(x, dy, w, windows, batch=None):
    """A graph with the weight gradients of convolutions of one x, whose results are added up."""
    dims = {"x": [batch or x[0], *x[1:]], "dy": [batch or dy[0], *dy[1:]], "w": w}
    x_, dy_, w_ = (ir.Value(name=k, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(v)) for k, v in dims.items())
    graph = ir.Graph([x_, dy_], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph)
    graph.outputs.extend(weight_gradient(op, x_, dy_, w_, window, 1) for window in windows)
    for index, value in enumerate(graph.outputs):
        value.name = f"dw{index}"
    return ir.Model(graph, ir_version=10)


def planes(rows, count, depth, **more):
    """The windows of a volume's rows of taps: `count` of them, of `depth` planes with so many rows."""
    middle = count // 2
    return [
        Window((depth, 3), (1, more.get("stride", 1)), (rows, 1), (rows + middle - k, 1), (rows - middle + k, 1)) for k in range(count)
    ]  # fmt: skip


CASES = {
    "three rows": ((3, 5, 28, 6), (3, 8, 28, 6), planes(7, 3, 3)),
    "five rows": ((3, 5, 28, 6), (3, 8, 28, 6), planes(7, 5, 3)),
    "two rows": ((3, 5, 28, 6), (3, 8, 28, 6), planes(7, 2, 3)),
    "strides along a row": ((3, 5, 28, 7), (3, 8, 28, 4), planes(7, 3, 3, stride=2)),
    "exchanged": ((2, 32, 28, 6), (2, 4, 28, 6), planes(7, 3, 3)),
    "one image": ((1, 5, 28, 6), (1, 8, 28, 6), planes(7, 3, 3)),
}


@pytest.mark.parametrize(("case", "batch"), in_turn(CASES, {"static": None, "symbolic": "batch"}))
def test_each_gradient_is_that_of_pytorch(case, batch):
    x, dy, windows = case
    w = (dy[1], x[1], *windows[0].kernel)
    model = gradients_of(x, dy, w, windows, batch)
    before = sum(node.op_type == "Conv" for node in model.graph)
    assert StackRowsOfTapsPass()(model).modified
    assert (before, sum(node.op_type == "Conv" for node in model.graph)) == (len(windows), 1)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal(x, np.float32), "dy": rng.standard_normal(dy, np.float32)}
    outputs = list(model.graph.outputs)
    for output, window in zip(outputs, windows, strict=True):
        model.graph.outputs[:] = [output]
        right = expected(feeds["x"], feeds["dy"], w, window)
        np.testing.assert_allclose(run(model, feeds), right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_other_gradients_stay_as_they_are():
    strided = [Window((3, 3), (2, 1), (1, 1), (begin, 1), (3 - begin, 1)) for begin in (1, 2)]
    for windows, rows in ((planes(7, 3, 3)[:1], 28), (strided, 14)):
        model = gradients_of((3, 5, 28, 6), (3, 8, rows, 6), (8, 5, 3, 3), windows)
        assert not StackRowsOfTapsPass()(model).modified


def test_copies_that_would_be_large_are_not_made(monkeypatch):
    windows = planes(7, 3, 3)
    monkeypatch.setattr(stacked_taps, "LARGEST", 3 * 3 * 8 * 28 * 6 * 4 - 1)
    assert not StackRowsOfTapsPass()(gradients_of((3, 5, 28, 6), (3, 8, 28, 6), (8, 5, 3, 3), windows)).modified
    monkeypatch.setattr(stacked_taps, "LARGEST", 3 * 3 * 8 * 28 * 6 * 4)
    assert StackRowsOfTapsPass()(gradients_of((3, 5, 28, 6), (3, 8, 28, 6), (8, 5, 3, 3), windows)).modified
