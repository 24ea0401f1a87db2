"""Normalizations over many numbers are as near to float64 as PyTorch's."""

from __future__ import annotations

import copy

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import orttrainer
from orttrainer.graph.passes.long_norms import LongBatchNormsPass, LongNormsPass
from orttrainer.graph.passes.long_sums import LongSumsPass

# inputs, node, shape of x, axes of the moments, opset
NORMS = {
    "layers": ("float[2, 1048576] x, float[1048576] s, float[1048576] b", "LayerNormalization <axis = 1>", (2, 2**20), (1,), 18),
    "layers without bias": ("float[2, 4, 262144] x, float[4, 262144] s", "LayerNormalization <axis = -2>", (2, 4, 2**18), (1, 2), 18),
    "instances": ("float[N, 2, H, W] x, float[2] s, float[2] b", "InstanceNormalization", (1, 2, 1024, 1024), (2, 3), 18),
    "groups": ("float[N, 2, 9] x, float[2] s, float[2] b", "GroupNormalization <num_groups = 2>", (3, 2, 9), (2,), 21),
    "large groups": ("float[1, 2, 1048576] x, float[2] s, float[2] b", "GroupNormalization <num_groups = 2>", (1, 2, 2**20), (2,), 18),
    "means": ("float[N, 2, 1024, 1024] x", "MeanVarianceNormalization", (1, 2, 1024, 1024), (0, 2, 3), 18),
    "batches": (
        "float[N, 2, 1024, 1024] x, float[2] s, float[2] b, float[2] m, float[2] v",
        "BatchNormalization <training_mode = 1, momentum = 0.25>", (1, 2, 1024, 1024), (0, 2, 3), 18,
    ),
    "rows": (
        "float[2097152, 2] x, float[2] s, float[2] b, float[2] m, float[2] v",
        "BatchNormalization <training_mode = 1, momentum = 0.25>", (2**21, 2), (0,), 18,
    ),
}  # fmt: skip
PASSES = LongNormsPass, LongBatchNormsPass, LongSumsPass


def model(inputs, node, opset, inside=False) -> ir.Model:
    """One node; `inside`: of a branch."""
    names = ["y", "M", "V"] if "training_mode" in node else ["y"]
    call = f"{{}} = {node} ({', '.join(declared.split()[-1] for declared in inputs.split(', ') if '] ' in declared)})"
    body = call.format(", ".join(names))
    if inside:
        inner = [f"{name}_inner" for name in names]
        branch = f"g () => ({', '.join(f'float {name}' for name in inner)}) {{ {call.format(', '.join(inner))} }}"
        body = f"{', '.join(names)} = If (c) <then_branch = {branch}, else_branch = {branch}>"
        inputs = f"bool c, {inputs}"
    header = f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => ({", ".join(f"float {n}" for n in names)})'
    proto = onnx.parser.parse_model(f"{header} {{ {body} }}")
    for value in (*proto.graph.output, *(v for n in proto.graph.node for a in n.attribute for v in a.g.output)):
        value.type.tensor_type.ClearField("shape")
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def run(graph: ir.Model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_normalized_over_many_numbers_is_exact(name, inside):
    inputs, node, shape, axes, opset = NORMS[name]
    x = (np.random.default_rng(0).standard_normal(shape) + 20).astype(np.float32)
    feeds = {
        "x": x,
        "s": np.ones(2, np.float32),
        "b": np.zeros(2, np.float32),
        "m": np.float32([1, 2]),
        "v": np.float32([3, 4]),
    }
    feeds["c"] = np.array(True)
    if node.startswith("Layer"):
        feeds |= {"s": np.ones(shape[1:], np.float32), "b": np.zeros(shape[1:], np.float32)}
    exact = x.astype(np.float64)
    mean, variance = exact.mean(axes, keepdims=True), exact.var(axes, keepdims=True)
    expected = (exact - mean) / np.sqrt(variance + (0 if name == "means" else 1e-5))
    plain, written = (model(inputs, node, opset, inside) for _ in range(2))
    for rewrite in PASSES:
        rewrite()(written)
    assert node.split()[0] not in {n.op_type for n in written.graph.all_nodes()}
    found, *statistics = run(written, feeds)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    for value, old, batch in zip(statistics, "mv", (mean, variance)):
        np.testing.assert_allclose(value, 0.25 * feeds[old] + 0.75 * batch.reshape(-1), rtol=2e-6)
    assert np.abs(run(plain, feeds)[0] - expected).max() > 4e-5  # else this tests nothing


@pytest.mark.parametrize(
    "inputs, node",
    [
        ("float[N, 768] x, float[768] s, float[768] b", "LayerNormalization <axis = -1>"),
        ("float[N, 8, 128, 128] x, float[8] s, float[8] b", "InstanceNormalization"),
        (
            "float[N, 8, 224, 224] x, float[8] s, float[8] b, float[8] m, float[8] v",
            "BatchNormalization <training_mode = 1>",
        ),
        ("float[N, 8, 999, 999] x, float[8] s, float[8] b, float[8] m, float[8] v", "BatchNormalization"),
        ("double[N, 8, 999, 999] x, double[8] s, double[8] b", "InstanceNormalization"),
    ],
)
def test_what_is_normalized_over_few_numbers_stays(inputs, node):
    graph = model(inputs, node, 18)
    assert not any([rewrite()(graph).modified for rewrite in PASSES])


def test_sizes_at_hand_say_what_is_long():
    graph = model("float[N, 8, H, W] x, float[8] s, float[8] b", "InstanceNormalization", 18)
    assert not LongNormsPass({"H": 64, "W": 64})(graph).modified
    assert LongNormsPass({"H": 640, "W": 640})(graph).modified


SIDE = 384
LAYERS = {
    "all channels": lambda: nn.GroupNorm(1, 6),
    "layers": lambda: nn.LayerNorm([6, SIDE, SIDE]),
    "batches": lambda: nn.BatchNorm2d(6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_pictures_train_as_in_float64(name):
    """Of pictures that are much alike, forward and backward."""
    torch.manual_seed(0)
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)]
    module = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), LAYERS[name](), *head)
    exact, loss_fn = copy.deepcopy(module).double(), nn.MSELoss()
    trainer = orttrainer.trainer(module, loss_fn, torch.optim.SGD(module.parameters(), 0.1))
    optimizer = torch.optim.SGD(exact.parameters(), 0.1)
    x, y = 0.9 + 0.05 * torch.randn(2, 3, SIDE, SIDE), torch.rand(2, 2)
    expected = loss_fn(exact(x.double()), y.double())
    expected.backward()
    optimizer.step()
    assert trainer.step(x, y)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    for found, want in zip(module.parameters(), exact.parameters()):
        torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-5)
