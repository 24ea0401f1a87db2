"""Shapes that inputs tell: the same numbers for every batch, and no tensor that waits to be asked for its shape."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from test_passes_nchwc import model_of, results
from test_passes_nchwc_regions import Residual, assert_trained, node, trained
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.input_shapes import InputShapesPass


def rewritten(model):
    found = ir.from_proto(model)
    return found, InputShapesPass()(found).modified


def asked(graph):
    """What is asked for its shape."""
    return [n.inputs[0].name for n in graph if n.op_type in ("Shape", "Size")]


INPUTS = {"x": ("batch", 6, "length"), "y": ("batch", 6, 1)}
ASKING = {
    "all axes": node("Shape", "h"),
    "the first axes": node("Shape", "h", end=2),
    "the last axis": node("Shape", "h", start=-1),
    "axes between": node("Shape", "h", start=-2, end=-1),
    "the number of elements": node("Size", "h"),
}


@pytest.mark.parametrize("asking", ASKING.values(), ids=ASKING)
def test_a_shape_is_that_of_the_tensor(asking):
    nodes = [node("Mul", "x", "y", to="h"), asking, node("Identity", "z", to="copy"), node("Relu", "h", to="r")]
    model = model_of(nodes, INPUTS, ["copy", "r"])
    found, modified = rewritten(model)
    assert modified and "h" not in asked(found.graph)
    for batch, length in [(4, 3), (1, 7), (0, 2)]:
        feeds = {"x": np.ones((batch, 6, length), np.float32), "y": np.ones((batch, 6, 1), np.float32)}
        for a, b in zip(results(model, feeds), results(found, feeds), strict=True):
            np.testing.assert_array_equal(b, a, strict=True)


def test_sizes_that_no_input_tells_are_asked_of_the_tensor():
    nodes = [node("NonZero", "x", to="h"), node("Shape", "h", to="s"), node("Identity", "s")]
    assert not rewritten(model_of(nodes, {"x": ("batch", 3)}, ["z"]))[1]


def test_only_inputs_are_asked_that_the_tensor_is_made_of():
    """The labels come first, and have the size as well; but evaluation without a loss goes on without them."""
    nodes = [node("Relu", "x", to="h"), node("Shape", "h", to="s"), node("Identity", "s")]
    found, modified = rewritten(model_of(nodes, {"label": ("batch",), "x": ("batch", 3)}, ["z"]))
    assert modified and asked(found.graph) == ["x"]


def test_what_the_graph_returns_stays():
    assert not rewritten(model_of([node("Relu", "x", to="h"), node("Shape", "h")], {"x": ("batch", 3)}, ["z"]))[1]


def test_in_a_training_graph_no_result_of_a_convolution_waits_for_its_shape():
    torch.manual_seed(0)
    inputs = [IODescription("x", ["batch", 3, 12, 12], torch.float32), IODescription("label", ["batch"], torch.int64)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", ["batch", 4], torch.float32)]
    graphs = []
    for disabled in ((), ("InputShapesPass",)):
        settings = Settings(disabled_passes=disabled)
        description = ModelDescription(inputs, outputs)
        engine = Engine(Residual(), nn.functional.cross_entropy, description, OptimizerChoice("SGDOptimizer"), settings)
        engine.train_step({"x": torch.randn(5, 3, 12, 12), "label": torch.randint(0, 4, (5,))}, 0.1)
        graphs.append(engine.training_graph.graph.graph)
    large = [
        [n.inputs[0].name for n in graph if n.op_type in ("Shape", "Size") and not n.inputs[0].is_graph_input()]
        for graph in graphs
    ]
    assert not large[0] and large[1]


@pytest.mark.parametrize("disabled", [(), ("InputShapesPass",)], ids=["with", "without"])
def test_a_residual_network_trains_as_in_pytorch(disabled):
    assert_trained(*trained(disabled_passes=disabled, evaluate=True))
