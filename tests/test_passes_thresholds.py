"""ReLU6 and Hardtanh: the slopes of PyTorch at their bounds, without Where."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from orttrainer import IODescription, ModelDescription, runtime
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.thresholds import ThresholdPass

INF = float("inf")
LAYERS = {
    "ReLU6": nn.ReLU6(),
    "relu6": nn.functional.relu6,
    "Hardtanh": nn.Hardtanh(),
    "in place": nn.ReLU6(inplace=True),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -2.0, 0.5),
}


class Shifted(nn.Module):
    """layer(x + shift): the gradient of the shift has the slope at each element of x. What is changed in place is read again."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.shift = layer, nn.Parameter(torch.zeros(1, 12))

    def forward(self, x):
        x = x + self.shift
        return self.layer(x) + x.clamp(-9, 9) / 4


@pytest.mark.parametrize("disabled", [(), ("ThresholdPass",)], ids=["", "with Where"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_slopes_at_the_bounds_are_those_of_pytorch(layer, disabled):
    x = torch.tensor([[0.0, -0.0, 6.0, -1.0, 1.0, -2.0, 0.5, 3.0, 7.0, -INF, INF, 1e-30]])
    description = ModelDescription(
        [IODescription("x", [1, 12], torch.float32), IODescription("label", [1, 12], torch.float32)],
        [IODescription("loss", [], torch.float32), IODescription("output", [1, 12], torch.float32)],
    )

    def loss(output, label):
        return (output * label).sum()

    module, reference, label = Shifted(layer), Shifted(layer), torch.arange(1.0, 13.0).reshape(1, 12)
    settings = Settings(disabled_passes=disabled)
    engine = Engine(module, loss, description, OptimizerChoice("SGDOptimizer", clip=False), settings)
    found, _ = engine.train_step({"x": x, "label": label}, 1.0)
    output = reference(x)
    loss(output, label).backward()
    torch.testing.assert_close(found[1], output.detach(), rtol=0, atol=0)
    torch.testing.assert_close(module.shift.detach(), -reference.shift.grad, rtol=0, atol=0)
    operators = {node.op_type for node in engine.training_graph.model.graph.node}
    assert ("Where" in operators) == bool(disabled)


def test_a_nan_stays_one():
    description = ModelDescription(
        [IODescription("x", [1, 12], torch.float32), IODescription("label", [1, 12], torch.float32)],
        [IODescription("loss", [], torch.float32), IODescription("output", [1, 12], torch.float32)],
    )
    for layer in LAYERS.values():
        engine = Engine(
            Shifted(layer), nn.functional.mse_loss, description, OptimizerChoice("SGDOptimizer"), Settings()
        )
        engine.train_step({"x": torch.zeros(1, 12), "label": torch.zeros(1, 12)}, 1.0)
        x = torch.zeros(1, 12)
        x[0, 3] = float("nan")
        assert engine.eval_step({"x": x, "label": torch.zeros(1, 12)})[1].isnan().nonzero().tolist() == [[0, 3]]


def model_of(body: str, dtype: str = "float") -> ir.Model:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g ({dtype}[8] x, {dtype}[8] dy, {dtype} k) => ({dtype}[8] y) <{dtype} zero = {{0}}, {dtype} two = {{2}}> {{ {body} }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True))


FORMS = {
    "an upper bound": "c = GreaterOrEqual(x, two) y = Where(c, two, x)",
    "a lower bound": "c = LessOrEqual(x, two) y = Where(c, two, x)",
    "masked from a bound on": "c = GreaterOrEqual(x, two) y = Where(c, zero, dy)",
    "masked up to a bound": "c = LessOrEqual(x, two) y = Where(c, zero, dy)",
}


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_bounds_and_masks_are_the_same_without_where(body):
    model, plain = model_of(body), model_of(body)
    assert ThresholdPass()(model).modified
    assert "Where" not in {node.op_type for node in model.graph}
    x = np.array([-INF, -2, 0, 2, np.nextafter(np.float32(2), np.float32(0)), 2.5, INF, 1e-38], np.float32)
    feeds = {"x": x, "dy": np.arange(1, 9, dtype=np.float32), "k": np.array(2, np.float32)}
    feeds = {value.name: feeds[value.name] for value in model.graph.inputs}
    found, expected = (
        runtime.checking_session(ir.to_proto(m).SerializeToString()).run(None, feeds)[0] for m in (model, plain)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("body, dtype", [
    ("c = GreaterOrEqual(x, k) y = Where(c, k, x)", "float"),
    ("c = GreaterOrEqual(x, two) y = Where(c, zero, dy)", "double"),
    ("c = GreaterOrEqual(x, two) y = Where(c, k, x)", "float"),
    ("c = GreaterOrEqual(x, two) y = Where(c, x, two)", "float"),
    ("c = Greater(x, two) y = Where(c, zero, dy)", "float"),
    ("c = GreaterOrEqual(x, zero) y = Where(c, two, x)", "float"),
], ids=["a bound that varies", "float64", "another value", "the other way round", "slope 1 at the bound", "a jump"])  # fmt: skip
def test_other_choices_stay(body, dtype):
    assert not ThresholdPass()(model_of(body, dtype)).modified
