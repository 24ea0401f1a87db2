"""What the tests of the export share: models, batches, and ways to look at a forward graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from orttrainer.describe import IODescription, ModelDescription
from orttrainer.export import module as export_stage
from orttrainer.export.faithful import MutedDropout
from orttrainer.graph.passes.gradient_marks import RemoveGradientMarksPass

RTOL = 1e-5  # float32, the same sums in another order


def describe(inputs, outputs=(("loss", ()),)):
    return ModelDescription(
        [IODescription(name, list(shape)) for name, shape in inputs],
        [IODescription(name, list(shape)) for name, shape in outputs],
    )


class Model(nn.Module):
    """A module made of parts and one function of them."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def onnx_outputs(forward, inputs):
    """Run the graph, its dropouts passing their input through; return outputs by name."""
    import onnxruntime

    model = forward.model.clone()
    RemoveGradientMarksPass()(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            assert len(node.input) == 3
            node.op_type = "Identity"
            del node.input[1:], node.output[1:]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, (tensor.numpy() for tensor in inputs))))
    return dict(zip((value.name for value in session.get_outputs()), outputs))


def without_dropout(module, call):
    """Call in train mode with dropout off, on a module that may change."""
    with MutedDropout(), torch.no_grad():
        return call(module.train())


def assert_same(forward, inputs, expected):
    got = onnx_outputs(forward, inputs)
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor.numpy(), rtol=RTOL, atol=1e-6, err_msg=name)


def op_types(forward):
    return Counter(node.op_type for node in forward.model.graph.all_nodes())


def dropout_rates(forward):
    """Rates of the dropouts that are active when the graph runs."""
    rates = []
    for node in forward.model.graph.all_nodes():
        if node.op_type == "Dropout":
            rate, active = (ir.convenience.get_const_tensor(value).numpy() for value in node.inputs[1:3])
            assert active.item() is True
            rates.append(round(rate.item(), 5))
    return sorted(rates)


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
TWO = [("x", ("batch", 6)), ("y", ("batch", 6))]
XY = describe(TWO)
SEQUENCE = describe([("x", ("batch", "seq", 6)), ("y", ("batch", "seq", 6))])
SEQUENCES = [torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))
CLASSES = torch.tensor([0, 3, 1, 1])


def without_dynamo(monkeypatch):
    """Only the TorchScript exporter works."""

    def fail(job, forget_cached=False):
        raise RuntimeError("dynamo is off")

    monkeypatch.setattr(export_stage._Job, "dynamo", fail)


class ConvNet(nn.Module):
    def __init__(self, **batch_norm):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, **batch_norm)
        self.channels = nn.Dropout2d(0.3)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(144, 5)

    def forward(self, x):
        x = self.channels(torch.tanh(self.norm(self.conv(x))))
        return self.classify(self.dropout(x).flatten(1))


IMAGE = describe([("image", ("batch", 3, 8, 8)), ("label", ("batch",))], [("loss", ()), ("logits", ("batch", 5))])
