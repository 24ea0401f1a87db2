"""A convolution in the form that unfolds fewer channels: the same numbers, and training as in PyTorch."""

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from test_passes_nchwc import model_of, operators, results, sessions_opened
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.nchwc import BlockedConvolutionPass
from orttrainer.graph.passes.speed.turned import TurnConvolutionPass

OTHER = {"Conv": "ConvTranspose", "ConvTranspose": "Conv"}


def rewritten(model):
    found = ir.from_proto(model)
    TurnConvolutionPass()(found)
    return found


def convolution(op_type, channels, out, kernel=(3, 2), bias=False, dtype=TensorProto.FLOAT, **attributes):
    """A model of one convolution, and the sizes of its inputs; batch and image are of any size."""
    group = attributes.get("group", 1)
    weights = (channels, out // group) if op_type == "ConvTranspose" else (out, channels // group)
    sizes = {"x": (2, channels, 9, 11), "w": (*weights, *kernel), "b": (out,)}
    names = ["x", "w", "b"][: 2 + bias]
    shapes = {name: sizes[name] for name in names} | {"x": ("n", channels, "height", "width")}
    return model_of([helper.make_node(op_type, names, ["y"], **attributes)], shapes, ["y"], dtype), sizes


ATTRIBUTES = {
    "plain": {},
    "uneven pads": {"pads": [2, 0, 1, 1]},
    "dilations": {"dilations": [1, 3], "pads": [1, 2, 0, 3]},
    "wide dilations": {"dilations": [9, 1], "pads": [9, 0, 9, 0]},
    "a given kernel": {"kernel_shape": [3, 2]},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("op_type, channels, out", [("Conv", 12, 3), ("Conv", 8, 1), ("ConvTranspose", 3, 4)])
def test_a_convolution_turned_round_is_the_convolution(op_type, channels, out, attributes, bias):
    model, sizes = convolution(op_type, channels, out, bias=bias, **attributes)
    after, rng = rewritten(model), np.random.default_rng(0)
    assert operators(after).count(("", OTHER[op_type])) == 1 and ("", op_type) not in operators(after)
    feeds = {v.name: rng.standard_normal(sizes[v.name], np.float32) for v in model.graph.input}
    (expected,), (given,) = results(model, feeds), results(after, feeds)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


OTHERS = {
    "not few channels": ("Conv", 12, 4, {}),
    "as many channels": ("ConvTranspose", 4, 4, {}),
    "one tap": ("Conv", 12, 3, {"kernel": (1, 1)}),
    "one axis": ("Conv", 12, 3, {"kernel": (3,)}),
    "a gradient as kernel": ("Conv", 12, 3, {"kernel": (16, 16), "pads": [9, 9, 9, 9]}),
    "a wide gradient as kernel": ("Conv", 12, 3, {"kernel": (3, 4), "dilations": [1, 9], "pads": [0, 18, 0, 18]}),
    "groups": ("Conv", 12, 2, {"group": 2}),
    "strides": ("Conv", 12, 3, {"strides": [1, 2]}),
    "pads beyond the kernel": ("Conv", 12, 3, {"pads": [0, 2, 0, 0]}),
    "automatic pads": ("Conv", 12, 3, {"auto_pad": "SAME_UPPER"}),
    "float64": ("Conv", 12, 3, {"dtype": TensorProto.DOUBLE}),
    "more output": ("ConvTranspose", 3, 4, {"output_padding": [1, 0], "strides": [2, 1]}),
}


@pytest.mark.parametrize("op_type, channels, out, options", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(op_type, channels, out, options):
    if len(options.get("kernel", ())) == 1:
        shapes = {"x": (2, channels, 20), "w": (out, channels, *options["kernel"])}
        model = model_of([helper.make_node(op_type, ["x", "w"], ["y"])], shapes, ["y"])
    else:
        model, _ = convolution(op_type, channels, out, **options)
    assert operators(rewritten(model)) == [("", op_type)]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_head_and_its_gradient_train_like_pytorch(monkeypatch, blocks):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 32, 3, padding=1), nn.Softplus(), nn.Conv2d(32, 3, 5, padding=2))
    images = [IODescription(name, ["batch", channels, 8, 9], torch.float32) for name, channels in (("x", 2), ("y", 3))]
    loss = IODescription("loss", [], torch.float32)
    description = ModelDescription(images, [loss, IODescription("output", ["batch", 3, 8, 9], torch.float32)])
    reference, opened = copy.deepcopy(module), sessions_opened(monkeypatch)
    settings = Settings(disabled_passes=[] if blocks else [BlockedConvolutionPass.__name__])
    engine = Engine(module, nn.functional.mse_loss, description, OptimizerChoice("SGDOptimizer"), settings)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for batch in (4, 3):
        x, y = torch.randn(batch, 2, 8, 9), torch.randn(batch, 3, 8, 9)
        expected = nn.functional.mse_loss(reference(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "y": y}, 0.1)[0][0]
        torch.testing.assert_close(found.reshape(()), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    transposed = [node for node in opened[-1].graph.node if node.op_type == "ConvTranspose"]
    assert len(transposed) == 1  # the head, which was none; the gradient of its input was one
