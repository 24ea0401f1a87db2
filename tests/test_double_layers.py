"""Layers of float64 that ONNX Runtime has in float32 only train as in PyTorch, to the last digits."""

from __future__ import annotations

import copy

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from marks import usual
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription

LINE, IMAGE, VOLUME = (4, 60), (4, 6, 10), (2, 4, 5, 6)  # channels first, 240 numbers each
GRID = torch.rand(5, 7, 2, generator=torch.Generator().manual_seed(0)).double() * 2.4 - 1.2
GRID_3D = torch.rand(3, 4, 2, 3, generator=torch.Generator().manual_seed(0)).double() * 2.4 - 1.2


def interpolated(**options):
    return lambda x: F.interpolate(x, **options)


def sampled(grid, **options):
    return lambda x: F.grid_sample(x, (grid + 0.0 * x.mean()).expand(x.shape[0], *grid.shape), **options)


LAYERS = {
    "conv1d": (nn.Conv1d(4, 3, 3, padding=1), LINE),
    "conv1d, strides": (nn.Conv1d(4, 6, 4, stride=3, dilation=2, padding=2, groups=2), LINE),
    "conv1d, many taps": (nn.Conv1d(4, 3, 40, stride=2, padding=5), LINE),
    "conv2d": (nn.Conv2d(4, 3, 3), IMAGE),
    "conv2d, strides": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), dilation=(1, 2), padding=(2, 1), groups=2), IMAGE),
    "conv2d, pointwise": (nn.Conv2d(4, 3, 1, stride=2, bias=False), IMAGE),
    "conv2d, depthwise": (nn.Conv2d(4, 8, 3, padding=1, groups=4), IMAGE),
    "conv2d, same": (nn.Conv2d(4, 3, (3, 5), padding="same"), IMAGE),
    "conv2d, reflect": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv3d": (nn.Conv3d(2, 3, (3, 2, 3), stride=(1, 2, 2), padding=(1, 0, 1)), VOLUME),
    "transposed 1d": (nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1), LINE),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, groups=2), IMAGE),
    "transposed 2d, dilated": (nn.ConvTranspose2d(4, 3, 3, stride=(3, 1), dilation=(2, 3), bias=False), IMAGE),
    "transposed 2d, gaps": (nn.ConvTranspose2d(4, 3, 2, stride=3, output_padding=2), IMAGE),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, stride=2), VOLUME),
    "average 1d": (nn.AvgPool1d(3, 2, 1), LINE),
    "average 2d": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    "average 2d, without pads": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "average 2d, tiles": (nn.AvgPool2d(2), IMAGE),
    "average 2d, divisor": (nn.AvgPool2d(2, 1, divisor_override=3), IMAGE),
    "average 3d": (nn.AvgPool3d(2, 1, 1, count_include_pad=False), VOLUME),
    "maximum 2d": (nn.MaxPool2d(2), IMAGE),
    "maximum 3d": (nn.MaxPool3d(3, 2, 1), VOLUME),
    "adaptive average": (nn.AdaptiveAvgPool2d((4, 3)), IMAGE),
    "adaptive average of all": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive maximum": (nn.AdaptiveMaxPool2d((4, 3)), IMAGE),
    "powers": (nn.LPPool2d(2, 2), IMAGE),
    "response norm": (nn.LocalResponseNorm(3), IMAGE),
    "nearest": (interpolated(scale_factor=2), IMAGE),
    "nearest, by size": (interpolated(size=(5, 13)), IMAGE),
    "nearest 3d": (interpolated(scale_factor=2), VOLUME),
    "linear": (interpolated(scale_factor=1.3, mode="linear"), LINE),
    "bilinear": (interpolated(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear, by factor": (interpolated(scale_factor=1.3, mode="bilinear"), IMAGE),
    "bilinear, by size": (interpolated(size=(5, 13), mode="bilinear"), IMAGE),
    "bilinear, corners": (interpolated(size=(5, 13), mode="bilinear", align_corners=True), IMAGE),
    "bilinear, antialias": (interpolated(size=(4, 7), mode="bilinear", antialias=True), IMAGE),
    "bicubic": (interpolated(scale_factor=1.3, mode="bicubic"), IMAGE),
    "trilinear": (interpolated(scale_factor=2, mode="trilinear"), VOLUME),
    "trilinear, by factor": (interpolated(scale_factor=1.7, mode="trilinear"), VOLUME),
    "area": (interpolated(size=(3, 4), mode="area"), IMAGE),
    "sampled": (sampled(GRID, align_corners=False), IMAGE),
    "sampled, border": (sampled(GRID, padding_mode="border", align_corners=True), IMAGE),
    "sampled, reflection": (sampled(GRID, mode="bicubic", padding_mode="reflection", align_corners=False), IMAGE),
    "sampled, nearest": (sampled(GRID, mode="nearest", align_corners=False), IMAGE),
    "sampled 3d": (sampled(GRID_3D, align_corners=False), VOLUME),
    "by a grid": (lambda g: F.grid_sample(IMAGES.expand(g.shape[0], -1, -1, -1), g, align_corners=False), (8, 15, 2)),
    "folded": (nn.Fold((9, 3), (2, 3), dilation=(2, 1), padding=1, stride=2), (24, 10)),
    "unfolded": (nn.Unfold(3, stride=2, padding=1), IMAGE),
    "determinants": (torch.det, (15, 4, 4)),
    "small determinants": (lambda x: torch.linalg.det(x[:, :234].reshape(-1, 26, 3, 3)), (240,)),
    "normalized": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.Mish()), IMAGE),
}  # fmt: skip
PARTS = 6  # of them, each a module: one of all takes twice as long
IMAGES = torch.arange(40.0).double().reshape(1, 2, 4, 5).sin()


class Layers(nn.Module):
    """Of each of these layers the loss of its output; and all these outputs."""

    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        layers = {name: LAYERS[name][0] for name in names}
        self.layers = nn.ModuleDict({n: copy.deepcopy(f) for n, f in layers.items() if isinstance(f, nn.Module)})
        self.shifts = nn.ParameterDict({n: torch.zeros(LAYERS[n][1]) for n in names})
        self.double()

    def forward(self, x):
        outputs, layers = {}, dict(self.layers)
        for name in self.shifts:
            function, shape = LAYERS[name]
            outputs[name] = layers.get(name, function)(x.reshape(x.shape[0], *shape) + self.shifts[name])
        total = sum(y.sin().mean() + y.square().mean() for y in outputs.values())
        return total, torch.cat([y.flatten(1) for y in outputs.values()], 1)


@pytest.mark.parametrize("part", usual(range(PARTS), *range(0, PARTS, 2)))
def test_layers_train_as_in_pytorch(part):
    module = Layers([*LAYERS][part::PARTS])
    reference = copy.deepcopy(module)
    desc = ModelDescription(
        [IODescription("x", ["batch", 240], torch.float64)], [IODescription("loss", []), IODescription("y", [])]
    )
    trainer = make(module, loss_fn=None, desc=desc)
    for step, batch in enumerate((3, 3, 2)):
        x = torch.randn(batch, 240, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) / 2
        loss, y = reference(x)
        reference.zero_grad()
        loss.backward()
        found = trainer.train_step(x, 0.125)
        torch.testing.assert_close(found[0], loss.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(found[1], y.detach(), rtol=1e-12, atol=1e-13)
        for name, parameter in reference.named_parameters():
            parameter.data.sub_(0.125 * parameter.grad)
            torch.testing.assert_close(
                module.get_parameter(name),
                parameter.data,
                rtol=1e-12,
                atol=1e-13,
                msg=lambda text, n=name: f"{n}: {text}",
            )


class OfAnySize(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1)
        self.depthwise = nn.Conv2d(2, 2, 5, padding="same", groups=2)

    def forward(self, x):
        y = F.avg_pool2d(self.up(self.down(x).tanh()), 3, 2, 1, ceil_mode=True, count_include_pad=False)
        folded = F.fold(F.unfold(y, 3, padding=1), y.shape[-2:], 3, padding=1)
        y = F.interpolate(self.depthwise(y), scale_factor=2, mode="bilinear") + F.interpolate(folded, scale_factor=2)
        small = [F.interpolate(y, size=(3, 2), mode=mode, antialias=True) for mode in ("bilinear", "bicubic")]
        large = F.interpolate(y, scale_factor=2, mode="bicubic")
        return y.square().mean() + sum(z.sin().mean() for z in (F.adaptive_avg_pool2d(y, 1), *small, large)), y


@pytest.mark.slow
def test_images_of_any_size_train_as_in_pytorch():
    torch.manual_seed(0)
    module = OfAnySize().double()
    reference = copy.deepcopy(module)
    sides = [IODescription("x", ["batch", 2, "height", "width"], torch.float64)]
    desc = ModelDescription(sides, [IODescription("loss", []), IODescription("y", ["batch", 2, "rows", "columns"])])
    trainer = make(module, loss_fn=None, desc=desc)
    for size in ((3, 2, 8, 12), (1, 2, 10, 6), (2, 2, 16, 8)):
        x = torch.randn(size, dtype=torch.float64)
        loss, y = reference(x)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        found = trainer.train_step(x, 0.125)
        torch.testing.assert_close(list(found), [loss.detach(), y.detach()], rtol=1e-12, atol=1e-14)
        for parameter, gradient in zip(reference.parameters(), gradients):
            parameter.data.sub_(0.125 * gradient)
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_activations_are_exact_far_from_0(opset):
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            x = x + self.shift
            plain = [F.softplus, F.logsigmoid, torch.sigmoid, F.mish, F.silu, F.softsign, F.elu, F.selu, F.hardswish]
            found = [f(x) for f in plain] + [F.leaky_relu(x, 0.25), F.threshold(x, 1.5, 0.0), F.hardsigmoid(x)]
            return sum(y.sum() for y in found), torch.stack(found)

    x = torch.cat([torch.linspace(-60, 60, 97), torch.tensor([-700.0, 700.0, -1e-9, 1e-9])]).double()
    module, ours = Activations(), Activations()
    desc = ModelDescription(
        [IODescription("x", ["n"], torch.float64)], [IODescription("loss", []), IODescription("y", [12, "n"])]
    )
    trainer = make(ours, loss_fn=None, desc=desc, _opset_version=opset)
    loss, y = module(x)
    loss.backward()
    torch.testing.assert_close(trainer.train_step(x, 1.0)[1], y.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(
        ours.shift, -module.shift.grad, rtol=1e-8, atol=0
    )  # of hardsigmoid it has 1 / 6 in float32


def _scaled(x):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 0.1)


FUSED = {
    "layer norm": lambda x: _scaled(x - x.mean(-1, keepdim=True)),
    "root mean square": _scaled,  # of which ONNX Runtime (1.31.1) takes 1e-5 for the epsilon, whatever it is
    "clipped ReLU": lambda x: torch.relu(x).clamp(0.1, 0.9),  # of which it wants bounds of float32
    "sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "scores": lambda x: torch.softmax(x @ x.mT * 0.37, -1) @ x,
}


@pytest.mark.parametrize("function", FUSED.values(), ids=FUSED)
def test_what_an_evaluation_fuses_computes_the_same(function, tmp_path):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))

        def forward(self, x):
            y = function(self.linear(x)) * self.scale
            return y.square().mean(), y

    torch.manual_seed(0)
    module, x = Layer().double(), torch.randn(5, 6, dtype=torch.float64)
    described = ModelDescription(
        [IODescription("x", ["n", 6], torch.float64)], [IODescription("loss", []), IODescription("y", ["n", 6])]
    )
    trainer = make(module, loss_fn=None, desc=described)
    trainer.train_step(x, 0.25)
    expected = [y.detach() for y in module(x)]
    torch.testing.assert_close(list(trainer.eval_step(x)), expected, rtol=1e-13, atol=1e-15)
    trainer.export_inference(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["y"], {"x": x.numpy()})  # with all its optimizations
    torch.testing.assert_close(torch.from_numpy(found), expected[1], rtol=1e-7, atol=1e-7)  # of scales it makes float32
