"""Convolutions of volumes as those of images: the same numbers, and training as in PyTorch."""

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from marks import in_turn
from onnx import TensorProto, helper
from test_passes_nchwc import model_of, needs_blocks, operators, results, sessions_opened
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.volumes import VolumesAsImagesPass

X, SAME = (2, 16, 9, 12, 7), {"pads": [1] * 6}


def rewritten(model):
    found = ir.from_proto(model)
    VolumesAsImagesPass()(found)
    return found


def convolution(w, attributes, x=X, bias=False):
    sizes = {"x": x, "w": w} | ({"b": (w[0],)} if bias else {})
    return model_of([helper.make_node("Conv", list(sizes), ["y"], **attributes)], sizes, ["y"])


CONVOLUTIONS = {
    "3 x 3 x 3": ((24, 16, 3, 3, 3), SAME, 3),
    "no pads": ((16, 16, 3, 3, 3), {}, 3),
    "no pads in depth": ((16, 16, 3, 3, 3), {"pads": [0, 1, 1, 0, 1, 1]}, 3),
    "causal in depth": ((16, 16, 2, 3, 3), {"pads": [1, 1, 1, 0, 1, 1]}, 3),
    "pads behind alone": ((16, 16, 3, 2, 2), {"pads": [0, 0, 0, 2, 2, 2]}, 2),
    "taps apart": ((16, 16, 2, 3, 3), {"pads": [1, 2, 1, 1, 2, 1], "dilations": [2, 2, 1]}, 3),
    "strides within a plane": ((16, 16, 3, 3, 3), {"pads": [1] * 6, "strides": [1, 2, 2]}, 3),
    "5 x 5 x 5": ((16, 16, 5, 5, 5), {"pads": [2] * 6}, 5),
    "two rows of taps": ((16, 16, 3, 2, 1), {"pads": [1, 0, 0, 1, 1, 0]}, 2),
    "a row of taps": ((16, 16, 3, 1, 3), {"pads": [1, 0, 1, 1, 0, 1]}, 1),
    "a plane of taps": ((16, 16, 1, 3, 3), {"pads": [0, 1, 1, 0, 1, 1], "strides": [1, 2, 1]}, 1),
    "along the depth": (
        (10, 16, 3, 1, 1),
        {"pads": [1, 0, 0, 2, 0, 0], "strides": [2, 1, 1], "dilations": [2, 1, 1]},
        1,
    ),
    "each channel by itself": ((16, 1, 3, 3, 3), {"pads": [1] * 6, "group": 16}, 3),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("w, attributes, count", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_of_volumes_is_the_sum_of_those_of_images(w, attributes, count, bias):
    model = convolution(w, attributes, bias=bias)
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
        for v in model.graph.input
    }
    after = rewritten(model)
    convolutions = [node for node in after.graph if node.op_type == "Conv"]
    assert [len(node.inputs[0].shape) for node in convolutions] == [4] * count
    assert [v.name for v in after.graph.outputs] == ["y"]
    expected = F.conv3d(
        *(F.pad(torch.from_numpy(feeds["x"]).double(), _pads_of_torch(attributes)), torch.from_numpy(feeds["w"]).double()),
        torch.from_numpy(feeds["b"]).double() if bias else None,
        attributes.get("strides", 1), 0, attributes.get("dilations", 1), attributes.get("group", 1),
    )  # fmt: skip
    (found,) = results(after, feeds)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)


def _pads_of_torch(attributes):
    pads = attributes.get("pads", [0] * 6)
    return [pads[axis + end] for axis in (2, 1, 0) for end in (0, 3)]


OTHERS = {
    "few channels": convolution((16, 3, 3, 3, 3), SAME, (2, 3, 5, 6, 7)),
    "few results": convolution((4, 16, 3, 3, 3), SAME),
    "strides in depth": convolution((16, 16, 3, 3, 3), SAME | {"strides": [2, 2, 2]}),
    "a tap": convolution((16, 16, 1, 1, 1), {}),
    "mostly rows that nobody reads": convolution((16, 16, 3, 3, 3), SAME, (2, 16, 5, 1, 7)),
    "an image": convolution((16, 16, 3, 3), {}, (2, 16, 6, 7)),
    "sizes not known": convolution((16, 16, 3, 3, 3), SAME, (2, 16, 5, "height", 7)),
    "float64": model_of([helper.make_node("Conv", ["x", "w"], ["y"])], {"x": X, "w": (16, 16, 3, 3, 3)}, ["y"], TensorProto.DOUBLE),
}  # fmt: skip


@pytest.mark.parametrize("model", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_as_they_are(model):
    assert operators(rewritten(model)) == [("", "Conv")]


class Volumes(nn.Module):
    """Volumes [n, 1, 6, 8, 8] -> scores of each place [n, 3, 6, 8, 8]: a small U-Net, one that looks back in depth, a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv3d(1, 16, 3, padding=1), nn.BatchNorm3d(16)
        self.down, self.inner = nn.Conv3d(16, 32, 3, 2, 1), nn.Conv3d(32, 32, 3, padding=1, bias=False)
        self.up, self.join = nn.ConvTranspose3d(32, 16, 2, 2), nn.Conv3d(32, 16, 3, padding=1)
        self.plane, self.depth = nn.Conv3d(16, 16, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(16, 16, (3, 1, 1))
        self.head = nn.Conv3d(16, 3, 1)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = F.leaky_relu(self.inner(F.gelu(self.down(x))))
        y = F.relu(self.join(torch.cat([self.up(y), x], 1)))
        return self.head(y + self.depth(F.pad(self.plane(y), (0, 0, 0, 0, 2, 0))))


@pytest.mark.parametrize(
    "size, settings", in_turn([4, "n"], [{}, {"native_kernels": True}, {"disabled_passes": ("VolumesAsImagesPass",)}])
)
def test_volumes_train_as_in_pytorch(size, settings, monkeypatch):
    module = Volumes()
    reference, opened = copy.deepcopy(module), sessions_opened(monkeypatch)
    inputs = [
        IODescription("x", [size, 1, 6, 8, 8], torch.float32),
        IODescription("label", [size, 6, 8, 8], torch.int64),
    ]
    outputs = [IODescription("loss", [], torch.float32), IODescription("scores", [size, 3, 6, 8, 8], torch.float32)]
    choice = OptimizerChoice("SGDOptimizer")
    engine = Engine(module, F.cross_entropy, ModelDescription(inputs, outputs), choice, Settings(**settings))
    optimizer = torch.optim.SGD(reference.parameters(), 0.05)
    for step in range(4):
        rows = 4 if size == 4 else 4 - step % 2
        x, label = torch.randn(rows, 1, 6, 8, 8), torch.randint(0, 3, (rows, 6, 8, 8))
        expected = F.cross_entropy(reference(x), label)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        found = engine.train_step({"x": x, "label": label}, 0.05)[0][0]
        torch.testing.assert_close(found.reshape(()), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert ("volumes/" in str(opened[-1].graph)) == (not settings.get("disabled_passes"))


@needs_blocks
def test_what_is_added_up_stays_in_blocks(monkeypatch):
    opened = sessions_opened(monkeypatch)
    module = nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 4 * 8 * 8, 1))
    inputs = [IODescription("x", [2, 16, 4, 8, 8], torch.float32), IODescription("label", [2, 1], torch.float32)]
    outputs = [IODescription("loss", [], torch.float32), IODescription("y", [2, 1], torch.float32)]
    engine = Engine(module, F.mse_loss, ModelDescription(inputs, outputs), OptimizerChoice("SGDOptimizer"), Settings())
    engine.train_step({"x": torch.randn(2, 16, 4, 8, 8), "label": torch.randn(2, 1)}, 0.01)
    convolutions = [node for node in opened[-1].graph.node if node.op_type == "Conv" and node.domain]
    assert [len(node.input) for node in convolutions] == [3, 4, 4]  # each adds to what the one before has made
