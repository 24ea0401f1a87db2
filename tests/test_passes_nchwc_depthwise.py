"""Weight gradients of depthwise convolutions, in blocks of channels."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from test_passes_nchwc import BLOCK, needs_blocks, operators, results, rewritten
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings


def depthwise_gradient(channels, sizes, result, perm=(2, 1, 0, 3, 4), **attributes):
    """The sum over all images of their convolutions with dy by channels, as the gradient rule of Conv writes it."""
    height, width = sizes
    shapes = {"x": ("n", channels, height, width), "dy": ("n", channels, *result)}
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["x5"]),
        helper.make_node("Transpose", ["x5"], ["xt"], perm=perm),
        helper.make_node("Reshape", ["xt", "merged"], ["images"]),
        helper.make_node("Transpose", ["dy"], ["kernel"], perm=[1, 0, 2, 3]),
        helper.make_node("Conv", ["images", "kernel"], ["y"], group=channels, **attributes),
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    constants = [
        helper.make_tensor("axis", TensorProto.INT64, [1], [2]),
        helper.make_tensor("merged", TensorProto.INT64, [4], [1, -1, height, width]),
    ]
    graph = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name="y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    kernel = model.graph.output[0].type.tensor_type
    kernel.shape.dim[0].dim_value, kernel.shape.dim[1].dim_value = 1, channels
    return model


GRADIENTS = {
    "plain": ((20, 22), (18, 20), {}),
    "pads": ((20, 18), (20, 19), {"pads": [1, 1, 1, 1]}),
    "uneven pads": ((20, 20), (20, 20), {"pads": [2, 1, 0, 1]}),
    "strides of the convolution": ((20, 20), (10, 10), {"pads": [1, 1, 1, 1], "dilations": [2, 2]}),
    "dilations of the convolution": ((20, 20), (16, 18), {"strides": [2, 1]}),
}


@needs_blocks
@pytest.mark.parametrize("sizes, result, attributes", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("batch, channels", [(1, 2 * BLOCK), (3, 2 * BLOCK), (3, BLOCK + 4), (2, 12)])
def test_a_depthwise_weight_gradient_in_blocks_is_the_gradient(sizes, result, attributes, batch, channels):
    model = depthwise_gradient(channels, sizes, result, **attributes)
    rng = np.random.default_rng(0)
    feeds = {"x": (batch, channels, *sizes), "dy": (batch, channels, *result)}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in feeds.items()}
    after = rewritten(model)
    found = operators(after)
    assert ("", "Scan") in found and ("", "Conv") not in found and ("", "Transpose") not in found
    (expected,), (given,) = results(model, feeds), results(after, feeds)
    assert given.shape == expected.shape
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "model",
    [
        depthwise_gradient(BLOCK + 2, (20, 20), (18, 18)),
        depthwise_gradient(BLOCK, (6, 6), (4, 4)),
        depthwise_gradient(BLOCK, (BLOCK, 20), (BLOCK - 2, 18), perm=(2, 3, 0, 1, 4)),
    ],
    ids=["unfilled blocks", "a small image", "other axes"],
)
def test_other_sums_of_convolutions_stay_as_they_are(model):
    assert ("", "Conv") in operators(rewritten(model)) and ("", "Scan") not in operators(rewritten(model))


@needs_blocks
@pytest.mark.parametrize("rows", [1, 2])
def test_networks_for_a_fixed_number_of_images_train_as_in_pytorch(rows):
    """Of one image the weight gradient of a depthwise convolution is a depthwise convolution itself."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1))
    reference, x, target = copy.deepcopy(module), torch.randn(rows, 32, 8, 8), torch.randn(rows, 32, 8, 8)
    description = ModelDescription(
        [IODescription(name, list(x.shape), torch.float32) for name in ("x", "target")], [IODescription("loss", [])]
    )
    engine = Engine(module, nn.functional.mse_loss, description, OptimizerChoice("SGDOptimizer"), Settings())
    engine.train_step({"x": x, "target": target}, 0.1)
    nn.functional.mse_loss(reference(x), target).backward()
    for found, expected in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(found, expected.detach() - 0.1 * expected.grad, rtol=1e-4, atol=1e-6)
