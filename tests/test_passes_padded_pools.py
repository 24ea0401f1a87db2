"""Pools of padded images: what PyTorch says, with all of ONNX Runtime's optimizations, in training and in what is exported."""

import copy

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from in_step import check_equal
from onnx import TensorProto, helper
from test_passes_nchwc import model_of
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.graph.passes.padded_pools import PaddedPoolsPass

# operator, its attributes, what is put around, in the form of F.pad: before and behind the last axis first
CASES = {
    "zeros before a maximum": ("MaxPool", {"kernel_shape": [2, 2]}, (0, 1, 0, 1), 0.0),
    "strides": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2]}, (0, 1, 1, 0), 0.0),
    "its own pads too": ("MaxPool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, (0, 1, 0, 1), 0.0),
    "-inf, as many as the kernel has": ("MaxPool", {"kernel_shape": [2, 2]}, (2, 0, 0, 2), -np.inf),
    "a mean of zeros alone": ("AveragePool", {"kernel_shape": [2, 2]}, (2, 1, 0, 0), 0.0),
    "ceil_mode": ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, (1, 1, 1, 1), 0.0),
    "ones": ("AveragePool", {"kernel_shape": [2, 2]}, (1, 0, 1, 0), 1.0),
    "the lowest number around a convolution": ("Conv", {"group": 3}, (1, 0, 1, 0), np.finfo(np.float32).min),
}


def pooled(op_type, attributes, x):
    if op_type == "Conv":
        return F.conv2d(x, torch.ones(3, 1, 1, 1, dtype=x.dtype), groups=3)
    pads = attributes.get("pads", [0, 0])[:2]
    pool = F.max_pool2d if op_type == "MaxPool" else F.avg_pool2d
    return pool(
        x, attributes["kernel_shape"], attributes.get("strides", 1), pads, ceil_mode=bool(attributes.get("ceil_mode"))
    )


@pytest.mark.parametrize("op_type, attributes, around, value", CASES.values(), ids=CASES)
def test_a_pool_of_padded_images_is_that_of_pytorch(op_type, attributes, around, value):
    left, right, top, bottom = around
    nodes = [
        helper.make_node("Constant", [], ["pads"], value_ints=[0, 0, top, left, 0, 0, bottom, right]),
        helper.make_node("Constant", [], ["value"], value_float=value),
        helper.make_node(
            "Constant", [], ["w"], value=helper.make_tensor("w", TensorProto.FLOAT, [3, 1, 1, 1], [1, 1, 1])
        ),
        helper.make_node("Pad", ["x", "pads", "value"], ["p"]),
        helper.make_node(op_type, ["p", *(["w"] if op_type == "Conv" else [])], ["y"], **attributes),
    ]
    model = ir.from_proto(model_of(nodes, {"x": (2, 3, 7, 8)}, ["y"]))
    assert PaddedPoolsPass()(model).modified
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 8), np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = pooled(op_type, attributes, F.pad(torch.from_numpy(x), around, value=value))
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected.numpy(), rtol=1e-6, atol=1e-6)


def test_zeros_around_a_convolution_are_still_taken_in():
    nodes = [
        helper.make_node("Constant", [], ["pads"], value_ints=[0, 0, 1, 1, 0, 0, 1, 1]),
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["y"]),
    ]
    model = ir.from_proto(model_of(nodes, {"x": (2, 3, 7, 8), "w": (4, 3, 3, 3)}, ["y"]))
    assert not PaddedPoolsPass()(model).modified


class Padded(nn.Module):
    """Images of both signs in zeros before a maximum, as in small detectors; and a mean of a part, whose gradient is padded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.pad(F.leaky_relu(self.first(x), 0.1) - 1, (0, 1, 0, 1)), 2, 1)
        x = F.avg_pool2d(torch.tanh(self.second(x))[:, :, 3:, 2:-2], 2, 1)
        x = F.avg_pool2d(F.pad(x, (2, 1, 2, 1)), 2, 2, ceil_mode=True)
        return self.head(x.mean((2, 3)))


def test_a_network_with_such_pools_trains_as_in_pytorch_and_is_exported(tmp_path):
    module = Padded()
    twin = copy.deepcopy(module)
    description = ModelDescription(
        [IODescription("x", ["n", 3, 16, 17], torch.float32), IODescription("label", ["n"], torch.int64)],
        [IODescription("loss", [], torch.float32), IODescription("scores", ["n", 3], torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(module, F.cross_entropy, description, "SGDOptimizer", None, rate, "cpu")
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(3):
        x, label = torch.randn(4, 3, 16, 17), torch.randint(0, 3, (4,))
        expected = F.cross_entropy(twin(x), label)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        loss, _ = trainer.train_step(x, label, torch.tensor([0.1]))
        torch.testing.assert_close(loss.reshape(()), expected.detach(), rtol=1e-5, atol=1e-6)
    check_equal(module, twin)
    trainer.export_inference(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(found, twin(x).detach().numpy(), rtol=1e-4, atol=1e-5)
