"""Sums along long rows are those of PyTorch, which adds numbers of float32 up in float64; of transforms: `test_passes_fourier.py`."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from small import make
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.graph.passes.wide import WidePass


class Phases(nn.Module):
    """An oscillator: the sine of all frequencies up to each moment."""

    def __init__(self):
        super().__init__()
        self.pitch = nn.Parameter(torch.tensor(0.15))

    def forward(self, x):
        phases = torch.cumsum(self.pitch * (1 + x), -1)
        return (phases.sin() * x).sum(), phases


@pytest.mark.parametrize("length", ["length", 200_000])
def test_phases_of_a_long_signal_are_those_of_pytorch(length):
    module = Phases()
    reference = copy.deepcopy(module)
    desc = ModelDescription(
        [IODescription("x", [2, length], torch.float32)], [IODescription("loss", []), IODescription("phases", [])]
    )
    trainer = make(module, loss_fn=None, desc=desc)
    x = 0.3 * torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
    loss, phases = reference(x)
    loss.backward()
    rate = 1e-3 / reference.pitch.grad.abs().item()
    found = trainer.train_step(x, torch.tensor([rate]))
    torch.testing.assert_close(found[1], phases.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-5, atol=1e-2)
    change = module.pitch.detach() - 0.15
    torch.testing.assert_close(change, -rate * reference.pitch.grad, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "size"), [(np.float32, 1024), (np.float64, 5000), (np.int64, 5000)])
def test_other_sums_stay_as_they_are(dtype, size):
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [helper.make_node("CumSum", ["x", "axis"], ["y"])], "g",
        [helper.make_tensor_value_info("x", element, [5000, size])],
        [helper.make_tensor_value_info("y", element, [5000, size])],
        [helper.make_tensor("axis", TensorProto.INT64, [], [1])],
    )  # fmt: skip
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    assert not WidePass()(model).modified
