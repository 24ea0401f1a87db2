"""Networks that look at some of the images of a batch, of which there may be none: trained as in PyTorch."""

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from marks import usual
from onnx import TensorProto, helper, numpy_helper
from test_passes_nchwc import results
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.empty_tensors import EmptyTensorsPass
from orttrainer.graph.sizes import may_be_zero


class Chosen(nn.Module):
    """All images have a score, and those that are kept one more, from the layers under test."""

    def __init__(self, layers):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 4)
        self.layers, self.second = layers, nn.LazyLinear(4)

    def forward(self, x, kept):
        images = F.softplus(self.stem(x))
        places = torch.nonzero(kept).flatten()
        features = self.layers(images[places])
        return self.head(images.mean((2, 3))).index_add(0, places, self.second(features.flatten(2).mean(2)))


def conv(*arguments, **options):
    return lambda: nn.Conv2d(*arguments, **options)


class Of(nn.Module):
    """A layer of images in another shape."""

    def __init__(self, shape, layer):
        super().__init__()
        self.shape, self.layer = shape, layer

    def forward(self, x):
        return self.layer(x.reshape(-1, *self.shape))


LAYERS = {
    "3 x 3": conv(16, 32, 3, padding=1),
    "1 x 1": conv(16, 32, 1),
    "strides": conv(16, 32, 3, stride=2, padding=1),
    "strides of 1 x 1": conv(16, 32, 1, stride=2),
    "dilations": conv(16, 32, 3, dilation=2),
    "groups": conv(16, 32, 3, groups=2),
    "depthwise": conv(16, 16, 3, padding=1, groups=16),
    "few channels": conv(16, 3, 5),
    "as large as the image": conv(16, 32, 8),
    "transposed": lambda: nn.ConvTranspose2d(16, 8, 3, padding=1),
    "transposed, strides": lambda: nn.ConvTranspose2d(16, 32, 4, stride=2, padding=1),
    "one axis": lambda: Of((16, 64), nn.Conv1d(16, 32, 3, padding=1)),
    "three axes": lambda: Of((16, 4, 4, 4), nn.Conv3d(16, 8, 3, padding=1)),
    "two, in blocks": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.Softplus(), nn.Conv2d(32, 32, 3)),
    "one pixel": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 32, 3, padding=1)),
    "pools": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 16, 2), nn.AvgPool2d(2)),
    "pools that overlap": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.MaxPool2d(3, 2, 1)),
    "norms": lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3), nn.GroupNorm(2, 16), nn.Tanh()),
    "statistics that stay": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)),
    "resized": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3)),
    "pads": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(16, 16, 3), nn.ReplicationPad2d(2)),
    "means of windows that overlap": lambda: nn.AdaptiveAvgPool2d(3),
    "resized by cubes": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "attention": lambda: Of((64, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)),
    "a GRU": lambda: Of((64, 16), Last(nn.GRU(16, 8, batch_first=True))),
    "an LSTM": lambda: Of((64, 16), Last(nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True))),
    "an RNN": lambda: Of((64, 16), Last(nn.RNN(16, 8, nonlinearity="tanh", batch_first=True))),
}


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def trained(layers, batches, **settings):
    torch.manual_seed(0)
    module = Chosen(layers)
    module(torch.zeros(2, 3, 8, 8), torch.ones(2, dtype=torch.int64))  # its last layer learns its size
    module.train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    reference = copy.deepcopy(module).double()
    inputs = [
        IODescription("x", ["batch", 3, 8, 8], torch.float32),
        IODescription("kept", ["batch"], torch.int64),
        IODescription("label", ["batch"], torch.int64),
    ]
    outputs = [IODescription("loss", [], torch.float32), IODescription("scores", ["batch", 4], torch.float32)]
    engine = Engine(
        module,
        F.cross_entropy,
        ModelDescription(inputs, outputs),
        OptimizerChoice("SGDOptimizer"),
        Settings(**settings),
    )
    optimizer, losses = torch.optim.SGD(reference.parameters(), 0.1), []
    for kept in batches:
        x, kept, label = torch.randn(len(kept), 3, 8, 8), torch.tensor(kept), torch.randint(0, 4, (len(kept),))
        loss = F.cross_entropy(reference(x.double(), kept), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "kept": kept, "label": label}, 0.1)[0][0]
        losses.append((found.item(), loss.item()))
    return module, reference, losses


USUAL = (
    "3 x 3", "groups", "transposed, strides", "two, in blocks", "pools", "norms", "an LSTM",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(LAYERS, *USUAL))
def test_a_batch_of_which_no_image_is_looked_at_trains_the_rest(name):
    module, reference, losses = trained(LAYERS[name](), [[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-5)
    for (key, found), expected in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-4, atol=1e-5, msg=key)


# -- operators --------------------------------------------------------------------------------

SIZES = {
    "batch": False, "2*batch": False, "batch*time + 1": False, "(batch + 2)*3": False, 3: False,
    "u0": True, "batch//2": True, "batch - 1": True, "2*u0": True, "0*batch": True, None: True, 0: True,
}  # fmt: skip


@pytest.mark.parametrize(("size", "possible"), SIZES.items())
def test_sizes_that_are_not_the_batchs_may_be_zero(size, possible):
    size = size if isinstance(size, int) else ir.SymbolicDim(size)
    assert may_be_zero(size, {"batch", "time"}) == possible


OPERATORS = {
    "Reshape": [helper.make_node("Reshape", ["rows", "to"], ["y"])],
    "MatMul": [helper.make_node("MatMul", ["m", "rows"], ["y"])],
    "MatMul of what is turned": [
        helper.make_node("Transpose", ["rows"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["turned", "m"], ["y"]),
    ],
    "GRU": [helper.make_node("GRU", ["x", "gru w", "gru r"], ["y"], hidden_size=2)],
    "LSTM of states": [
        helper.make_node("LSTM", ["x", "w", "r", "", "lengths", "h", "c"], ["", "y", "last"], hidden_size=2)
    ],
}
CONSTANTS = {"m": (4, 4), "w": (1, 8, 4), "r": (1, 8, 2), "gru w": (1, 6, 4), "gru r": (1, 6, 2)}


@pytest.mark.parametrize("nodes", OPERATORS.values(), ids=OPERATORS)
def test_an_operator_of_what_values_pick_has_the_same_results_and_has_some_of_nothing(nodes):
    rng = np.random.default_rng(0)
    chosen = {
        "rows": ("all rows", 0),
        "x": ("all", 1),
        "h": ("all h", 1),
        "c": ("all h", 1),
        "lengths": ("all lengths", 0),
    }
    read = {name for node in nodes for name in node.input}
    picks = [
        helper.make_node("Gather", [source, "places"], [name], axis=axis)
        for name, (source, axis) in chosen.items() if name in read
    ]  # fmt: skip
    shapes = {"all rows": [3, 4, 4], "all": [5, 3, 4], "all h": [1, 3, 2], "all lengths": [3]}
    float32, int64, int32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
    types = {"all lengths": int32}
    sources = {source for name, (source, _) in chosen.items() if name in read}
    inputs = [helper.make_tensor_value_info(name, types.get(name, float32), shapes[name]) for name in sorted(sources)]
    inputs.append(helper.make_tensor_value_info("kept", int64, [3]))
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32), name) for name, shape in CONSTANTS.items()
    ]
    constants.append(numpy_helper.from_array(np.array([0, 2, -1]), "to"))
    where = [helper.make_node("NonZero", ["kept"], ["found"]), helper.make_node("Squeeze", ["found"], ["places"])]
    where[1].input.append("first")
    constants.append(numpy_helper.from_array(np.array([0]), "first"))
    outputs = [helper.make_tensor_value_info(name, float32, None) for name in nodes[-1].output if name]
    model = helper.make_model(
        helper.make_graph([*where, *picks, *nodes], "g", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 18)], ir_version=10,
    )  # fmt: skip
    after = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    assert EmptyTensorsPass()(after).modified
    feeds = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in sources}
    if "all lengths" in feeds:
        feeds["all lengths"] = np.array([5, 2, 4], np.int32)
    feeds["kept"] = np.array([1, 0, 1])
    for found, expected in zip(results(after, feeds), results(model, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    feeds["kept"][:] = 0
    assert all(found.size == 0 for found in results(after, feeds))
