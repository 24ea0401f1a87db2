"""Which tensors of an ONNX model are its weights, in the forms that old exporters and others write."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from bad_input import raises
from small import LR

from orttrainer import IODescription, ModelDescription, ORTTrainer, build_gradient
from orttrainer.errors import GradientError, ModelError

LOSS = "s = Mul (r, r) loss = ReduceMean <keepdims = 0> (s)"
WEIGHT = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)


def model(body: str, x: str, opset: int, **initializers) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[rows, {x}] x) => (float loss) {{ {body} {LOSS} }}'
    )
    for name, value in initializers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    return proto


def make(proto: onnx.ModelProto, *sizes: int) -> ORTTrainer:
    desc = ModelDescription([IODescription("x", ["rows", *sizes], torch.float32)], [IODescription("loss", [])])
    return ORTTrainer(proto, None, desc, "SGDOptimizer", None, IODescription("rate", [1]), "cpu")


def assert_trains_like(proto, predict, batches, **weights):
    """`predict(x, **weights)` is the twin in PyTorch; the loss is the mean of the squares."""
    trainer = make(proto, *batches[0].shape[1:])
    assert trainer.state_dict().keys() == weights.keys()
    twins = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    optimizer = torch.optim.SGD(twins.values(), LR.item())
    for x in batches:
        loss = predict(x, **twins).square().mean()
        torch.testing.assert_close(trainer.train_step(x, LR), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, twin in twins.items():
        torch.testing.assert_close(trainer.state_dict()[name], twin.detach())


# -- Images resized by scales that are initializers -----------------------------------------------


def images() -> list[torch.Tensor]:
    return [torch.randn(2 + step, 2, 4, 4, generator=torch.Generator().manual_seed(step)) for step in range(3)]


def resized(opset: int, mode: str, scales=(1, 1, 2, 2)) -> onnx.ModelProto:
    operator, roi = ("Upsample" if opset == 9 else "Resize"), ({"roi": []} if opset > 10 else {})
    call = f'{operator} <mode = "{mode}"> ({", ".join(["h", *roi, "scales"])})'
    return model(f"h = Mul (x, W) r = {call}", "2, 4, 4", opset, W=WEIGHT, scales=scales, **roi)


def from_the_corner(size: int) -> torch.Tensor:
    """Twice as many pixels: each, and the middle between it and the next."""
    matrix = torch.zeros(2 * size, size)
    for i in range(2 * size):
        matrix[i, i // 2] += 0.5
        matrix[i, min((i + 1) // 2, size - 1)] += 0.5
    return matrix


@pytest.mark.parametrize("opset", [11, 17, 18, 21])
def test_scales_and_an_empty_roi_are_no_weights(opset):
    def twin(x, W):
        return F.interpolate(x * W, scale_factor=2, mode="bilinear")

    assert_trains_like(resized(opset, "linear"), twin, images(), W=WEIGHT)


@pytest.mark.parametrize("opset", [9, 10])
def test_images_of_old_opsets_are_resized_from_the_corner(opset):
    """ONNX's converter lets them be resized from the middle of the pixels."""
    matrix = from_the_corner(4)

    def twin(x, W):
        return matrix @ (x * W) @ matrix.T

    assert_trains_like(resized(opset, "linear"), twin, images(), W=WEIGHT)


@pytest.mark.parametrize("scale, pixels", [(1.6, [0, 0, 1, 1, 2, 3]), (0.6, [0, 2])])  # the place / scale, down; up
def test_nearest_pixels_of_opset_10_are_those_that_onnx_runtime_took(scale, pixels):
    def twin(x, W):
        return (x * W)[:, :, pixels][:, :, :, pixels]

    assert_trains_like(resized(10, "nearest", (1, 1, scale, scale)), twin, images(), W=WEIGHT)


def test_nearest_pixels_of_opset_10_that_no_newer_one_takes_are_refused():
    with raises(ModelError, "of which some are below 1 and some above...export the model with opset 11 or later"):
        make(resized(10, "nearest", (1, 1, 0.5, 2)), 2, 4, 4)


def test_a_gradient_is_not_by_scales_unless_they_are_named():
    (_, gradient) = build_gradient(resized(13, "linear")).graph.output
    assert gradient.name == "W_grad"


def test_a_gradient_by_scales_that_are_numbers_as_well_is_refused():
    body = "h = Mul (x, W) t = Resize (h, , V) k = ReduceSum <keepdims = 0> (V) r = Mul (t, k)"
    with raises(GradientError, "no gradient of 'Resize' node 'Resize_1' by its scales ('V')"):
        make(model(body, "2, 4, 4", 18, W=WEIGHT, V=[1, 1, 1, 1]), 2, 4, 4)
