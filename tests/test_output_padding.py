"""Transposed convolutions whose output_padding is their stride or more, which ONNX Runtime refuses, train as in PyTorch."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn.functional as F
from fidelity import assert_trains_as_in_pytorch, described
from small import make
from torch import nn

LAYERS = {  # the layer, the sizes of its images
    "a line": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, dilation=3, output_padding=2, padding=1), [6]),
    "a plane": (lambda: nn.ConvTranspose2d(3, 4, 3, dilation=2, output_padding=1), [5, 4]),
    "pads and groups": (
        lambda: nn.ConvTranspose2d(
            3, 6, 3, (1, 2), padding=(1, 2), output_padding=(2, 1), dilation=(3, 1), groups=3, bias=False
        ),
        [5, 5],
    ),
    "a volume": (lambda: nn.ConvTranspose3d(3, 2, 2, dilation=2, output_padding=(1, 0, 1), padding=1), [3, 4, 3]),
}


@pytest.mark.parametrize("layer, sizes", LAYERS.values(), ids=LAYERS)
def test_they_train_as_in_pytorch(layer, sizes):
    def batch(step):
        return [torch.randn(2 + step, 3, *sizes, generator=torch.Generator().manual_seed(step))]

    assert_trains_as_in_pytorch(layer, batch, evaluates=True)


def test_they_train_in_an_onnx_model():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (float[n, 1, 4] x0) => (float loss, float[n, 1, 9] y) <float[1, 1, 2] w = {0.5, 0.25}, float[1] b = {0.125}> {
            y = ConvTranspose <dilations = [3], strides = [1], output_padding = [2]> (x0, w, b)
            loss = ReduceSum <keepdims = 0> (y)
        }""")
    x, w, b = torch.randn(3, 1, 4), torch.tensor([[[0.5, 0.25]]]), torch.tensor([0.125])
    trainer = make(model, loss_fn=None, desc=described([x]))
    for _ in range(2):
        found = trainer.train_step(x, 0.125)[1]
        torch.testing.assert_close(found, F.conv_transpose1d(x, w, b, dilation=3, output_padding=2))
        w, b = w - 0.125 * x.sum(), b - 0.125 * found.numel()
