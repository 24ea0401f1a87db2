"""Convolutions in one axis as those of images of one row: the same numbers, and training as in PyTorch."""

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
from orttrainer.graph.passes.speed.one_axis import OneAxisPass

SIZES = {"x": (3, 4, 17), "w": (6, 4, 3), "grouped": (6, 2, 3), "t": (4, 6, 3), "b": (6,)}


def rewritten(model):
    found = ir.from_proto(model)
    OneAxisPass()(found)
    return found


def assert_same(model, sizes):
    """Each output is what it was, under its name, and all convolutions are of images."""
    rng = np.random.default_rng(0)
    feeds = {v.name: rng.standard_normal(sizes[v.name], np.float32) for v in model.graph.input}
    after = rewritten(model)
    assert [v.name for v in after.graph.outputs] == [v.name for v in model.graph.output]
    for expected, found in zip(results(model, feeds), results(after, feeds), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    return after


CONVOLUTIONS = {
    "plain": ("Conv", "w", {}),
    "all attributes": ("Conv", "w", {"kernel_shape": [3], "strides": [2], "pads": [2, 1], "dilations": [1]}),
    "SAME_UPPER": ("Conv", "w", {"auto_pad": "SAME_UPPER", "strides": [2]}),
    "groups": ("Conv", "grouped", {"group": 2}),
    "taps apart": ("Conv", "w", {"dilations": [4], "pads": [8, 0]}),
    "transposed": ("ConvTranspose", "t", {"strides": [3], "pads": [1, 0], "output_padding": [1]}),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op_type, weight, attributes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_of_a_row_is_the_convolution(op_type, weight, attributes, bias):
    names = ["x", weight, "b"][: 2 + bias]
    model = model_of([helper.make_node(op_type, names, ["y"], **attributes)], {n: SIZES[n] for n in names}, ["y"])
    after = assert_same(model, SIZES)
    (convolution,) = [node for node in after.graph if node.op_type == op_type]
    assert len(convolution.inputs[0].shape) == len(convolution.outputs[0].shape) == 4


BETWEEN = {
    "activation": [helper.make_node("LeakyRelu", ["c"], ["d"], alpha=0.3)],
    "bounds": [helper.make_node("Clip", ["c", "low", ""], ["d"])],
    "a vector of channels": [helper.make_node("Mul", ["channels", "c"], ["d"])],
    "a slope for each channel": [helper.make_node("PRelu", ["c", "slopes"], ["d"])],
    "a vector of positions": [helper.make_node("Sub", ["c", "positions"], ["d"])],
    "a number": [helper.make_node("Pow", ["c", "two"], ["d"])],
    "another tensor": [helper.make_node("Add", ["c", "other"], ["d"])],
    "a maximum": [helper.make_node("MaxPool", ["c"], ["d"], kernel_shape=[3], strides=[2], pads=[1, 0], ceil_mode=1)],
    "a mean": [helper.make_node("AveragePool", ["c"], ["d"], kernel_shape=[2], count_include_pad=1, pads=[1, 1])],
    "BatchNormalization": [helper.make_node("BatchNormalization", ["c", "b", "b2", "m", "v"], ["d"])],
    "its training": [
        helper.make_node("BatchNormalization", ["c", "b", "b2", "m", "v"], ["d", "mean", "variance"], training_mode=1)
    ],
    "two of them": [helper.make_node("Relu", ["c"], ["e"]), helper.make_node("Add", ["c", "e"], ["d"])],
}


@pytest.mark.parametrize("nodes", BETWEEN.values(), ids=BETWEEN)
def test_what_lies_between_works_on_images_too(nodes):
    sizes = SIZES | {
        "channels": (6, 1), "slopes": (6, 1), "positions": (15,), "two": (), "low": (), "other": (3, 6, 15), "u": (2, 6, 3),
        **dict.fromkeys(("b", "b2", "m", "v"), (6,)),
    }  # fmt: skip
    first, last = helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Conv", ["d", "u"], ["y"])
    read = {name for node in nodes for name in node.input}
    inputs = {name: size for name, size in sizes.items() if name in {"x", "w", "u"} | read}
    outputs = [name for node in nodes for name in node.output if name in ("mean", "variance")]
    model = model_of([first, *nodes, last], inputs, ["y", "d", *outputs])
    # A power of a negative number and the root of a variance that is one: both sides give the same NaN.
    after = assert_same(model, sizes)
    assert operators(after).count(("", "Squeeze")) == 2  # of the two outputs: nothing stands between


def test_a_result_that_others_read_is_as_it_was():
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Softmax", ["c"], ["s"], axis=1),
        helper.make_node("ReduceSum", ["c"], ["r"], keepdims=0),
        helper.make_node("Transpose", ["c"], ["t"], perm=[2, 0, 1]),
    ]
    assert_same(model_of(nodes, {n: SIZES[n] for n in ("x", "w")}, ["s", "r", "t", "c"]), SIZES)


OTHERS = {
    "an image": (("x", (3, 4, 5, 5)), ("w", (6, 4, 3, 3)), TensorProto.FLOAT, {}),
    "float64": (("x", (3, 4, 17)), ("w", (6, 4, 3)), TensorProto.DOUBLE, {}),
}


@pytest.mark.parametrize("x, w, dtype, attributes", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(x, w, dtype, attributes):
    model = model_of([helper.make_node("Conv", ["x", "w"], ["y"], **attributes)], dict([x, w]), ["y"], dtype)
    assert operators(rewritten(model)) == [("", "Conv")]


class Signals(nn.Module):
    """Signals [n, 2, 64] -> scores [n, 3]: residual blocks, strides, groups, a transposed convolution, one with taps apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv1d(2, 16, 7, padding=3), nn.BatchNorm1d(16)
        self.a, self.b = nn.Conv1d(16, 32, 5, padding=2, bias=False), nn.Conv1d(32, 16, 3, padding=1)
        self.strided, self.grouped = nn.Conv1d(16, 32, 4, 2, 1), nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.up, self.apart = nn.ConvTranspose1d(32, 16, 4, 2, 1), nn.Conv1d(16, 16, 3, padding=4, dilation=4)
        self.scale, self.head = nn.Parameter(torch.rand(16, 1)), nn.Linear(16, 3)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.norm(self.stem(x))), 2)
        x = x + self.b(F.gelu(self.a(x))) * self.scale
        x = torch.tanh(self.up(F.elu(self.grouped(self.strided(x)))))
        return self.head(F.avg_pool1d(self.apart(x), 4).mean(-1))


@pytest.mark.parametrize(
    "size, settings", in_turn([4, "n"], [{}, {"native_kernels": True}, {"disabled_passes": ("OneAxisPass",)}])
)
def test_signals_train_as_in_pytorch(size, settings, monkeypatch):
    module = Signals()
    reference, opened = copy.deepcopy(module), sessions_opened(monkeypatch)
    inputs = [IODescription("x", [size, 2, 64], torch.float32), IODescription("label", [size], torch.int64)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("scores", [size, 3], torch.float32)]
    choice = OptimizerChoice("SGDOptimizer")
    engine = Engine(module, F.cross_entropy, ModelDescription(inputs, outputs), choice, Settings(**settings))
    optimizer = torch.optim.SGD(reference.parameters(), 0.05)
    for step in range(4):
        rows = 4 if size == 4 else 4 - step % 2
        x, label = torch.randn(rows, 2, 64), torch.randint(0, 3, (rows,))
        expected = F.cross_entropy(reference(x), label)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "label": label}, 0.05)[0][0]
        torch.testing.assert_close(found.reshape(()), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert ("/row" in str(opened[-1].graph)) == (not settings.get("disabled_passes"))
