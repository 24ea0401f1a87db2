"""The gradient of a MaxPool by masks along its axes, in blocks of channels: that of PyTorch, and training as in PyTorch."""

import numpy as np
import onnx_ir as ir
import pytest
from marks import in_turn
from test_native_pools import CPU, IMAGES, WINDOWS, Pools, expected, gradient_of, pixels
from test_native_weights import run
from test_passes_nchwc import BLOCK, needs_blocks, sessions_opened
from test_passes_nchwc_regions import assert_trained, trained

from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN
from orttrainer.graph.passes.speed.pools import SeparatePoolGradientsPass
from orttrainer.runtime.blocked import block_convolutions

pytestmark = needs_blocks
LEAST = "orttrainer.graph.passes.speed.pools.LEAST_ELEMENTS"


def rewritten(model, sizes=None):
    return SeparatePoolGradientsPass(BLOCK, sizes)(model).modified


def operators(model):
    return [node.op_type for node in model.graph]


MORE = WINDOWS | {
    "a last window that is cut": ((8, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0] * 4, "ceil_mode": 1}),
    "wide pads": ((6, 7), {"kernel_shape": [5, 4], "strides": [1, 2], "pads": [2, 3, 4, 3]}),
    "a column": ((9, 1), {"kernel_shape": [3, 1], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
}


@pytest.mark.parametrize("case, images, kinds", in_turn(MORE, IMAGES, {"a few values": 3, "many": 10**6}))
def test_the_gradient_is_that_of_pytorch(case, images, kinds, monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    size, attributes = case
    x = pixels(3, 2 * BLOCK, *size, kinds=kinds)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, images, **attributes)
    assert rewritten(model)
    assert "ScatterElements" not in operators(model)
    assert [len(node.outputs) for node in model.graph if node.op_type == "MaxPool"] in ([], [1])
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}), right)


def test_between_convolutions_all_stays_in_blocks(monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    size, attributes = MORE["3 x 3 that overlap"]
    x = pixels(9, 2 * BLOCK, *size)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, "batch", convolved=True, **attributes)
    assert rewritten(model)
    assert block_convolutions(model, CPU, stay=True)
    (convolution,) = [node for node in model.graph if node.op_type == "Conv"]
    readers = {use.node.op_type for use in convolution.outputs[0].uses()}
    assert readers <= {"Reshape", "MaxPool"}  # and not ReorderOutput
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}), right)


@pytest.mark.parametrize("window", ["2 x 2", "3 x 3 that overlap"])
def test_infinities_are_compared_as_numbers_are(window, monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    x = pixels(9, BLOCK, 8, 12, kinds=4)
    x[x == 0], x[x == 3] = -np.inf, np.inf
    attributes = {**WINDOWS[window][1], "pads": [0] * 4}  # PyTorch's -inf around it would come first
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, **attributes)
    assert rewritten(model)
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}), right)


def test_no_images_have_no_gradient(monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    model = gradient_of((2, BLOCK, 9, 14), "batch", **WINDOWS["3 x 3 that overlap"][1])
    assert rewritten(model)
    found = run(model, {"x": np.ones((0, BLOCK, 9, 14), np.float32), "dy": np.ones((0, BLOCK, 5, 7), np.float32)})
    assert found.shape == (0, BLOCK, 9, 14)


def test_indices_that_somebody_else_reads_are_there(monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    attributes = WINDOWS["3 x 3 that overlap"][1]
    x = pixels(2, BLOCK, 9, 14, kinds=10**6)
    dy, right = expected(x, **attributes)
    model = gradient_of(x.shape, ends=2, **attributes)
    (pool,) = [node for node in model.graph if node.op_type == "MaxPool"]
    model.graph.outputs.append(pool.outputs[1])
    assert rewritten(model)
    assert pool.graph is not None
    np.testing.assert_array_equal(run(model, {"x": x, "dy": dy}), right)


PADS = {"strides": [2, 2], "pads": [1] * 4}
OTHERS = {
    "float64": {"dtype": ir.DataType.DOUBLE, "kernel_shape": [3, 3], **PADS},
    "pads as the runtime finds them": {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    "many taps": {"kernel_shape": [6, 3], **PADS},
    "channels that fill no block": {"shape": (8, BLOCK + 4, 64, 64), "kernel_shape": [3, 3], **PADS},
    "few pixels": {"shape": (8, BLOCK, 8, 8), "kernel_shape": [3, 3], **PADS},
    "a volume": {"shape": (8, BLOCK, 8, 32, 32), "kernel_shape": [3, 3, 3], "strides": [2, 2, 2], "pads": [1] * 6},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_gradients_stay_as_they_are(options):
    assert not rewritten(gradient_of(**{"shape": (8, BLOCK, 64, 64), **options}))


@pytest.mark.parametrize("images", [1, 64])
def test_how_many_images_there_are_decides(images):
    model = gradient_of((8, BLOCK, 20, 20), "batch", kernel_shape=[3, 3], **PADS)
    assert rewritten(model, {"batch": images}) == (images == 64)


@pytest.mark.parametrize(
    "settings", [{}, {"side": 13}, {"accumulation_steps": 2}], ids=["as it is", "odd", "accumulated"]
)
def test_a_network_with_pools_trains_as_in_pytorch(settings, monkeypatch):
    monkeypatch.setattr(LEAST, 1)
    opened = sessions_opened(monkeypatch)
    assert_trained(*trained(lambda: Pools.of_side(settings.get("side", 12)), **settings))
    pools = [node for model in opened for node in model.graph.node if node.op_type == "MaxPool"]
    assert (DOMAIN, 1) in {(node.domain, len(node.output)) for node in pools}
