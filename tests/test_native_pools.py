"""The gradient of MaxPool by a kernel: that of PyTorch, for every window, in blocks of channels and not."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch
from marks import in_turn, slow
from onnx_ir.passes import common
from test_native_weights import run
from test_passes_nchwc import BLOCK, needs_blocks
from test_passes_nchwc_regions import assert_trained, trained
from torch import nn

from orttrainer import phase
from orttrainer.differentiate.rules.pooling import max_pool
from orttrainer.graph.builder import Builder
from orttrainer.native.pools import FusePoolGradientsPass
from orttrainer.native.toolchain import DOMAIN, compiled
from orttrainer.runtime.blocked import block_convolutions

pytestmark = pytest.mark.usefixtures("own_kernel_cache")

CPU = ["CPUExecutionProvider"]


def gradient_of(shape, images=None, dtype=ir.DataType.FLOAT, convolved=False, log=False, ends=1, **attributes):
    """The graph of the gradient of a MaxPool; `convolved`: of what a convolution makes, which changes nothing; `log`: of its logarithm."""
    dims = [images or shape[0], *shape[1:]]
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(dims))
    dy = ir.Value(name="dy", type=ir.TensorType(dtype))
    graph = ir.Graph([x, dy], [], nodes=[], opset_imports={"": 18}, name="g")
    op = Builder(graph)
    if convolved:
        one = np.zeros((shape[1], shape[1], 3, 3), np.float32)
        one[range(shape[1]), range(shape[1]), 1, 1] = 1
        x = op.Conv(x, op.const(one), pads=[1, 1, 1, 1])
    x = op.Log(x) if log else x
    y = op.MaxPool(x, outputs=ends, **attributes)
    dy.shape = (y if ends == 1 else y[0]).shape
    (node,) = [node for node in graph if node.op_type == "MaxPool"]
    graph.outputs.append(max_pool(op, node, dy))
    return ir.Model(graph, ir_version=10)


def fused(model, block=None):
    fuse = FusePoolGradientsPass(block)
    fuse(model)
    common.RemoveUnusedNodesPass()(model)  # as before a session is opened
    return compiled(fuse.kernels)


def expected(x, kernel_shape, strides, pads, dilations=1, ceil_mode=0):
    """(dY of whole numbers, whose sums are exact; dX of PyTorch). Pads that differ on both sides are -inf around x."""
    x = torch.tensor(x, requires_grad=True)
    axes = len(kernel_shape)
    around = [pad for axis in reversed(range(axes)) for pad in (pads[axis], pads[axes + axis])]
    padded = nn.functional.pad(x, around, value=-np.inf)
    pool = getattr(nn.functional, f"max_pool{axes}d")
    y = pool(padded, kernel_shape, strides, dilation=dilations, ceil_mode=bool(ceil_mode))
    dy = torch.randint(-9, 10, y.shape, generator=torch.Generator().manual_seed(0)).float()
    y.backward(dy)
    return dy.numpy(), x.grad.numpy()


def pixels(*shape, kinds=12):
    """Images in which many values are equal."""
    return np.random.default_rng(0).integers(0, kinds, shape).astype(np.float32)


WINDOWS = {
    "2 x 2": ((8, 12), {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4}),
    "3 x 3 that overlap": ((9, 14), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    "every pixel": ((7, 6), {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4}),
    "pixels between windows": ((11, 10), {"kernel_shape": [2, 1], "strides": [3, 2], "pads": [0] * 4}),
    "pixels behind the last": ((9, 11), {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4}),
    "odd pads": ((7, 8), {"kernel_shape": [3, 4], "strides": [2, 3], "pads": [0, 2, 1, 1]}),
    "dilations": ((13, 12), {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [2, 0, 2, 0], "dilations": [2, 3]}),
    "a last window cut": ((7, 9), {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0] * 4, "ceil_mode": 1}),
    "many in a row": ((3, 301), {"kernel_shape": [2, 3], "strides": [1, 2], "pads": [0, 1, 0, 1]}),
    "all": ((5, 4), {"kernel_shape": [5, 4], "strides": [5, 4], "pads": [0] * 4}),
}
OTHER_AXES = {
    "one axis": ((12,), {"kernel_shape": [2], "strides": [2], "pads": [0, 0]}),
    "one axis, overlapping": ((150,), {"kernel_shape": [4], "strides": [2], "pads": [2, 1]}),
    "three axes": ((4, 6, 8), {"kernel_shape": [2, 3, 2], "strides": [2, 3, 2], "pads": [0] * 6}),
    "three axes, overlapping": ((5, 6, 7), {"kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1] * 6}),
}


IMAGES = {"static": None, "symbolic": "batch"}


@pytest.mark.parametrize("case, images", in_turn(WINDOWS | OTHER_AXES, IMAGES))
def test_the_gradient_is_that_of_pytorch(case, images):
    size, attributes = case
    x = pixels(3, 5, *size)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, images, **attributes)
    path = fused(model)
    assert [node.op_type.split("_")[0] for node in model.graph] == ["MaxPoolGradient"]
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}, path), right)


@needs_blocks
@pytest.mark.parametrize("case, images", in_turn(WINDOWS, IMAGES))
def test_it_is_the_same_in_blocks(case, images):
    size, attributes = case
    x = pixels(9, 2 * BLOCK, *size)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, images, convolved=True, **attributes)
    path = fused(model, BLOCK)
    assert block_convolutions(model, CPU, stay=True)
    (kernel,) = [node for node in model.graph if node.domain == DOMAIN]
    assert kernel.op_type.startswith(f"MaxPoolGradient_{BLOCK}_")
    assert kernel.inputs[0].producer().op_type == "Conv"  # as it made it
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}, path), right)


def in_blocks(x, block):
    """[images, channels, height, width] in the order of blocks, in the same shape."""
    images, channels, *size = x.shape
    return x.reshape(images, channels // block, block, *size).transpose(0, 1, 3, 4, 2).reshape(x.shape)


@pytest.mark.parametrize("case, block", in_turn(WINDOWS, [8, 16]))
def test_blocks_of_other_processors(case, block):
    size, attributes = case
    x = pixels(2, 48, *size)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, **attributes)
    fuse = FusePoolGradientsPass(None)
    fuse(model)
    kernel = dataclasses.replace(fuse.kernels[0], block=block)
    model.graph[0].op_type = kernel.name
    found = run(model, {"x": in_blocks(x, block), "dy": in_blocks(dy, block)}, compiled([kernel]))
    np.testing.assert_array_equal(found, in_blocks(right, block))


@needs_blocks
@pytest.mark.parametrize("window", ["2 x 2", "3 x 3 that overlap"])
@pytest.mark.parametrize("convolved", [False, True], ids=["plain", "in blocks"])
def test_nan_is_the_largest_and_infinities_alone_have_a_first(convolved, window):
    x = pixels(9, BLOCK, 8, 12) - 1  # of which the logarithm is NaN, -inf, 0, ...
    x[:3], x[:, :, :4, :4] = np.maximum(x[:3], 0), 0
    attributes = {**WINDOWS[window][1], "pads": [0] * 4}  # PyTorch's -inf around it would come first
    with np.errstate(invalid="ignore", divide="ignore"):
        dy, right = expected(np.log(x), **attributes)
    model = gradient_of(x.shape, convolved=convolved, log=True, **attributes)
    path = fused(model, BLOCK)
    assert not convolved or block_convolutions(model, CPU, stay=True)
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}, path), right)


@needs_blocks
def test_the_bits_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(0)
    for convolved in (False, True):
        model = gradient_of((7, 2 * BLOCK, 20, 20), None, convolved=convolved, **WINDOWS["3 x 3 that overlap"][1])
        path = fused(model, BLOCK)
        feeds = {"x": rng.standard_normal((7, 2 * BLOCK, 20, 20), np.float32)}
        feeds["dy"] = rng.standard_normal((7, 2 * BLOCK, 10, 10), np.float32)
        one, *others = (run(model, feeds, path, threads) for threads in (1, 2, 5))
        for other in others:
            np.testing.assert_array_equal(other, one)


def test_no_images_have_a_gradient_and_others_that_do_not_go_together_are_an_error():
    model = gradient_of((2, 3, 8, 12), "batch", **WINDOWS["2 x 2"][1])
    path = fused(model)
    assert (
        run(model, {"x": np.ones((0, 3, 8, 12), np.float32), "dy": np.ones((0, 3, 4, 6), np.float32)}, path).shape[0]
        == 0
    )
    with pytest.raises(Exception, match="sizes of the inputs do not go together"):
        run(model, {"x": np.ones((2, 3, 8, 12), np.float32), "dy": np.ones((1, 3, 4, 6), np.float32)}, path)


def test_indices_that_somebody_else_reads_are_there():
    attributes = WINDOWS["3 x 3 that overlap"][1]
    x = pixels(2, 3, 9, 14, kinds=10**6)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, ends=2, **attributes)
    (pool,) = [node for node in model.graph if node.op_type == "MaxPool"]
    model.graph.outputs.append(pool.outputs[1])
    path = fused(model)
    assert any(node.domain == DOMAIN for node in model.graph)
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}, path), right)
    assert len(pool.outputs) == 2


OTHERS = {
    "float64": {"dtype": ir.DataType.DOUBLE, **WINDOWS["2 x 2"][1]},
    "pads as the runtime finds them": {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
}


@pytest.mark.parametrize("attributes", OTHERS.values(), ids=OTHERS)
def test_other_gradients_are_left_to_onnx_runtime(attributes):
    assert not FusePoolGradientsPass(None)(gradient_of((2, 3, 8, 12), **attributes)).modified


class Pools(nn.Module):
    """Pools behind a BatchNorm, behind another pool, of what is read again, of few channels, before the activation."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, BLOCK, 3, padding=1), nn.BatchNorm2d(BLOCK)
        self.same, self.few = nn.Conv2d(BLOCK, BLOCK, 3, padding=1), nn.Conv2d(2 * BLOCK, 3, 3, padding=1)
        self.head = nn.LazyLinear(4)

    @classmethod
    def of_side(cls, side):
        """For images of that size."""
        module = cls()
        module(torch.zeros(1, 3, side, side))
        return module

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = self.same(x)
        pooled = torch.relu(nn.functional.max_pool2d(y, 2))
        again = torch.cat([pooled, nn.functional.max_pool2d(torch.tanh(y) + x, 2)], 1)
        few = nn.functional.max_pool2d(nn.functional.max_pool2d(self.few(again), 2, 1), 2, ceil_mode=True)
        return self.head(few.flatten(1))


@needs_blocks
@pytest.mark.parametrize(
    "settings", [{}, slow({"side": 13}), slow({"accumulation_steps": 2})], ids=["as it is", "odd", "accumulated"]
)
def test_a_network_with_pools_trains_as_in_pytorch(settings, monkeypatch):
    opened = []
    original = phase.open_session
    monkeypatch.setattr(phase, "open_session", lambda model, *rest: opened.append(model) or original(model, *rest))

    assert_trained(*trained(lambda: Pools.of_side(settings.get("side", 12)), native_kernels=True, **settings))
    nodes = [node for model in opened for node in model.graph if node.op_type.startswith("MaxPoolGradient")]
    assert {int(node.op_type.split("_")[1]) for node in nodes} == {1, BLOCK}
