"""Convolutions of small images as products: the same numbers, and training as in PyTorch."""

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from marks import in_turn
from onnx import TensorProto, helper
from test_passes_nchwc import model_of, operators, results, sessions_opened
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.small_images import SmallImagesPass

CHANNELS, OUT = 160, 128


def convolution(op_type, kernel=(3, 3), size=(2, 2), batch=3, bias=None, dtype=TensorProto.FLOAT, **attributes):
    """A model of one convolution, and the sizes of its inputs; the batch is of any size. `bias`: False is an input left open."""
    group = attributes.get("group", 1)
    weights = (CHANNELS, OUT // group) if op_type == "ConvTranspose" else (OUT, CHANNELS // group)
    sizes = {"x": (batch, CHANNELS, *size), "w": (*weights, *kernel), "b": (OUT,)}
    names = ["x", "w", {True: "b", False: "", None: None}[bias]]
    names = [name for name in names if name is not None]
    shapes = {name: sizes[name] for name in names if name} | {"x": ("n", CHANNELS, *size)}
    return model_of([helper.make_node(op_type, names, ["y"], **attributes)], shapes, ["y"], dtype), sizes


def rewritten(model, sizes=None):
    found = ir.from_proto(model)
    SmallImagesPass(sizes)(found)
    return found


CONVOLUTIONS = {
    "plain": {"pads": [1, 1, 1, 1]},
    "strides": {"size": (4, 3), "pads": [1, 1, 1, 1], "strides": [2, 2]},
    "pixels that are not read": {"size": (6, 5), "kernel": (2, 2), "strides": [4, 3]},
    "uneven pads": {"size": (3, 2), "pads": [2, 0, 0, 1]},
    "dilations": {"size": (4, 2), "pads": [1, 2, 0, 2], "dilations": [2, 2]},
    "taps that read pads alone": {"size": (1, 1), "pads": [1, 1, 1, 1]},
    "taps before and behind": {"size": (1, 2), "kernel": (5, 5), "pads": [2, 3, 2, 1]},
    "taps that jump over the image": {"size": (2, 2), "kernel": (2, 4), "pads": [1, 3, 1, 3], "dilations": [2, 2]},
    "as large as the image": {"size": (2, 3), "kernel": (2, 3)},
    "one tap": {"size": (2, 2), "kernel": (1, 1)},
    "one tap of every other pixel": {"size": (4, 3), "kernel": (1, 1), "strides": [2, 2]},
}


@pytest.mark.parametrize("bias", [None, False, True])
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_product_is_the_convolution(options, bias, monkeypatch):
    monkeypatch.setattr("orttrainer.graph.passes.speed.small_images.FEWEST_WEIGHTS", 1)
    model, sizes = convolution("Conv", bias=bias, **options)
    assert_same(model, rewritten(model), sizes)


TRANSPOSED = {
    "plain": {"pads": [1, 1, 1, 1]},
    "strides": {"pads": [1, 1, 1, 1], "strides": [2, 2]},
    "more output": {"pads": [1, 0, 0, 1], "strides": [2, 3], "output_padding": [1, 2]},
    "one tap, more output": {"kernel": (1, 1), "strides": [2, 2], "output_padding": [1, 0]},
    "dilations": {"pads": [1, 2, 0, 2], "dilations": [2, 2]},
    "a single pixel": {"size": (1, 1)},
    "taps that only pads would take": {"size": (1, 1), "pads": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("bias", [None, False, True])
@pytest.mark.parametrize("options", TRANSPOSED.values(), ids=TRANSPOSED)
def test_a_product_added_up_is_the_transposed_convolution(options, bias, monkeypatch):
    monkeypatch.setattr("orttrainer.graph.passes.speed.small_images.FEWEST_WEIGHTS", 1)
    model, sizes = convolution("ConvTranspose", bias=bias, **options)
    assert_same(model, rewritten(model), sizes)


def assert_same(model, after, sizes):
    assert not {op_type for _, op_type in operators(after)} & {"Conv", "ConvTranspose"}
    rng = np.random.default_rng(0)
    for batch in (sizes["x"][0], 1, 5):
        shapes = {**sizes, "x": (batch, *sizes["x"][1:])}
        feeds = {v.name: rng.standard_normal(shapes[v.name], np.float32) for v in model.graph.input}
        (expected,), (given,) = results(model, feeds), results(after, feeds)
        np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


OTHERS = {
    "many pixels to unfold": ("Conv", {"size": (3, 3), "pads": [1, 1, 1, 1]}),
    "many pixels": ("ConvTranspose", {"size": (5, 5)}),
    "one image": ("Conv", {"size": (2, 2), "pads": [1, 1, 1, 1], "batch": 1}),
    "groups": ("Conv", {"pads": [1, 1, 1, 1], "group": 2}),
    "float64": ("Conv", {"pads": [1, 1, 1, 1], "dtype": TensorProto.DOUBLE}),
    "automatic pads": ("Conv", {"auto_pad": "SAME_UPPER"}),
    "a gradient as kernel": ("Conv", {"kernel": (12, 12), "pads": [5, 5, 6, 6]}),
    "no tap reads a pixel": ("Conv", {"size": (1, 1), "kernel": (2, 2), "dilations": [2, 2], "pads": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("op_type, options", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(op_type, options, monkeypatch):
    monkeypatch.setattr("orttrainer.graph.passes.speed.small_images.FEWEST_WEIGHTS", 1)
    model, sizes = convolution(op_type, **options)
    assert operators(rewritten(model, {"n": sizes["x"][0]})) == [("", op_type)]


ELSE = {
    "many images": (64, OUT, 2, 1 << 21),
    "few weights": (8, 4, 2, 1 << 21),
    "large weights, but more images of more pixels": (5, OUT, 4, CHANNELS * OUT * 9),
    "large weights, but larger images": (2, OUT, 5, CHANNELS * OUT * 9),
}


@pytest.mark.parametrize("batch, out, size, large", ELSE.values(), ids=ELSE)
def test_what_blocks_or_the_cache_are_good_for_stays_as_it_is(batch, out, size, large, monkeypatch):
    monkeypatch.setattr("orttrainer.graph.passes.speed.small_images.LARGE_WEIGHTS", large)
    shapes = {"x": (batch, CHANNELS, size, size), "w": (out, CHANNELS, 3, 3)}
    model = model_of([helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])], shapes, ["y"])
    assert operators(rewritten(model)) == [("", "Conv")]


@pytest.mark.parametrize("batch, size", [(64, (2, 2)), (4, (4, 4))], ids=["many images", "images of more pixels"])
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_weights_that_no_cache_keeps_are_read_once_for_all_images(op_type, batch, size, monkeypatch):
    monkeypatch.setattr("orttrainer.graph.passes.speed.small_images.LARGE_WEIGHTS", CHANNELS * OUT * 9)
    weights = (CHANNELS, OUT) if op_type == "ConvTranspose" else (OUT, CHANNELS)
    shapes = {"x": (batch, CHANNELS, *size), "w": (*weights, 3, 3)}
    model = model_of([helper.make_node(op_type, ["x", "w"], ["y"], pads=[1, 1, 1, 1])], shapes, ["y"])
    after = rewritten(model)
    assert not {kind for _, kind in operators(after)} & {"Conv", "ConvTranspose"}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    (expected,), (given,) = results(model, feeds), results(after, feeds)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


class Narrowing(nn.Sequential):
    """From 8 x 8 pixels to single ones, and back."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(128, 128, 4), nn.ReLU(), nn.Conv2d(128, 2, 1),
        )  # fmt: skip


@pytest.mark.parametrize(
    "size, options",
    in_turn([5, "batch"], [{}, {"native_kernels": True}, {"disabled_passes": ["BlockedConvolutionPass"]}]),
)
def test_a_network_of_small_images_trains_as_in_pytorch(size, options, monkeypatch):
    torch.manual_seed(0)
    module = Narrowing()
    reference, opened = copy.deepcopy(module), sessions_opened(monkeypatch)
    images = [IODescription("x", [size, 3, 8, 8], torch.float32), IODescription("y", [size, 2, 4, 4], torch.float32)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("output", [size, 2, 4, 4], torch.float32)]
    engine = Engine(
        module, F.mse_loss, ModelDescription(images, outputs), OptimizerChoice("SGDOptimizer"), Settings(**options)
    )
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for batch in (5, 5) if size == 5 else (5, 3):
        x, y = torch.randn(batch, 3, 8, 8), torch.randn(batch, 2, 4, 4)
        expected = F.mse_loss(reference(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "y": y}, 0.1)[0][0]
        torch.testing.assert_close(found.reshape(()), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    made = [node.op_type for node in opened[-1].graph.node]
    assert made.count("Col2Im") == 5  # one transposed, four input gradients; the first layer's nobody reads
    assert not {"ConvTranspose"} & set(made)
