"""What is cut off the images of a convolution is none that it makes: the same numbers, and causal ones train as in PyTorch."""

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from in_step import check_equal, step
from onnx import helper
from test_passes_nchwc import model_of, operators, results, sessions_opened
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription
from orttrainer.differentiate.prepare import prepare
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.graph.passes.speed.crops import CropIntoPadsPass

END = 2**63 - 1


def cropped(op_type, w, attributes, starts, ends, axes, steps=None, images=("height", "width")):
    """A Slice of a convolution of x [2, 3, 9, 11], declared with `images`, and how large its inputs are."""
    numbers = {"starts": starts, "ends": ends, "axes": axes} | ({} if steps is None else {"steps": steps})
    constants = [
        helper.make_node("Constant", [], [name], value_ints=list(values)) for name, values in numbers.items() if values
    ]
    nodes = [
        helper.make_node(op_type, ["x", "w"], ["whole"], **attributes),
        *constants,
        helper.make_node("Slice", ["whole", *(name if values else "" for name, values in numbers.items())], ["y"]),
    ]
    return model_of(nodes, {"x": ("n", 3, *images), "w": w}, ["y"]), {"x": (2, 3, 9, 11), "w": w}


def rewritten(model, op_type):
    found = prepare(ir.from_proto(model))
    return found, CropIntoPadsPass(op_type)(found).modified


UP, DOWN = (3, 4, 3, 3), (4, 3, 3, 3)
CROPS = {
    "before": ("ConvTranspose", UP, {}, [2], [END], [2]),
    "behind": ("ConvTranspose", UP, {}, [0], [-2], [3]),
    "along both axes": ("ConvTranspose", UP, {"dilations": [2, 1]}, [4, 1], [END, -1], [2, 3]),
    "axes from the last": ("ConvTranspose", UP, {}, [1, 2], [-1, END], [-2, -1]),
    "up to a place": ("ConvTranspose", UP, {}, [1], [10], [2], None, (9, 11)),
    "all axes": ("ConvTranspose", UP, {}, [0, 0, 1, 0], [END, END, END, -1], []),
    "some pads": ("ConvTranspose", UP, {"pads": [1, 0, 0, 1]}, [1], [END], [2]),
    "strides": ("ConvTranspose", UP, {"strides": [2, 3], "output_padding": [1, 2]}, [1, 2], [END, -1], [2, 3]),
    "groups": ("ConvTranspose", (3, 1, 3, 3), {"group": 3}, [2], [END], [2]),
    "of a Conv": ("Conv", DOWN, {"pads": [2, 2, 2, 2]}, [0, 0], [-2, -2], [2, 3]),
    "of a Conv, before": ("Conv", DOWN, {"pads": [2, 2, 0, 0], "dilations": [2, 2]}, [1], [END], [3], None, (9, 11)),
}


@pytest.mark.parametrize("name", CROPS)
def test_what_is_cut_is_not_made(name):
    op_type = CROPS[name][0]
    model, sizes = cropped(*CROPS[name])
    after, modified = rewritten(model, op_type)
    assert modified and ("", "Slice") not in operators(after)
    rng = np.random.default_rng(0)
    feeds = {key: rng.standard_normal(size, np.float32) for key, size in sizes.items()}
    (expected,), (found,) = results(model, feeds), results(after, feeds)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


OTHERS = {
    "with steps": ("ConvTranspose", UP, {}, [0], [END], [2], [2]),
    "backwards": ("ConvTranspose", UP, {}, [-1], [-END], [2], [-1]),
    "from the end": ("ConvTranspose", UP, {}, [-3], [END], [2]),
    "images": ("ConvTranspose", UP, {}, [1], [END], [0]),
    "channels": ("ConvTranspose", UP, {}, [0], [2], [1]),
    "of a size that it has": ("ConvTranspose", UP, {"output_shape": [11, 13]}, [1], [END], [2]),
    "more than its pads": ("Conv", DOWN, {"pads": [1, 1, 1, 1]}, [0], [-2], [2]),
    "where it has strides": ("Conv", DOWN, {"pads": [1, 1, 1, 1], "strides": [2, 1]}, [0], [-1], [2]),
    "all that there may be": ("ConvTranspose", UP, {}, [0, 0], [-3, -3], [2, 3]),
    "all of known images": ("ConvTranspose", UP, {}, [11], [END], [2], None, (9, 11)),
    "all of a pixel": ("Conv", DOWN, {"pads": [2, 2, 0, 0]}, [1], [END], [2]),
    "with pads as they are needed": ("Conv", DOWN, {"auto_pad": "SAME_UPPER"}, [0], [-1], [2]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_slices_stay(name):
    model, _ = cropped(*OTHERS[name])
    after, modified = rewritten(model, OTHERS[name][0])
    assert not modified and ("", "Slice") in operators(after)


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_images_that_another_reads_whole_are_made(op_type):
    model, _ = cropped(op_type, DOWN if op_type == "Conv" else UP, {"pads": [1, 1, 1, 1]}, [1], [END], [2])
    model.graph.output.append(helper.make_empty_tensor_value_info("whole"))
    assert not rewritten(model, op_type)[1]


class Causal(nn.Module):
    """The loss of signals [n, 4, 40]: each place sees those before it, by zeros in front, or by an end that is cut off."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(4, 16, 3), nn.Conv1d(16, 16, 2, padding=4, dilation=4)
        self.third, self.head = nn.Conv1d(16, 16, 3, dilation=12), nn.Linear(16, 1)

    def forward(self, x, label):
        x = torch.tanh(self.first(F.pad(x, (2, 0))))
        x = x + torch.tanh(self.second(x)[:, :, :-4])
        x = x + torch.tanh(self.third(F.pad(x, (24, 0))))
        return F.mse_loss(self.head(x[:, :, -1]).squeeze(1), label)


@pytest.mark.parametrize("settings", [{}, {"disabled_passes": ("CropIntoPadsPass",)}, {"native_kernels": True}])
@pytest.mark.parametrize("size", [6, "n"])
def test_causal_convolutions_train_as_in_pytorch(size, settings, monkeypatch):
    module = Causal()
    twin = copy.deepcopy(module)
    inputs = [IODescription("x", [size, 4, 40], torch.float32), IODescription("label", [size], torch.float32)]
    description = ModelDescription(inputs, [IODescription("loss", [], torch.float32)])
    engine = Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings(**settings))
    opened = sessions_opened(monkeypatch)
    for rows in (6, 6) if size == 6 else (6, 5, 6):
        step(engine, twin, {"x": torch.randn(rows, 4, 40), "label": torch.randn(rows)}, 0.05)
    check_equal(module, twin)
    cut = {node.input[0] for node in opened[-1].graph.node if node.op_type == "Slice"}
    assert any("conv" in name for name in cut) == ("disabled_passes" in settings)
    transposed = [node for node in engine.training_graph.model.graph.node if node.op_type == "ConvTranspose"]
    pads = [list(a.ints) for node in transposed for a in node.attribute if a.name == "pads"]
    assert transposed and all(p[: len(p) // 2] == p[len(p) // 2 :] for p in pads)  # CUDA runs this graph, too
