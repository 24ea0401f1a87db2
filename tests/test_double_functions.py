"""Functions of float64 that are spelled out for an exporter have PyTorch's values and slopes, to the last digits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from marks import usual
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription

FUNCTIONS = {  # and the ends of a range
    "erfinv": (torch.erfinv, -1 + 1e-9, 1 - 1e-9),
    "ndtri": (torch.special.ndtri, 1e-9, 1 - 1e-9),
    "log_ndtr": (torch.special.log_ndtr, -30, 7),
    "erfcx": (torch.special.erfcx, -4, 30),
    "lgamma": (torch.lgamma, -6.03, 40),
    "digamma": (torch.digamma, 0.03, 40),
    "atan2": (lambda x: torch.atan2(x, x.flip(0) / 3), -6, 7),
    "angle": (lambda x: torch.atan2(torch.full_like(x, 0.1), x), -6, 7),
}
SLOPES = {"digamma": 2e-9}  # torch's own trigamma is that exact


@pytest.mark.parametrize("name", usual(FUNCTIONS, *[*FUNCTIONS][::2]))
def test_spelled_out_functions_are_exact_in_float64(name):
    class Function(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(300, dtype=torch.float64))

        def forward(self, x):
            y = function(x + self.shift)
            return y.sum(), y

    function, low, high = FUNCTIONS[name]
    x, module, ours = torch.linspace(low, high, 300, dtype=torch.float64), Function(), Function()
    desc = ModelDescription(
        [IODescription("x", [300], torch.float64)], [IODescription("loss", []), IODescription("y", [300])]
    )
    loss, y = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=desc).train_step(x, 1.0)[1]
    torch.testing.assert_close(found, y.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ours.shift, -module.shift.grad, rtol=SLOPES.get(name, 1e-12), atol=1e-14)


def recurrent(rows):
    """The last state of a layer whose weights are all 0.25."""
    h = rows.new_zeros(3)
    for row in rows:
        h = torch.tanh(0.25 * (row.sum() + h.sum())).expand(3)
    return h[None]


WRITTEN_OUT = {  # in an ONNX model whose nodes have no names, as what is written out has
    "Erf": ("e = Erf (h) y = Erf (e)", lambda h: torch.erf(torch.erf(h))),
    "Shrink": (
        "e = Shrink <lambd = 0.25> (h) y = Shrink <lambd = 0.125, bias = 0.125> (e)",
        lambda h: F.softshrink(F.hardshrink(h, 0.25), 0.125),
    ),
    "Gelu": ("e = Gelu (h) y = Gelu (e)", lambda h: F.gelu(F.gelu(h))),
    "RNN": (
        "m = Constant <value = int64[1] {1}> () s = Unsqueeze (h, m) , e = RNN <hidden_size = 3> (s, v, v) "
        ", y = RNN <hidden_size = 3> (e, v, v)",
        lambda h: recurrent(recurrent(h)),
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_functions_of_an_onnx_model_are_exact_in_float64(name):
    body, function = WRITTEN_OUT[name]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]> g (double[n, 3] x) => (double loss)
        {{ h = Mul (x, w) {body} loss = ReduceSum <keepdims = 0> (y) }}"""
    )
    for given, value in (("w", np.array([1.5, -0.5, 0.25])), ("v", np.full((1, 3, 3), 0.25))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, given))
    x, w = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3), torch.tensor([1.5, -0.5, 0.25]).double()
    desc = ModelDescription([IODescription("x", ["n", 3], torch.float64)], [IODescription("loss", [])])
    trainer = make(model, loss_fn=None, desc=desc)
    loss = function(x * w.requires_grad_()).sum()
    loss.backward()
    torch.testing.assert_close(trainer.train_step(x, 1.0), loss.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(trainer.state_dict()["w"], w.detach() - w.grad, rtol=1e-12, atol=1e-14)


TRANSFORMS = {  # of lengths that are known at run time only: no products with a matrix
    "ifft": lambda z: torch.view_as_real(torch.fft.ifft(z)),
    "ifft of real numbers": lambda z: torch.view_as_real(torch.fft.ifft(z.real).resolve_conj()),
    "irfft": torch.fft.irfft,
    "irfft, cut": lambda z: torch.fft.irfft(z, n=9),
    "irfft, padded": lambda z: torch.fft.irfft(z, n=31),
    "irfft of even length": lambda z: torch.fft.irfft(z, n=2 * z.shape[-1] - 2),
    "irfft along the first": lambda z: torch.fft.irfft(z.T, dim=0),
    "hfft": torch.fft.hfft,
    "the gradient of fft": lambda z: torch.view_as_real(torch.fft.fft(z)),
    "the gradient of rfft": lambda z: torch.view_as_real(torch.fft.rfft(z.real * z.imag)),
}


class Transformed(nn.Module):
    def __init__(self, transform):
        super().__init__()
        self.scale, self.transform = nn.Parameter(torch.tensor([1.5, -0.5], dtype=torch.float64)), transform

    def forward(self, x):
        y = self.transform(torch.complex(self.scale[0] * x, self.scale[1] * x.cos()))
        return (y * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).tanh().sum(), y


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("length", [10, 11])
def test_fourier_transforms_are_exact_in_float64(name, length):
    module, ours = Transformed(TRANSFORMS[name]), Transformed(TRANSFORMS[name])
    desc = ModelDescription(
        [IODescription("x", ["rows", "length"], torch.float64)], [IODescription("loss", []), IODescription("y", [])]
    )
    x = torch.linspace(-1, 2, 3 * length, dtype=torch.float64).reshape(3, length).sin()
    loss, y = module(x)
    loss.backward()
    found = make(ours, loss_fn=None, desc=desc).train_step(x, 1.0)[1]
    torch.testing.assert_close(found, y.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.scale, module.scale - module.scale.grad, rtol=1e-12, atol=1e-13)
