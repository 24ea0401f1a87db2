"""Softmax over an axis that others lie behind, in operators that go over whole images, and learned slopes by a choice."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from torch import nn

from orttrainer.graph.passes.speed.prelu import PReluPass
from orttrainer.graph.passes.speed.softmax import SoftmaxAcrossPass
from orttrainer.graph.passes.speed.softplus import SoftplusPass

INF = float("inf")


def model(body: str, shape: str, dtype="float", more="") -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["" : 18]> g ({dtype}[{shape}] x{more}) => ({dtype}[{shape}] y) {{ {body} }}'
    return ir.from_onnx_text(text)


def operators(changed: ir.Model) -> set[str]:
    return {node.op_type for node in changed.graph}


def run(changed: ir.Model, **feeds):
    session = onnxruntime.InferenceSession(ir.to_proto(changed).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize("shape, axis", [("N,5,8,8", 1), ("2,5,64", -2), ("5,64", 0), ("2,A,3,4,8", 1), ("N,5,H,W", 1)])
def test_over_classes_of_pixels_it_is_what_pytorch_gives(operator, dtype, shape, axis):
    changed = model(f"y = {operator} <axis = {axis}> (x)", shape, dtype)
    assert SoftmaxAcrossPass()(changed).modified and operator not in operators(changed)
    x = 30 * torch.randn([{"N": 2, "A": 3, "H": 4, "W": 5}.get(n) or int(n) for n in shape.split(",")]).to(
        getattr(torch, dtype)
    )
    x.flatten()[::7] = -INF
    expected = (torch.softmax if operator == "Softmax" else torch.log_softmax)(x, axis)
    torch.testing.assert_close(torch.from_numpy(run(changed, x=x.numpy())), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator, big", [("Softmax", 1e38), ("LogSoftmax", 1e38), ("Softmax", INF)])
def test_the_largest_numbers_and_nan_are_as_in_pytorch(operator, big):
    changed = model(f"y = {operator} <axis = 0> (x)", "3,64")
    SoftmaxAcrossPass()(changed)
    x = torch.zeros(3, 64)
    x[1, 0], x[:, 1], x[2, 2] = big, -INF, torch.nan
    expected = (torch.softmax if operator == "Softmax" else torch.log_softmax)(x, 0)
    torch.testing.assert_close(torch.from_numpy(run(changed, x=x.numpy())), expected, equal_nan=True)


@pytest.mark.parametrize("shape, axis, dtype", [
    ("4,64", -1, "float"), ("4,64,8", 1, "float"), ("4,5,T", 1, "float"), ("4,5,64", 1, "float16"),
])  # fmt: skip
def test_short_rows_the_last_axis_and_half_precision_stay(shape, axis, dtype):
    assert not SoftmaxAcrossPass()(model(f"y = Softmax <axis = {axis}> (x)", shape, dtype)).modified


class Pixels(nn.Module):
    """Classes of pixels: the loss that PyTorch has for these, and the mean of one class's probability."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3, padding=1)
        self.register_buffer("labels", torch.randint(0, 5, (9, 8, 8)))

    def forward(self, x):
        y = self.layer(x)
        return nn.functional.cross_entropy(y, self.labels[: len(x)]) + y.softmax(1)[:, 1].mean()


@pytest.mark.parametrize("operator", ["LogSoftmax", "Softmax"])
def test_a_segmentation_trains_as_in_pytorch_with_and_without(operator):
    assert_trains_with_and_without("SoftmaxAcrossPass", Pixels, [3, 8, 8], replaces=operator)


@pytest.mark.parametrize("slope", [[0.25], [0.25, -0.5, 2.0, 0.0]])
@pytest.mark.parametrize("dtype", ["float", "double"])
def test_learned_slopes_are_those_of_pytorch(slope, dtype):
    changed = model("y = PRelu (x, s)", "2,4,3", dtype, f", {dtype}[{len(slope)},1] s")
    assert PReluPass()(changed).modified and "PRelu" not in operators(changed)
    x = torch.randn(2, 4, 3).to(getattr(torch, dtype))
    x[0, 0], x[1, :, 2] = torch.tensor([INF, -INF, torch.nan]), -0.0
    slope = torch.tensor(slope, dtype=x.dtype)
    found = torch.from_numpy(run(changed, x=x.numpy(), s=slope[:, None].numpy()))
    torch.testing.assert_close(found, nn.functional.prelu(x, slope), rtol=0, atol=0, equal_nan=True)


def test_a_model_of_learned_slopes_trains_as_in_pytorch_with_and_without():
    def made():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Conv2d(4, 5, 3), nn.PReLU(5), Mean())

    assert_trains_with_and_without("PReluPass", made, [3, 8, 8], replaces="PRelu")


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.mark.parametrize("operator", ["Softplus", "Mish"])
def test_softplus_and_mish_keep_all_digits(operator):
    """Of numbers far below zero, too, where 1 + exp(x) has rounded exp(x) off."""
    changed = model(f"y = {operator} (x)", "N")
    assert SoftplusPass()(changed).modified and operator not in operators(changed)
    x = torch.cat([torch.linspace(-80, 80, 20001), torch.tensor([0.0, -0.0, 3e38, -3e38, INF, -INF, torch.nan])])
    x = x[torch.isfinite(x)] if operator == "Mish" else x  # PyTorch's own is NaN at -inf
    expected = getattr(nn.functional, operator.lower())(x.double())
    torch.testing.assert_close(
        torch.from_numpy(run(changed, x=x.numpy())).double(), expected, rtol=1e-6, atol=0, equal_nan=True
    )


class Binary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Mish(), nn.Linear(9, 1), nn.Softplus())

    def forward(self, x):
        return nn.functional.binary_cross_entropy_with_logits(self.layers(x), x[:, :1].sigmoid())


@pytest.mark.parametrize("operator", ["Softplus", "Mish"])
def test_a_binary_classifier_trains_as_in_pytorch_with_and_without(operator):
    assert_trains_with_and_without("SoftplusPass", Binary, [6], replaces=operator)
