"""Sums of many numbers that are alike: as exact as PyTorch's, in stages."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from marks import in_turn
from torch import nn
from torch.nn import functional as F

from orttrainer import IODescription, ModelDescription, ORTTrainer
from orttrainer.graph.passes.long_sums import LongSumsPass

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[{shape}] x) => (float[{out}] y)
<int64[{count}] axes = {{{axes}}}> {{
  y = {op} <keepdims={keep}> (x, axes)
}}
"""


def model(op, shape, axes, keep, rank):
    dims = shape.split(",")
    out = ",".join("1" if k in axes else d for k, d in enumerate(dims) if keep or k not in axes)
    chosen = ", ".join(str(axis - rank) for axis in axes)  # counted from the last
    return ir.from_onnx_text(TEXT.format(op=op, shape=shape, out=out, count=len(axes), axes=chosen, keep=keep))


def run(graph, x):
    session = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


# declared shape, shape, axes
LONG = {
    "all axes": ("16,1,160,160", (16, 1, 160, 160), (0, 1, 2, 3)),
    "all of any size": ("A,B,C", (16, 160, 160), (0, 1, 2)),
    "the first axes": ("640,1280,2", (640, 1280, 2), (0, 1)),
    "all but the channels": ("B,2,512,512", (2, 2, 512, 512), (0, 2, 3)),
    "the last": ("B,3,1000000", (2, 3, 1_000_000), (2,)),
    "one in the middle": ("B,1000000,2", (1, 1_000_000, 2), (1,)),
    "a row of known length": ("1048576", (1_048_576,), (0,)),
    "a row whose length is prime": ("1000003", (1_000_003,), (0,)),
    "a row of any length": ("N", (1_000_003,), (0,)),
    "a column of any length": ("N,1", (1_000_003, 1), (0,)),
    "pixels of any number": ("B,1,H,W", (8, 1, 512, 512), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("name", LONG)
def test_the_sum_of_many_equal_numbers_is_exact_to_four_digits(name, op, keep):
    declared, shape, axes = LONG[name]
    x = np.full(shape, 0.1, np.float32)
    exact = (x.astype(np.float64).sum if op == "ReduceSum" else x.astype(np.float64).mean)(axes, keepdims=bool(keep))
    plain, staged = (model(op, declared, axes, keep, len(shape)) for _ in range(2))
    assert LongSumsPass()(staged).modified
    (y,) = staged.graph.outputs
    assert y.name == "y"
    found = run(staged, x)
    assert found.shape == exact.shape
    np.testing.assert_allclose(found, exact, rtol=3e-5)
    assert np.abs(run(plain, x) / exact - 1).max() > 5e-5  # else this tests nothing


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("name", LONG)
def test_a_sum_of_different_numbers_is_what_it_was(name, op):
    declared, shape, axes = LONG[name]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + 1
    staged = model(op, declared, axes, 1, len(shape))
    LongSumsPass()(staged)
    exact = (x.astype(np.float64).sum if op == "ReduceSum" else x.astype(np.float64).mean)(axes, keepdims=True)
    np.testing.assert_allclose(run(staged, x), exact, rtol=2e-6)


@pytest.mark.parametrize(
    "declared, axes, sizes",
    [
        ("8,512", (0, 1), {}),
        ("B,512", (0, 1), {"B": 8}),
        ("B,512", (1,), {}),
        ("N", (0,), {"N": 700}),
        ("N,2", (0,), {}),
    ],
)
def test_a_sum_that_is_short_or_cannot_be_cut_stays(declared, axes, sizes):
    graph = model("ReduceSum", declared, axes, 0, len(declared.split(",")))
    assert not LongSumsPass(sizes)(graph).modified
    assert [node.op_type for node in graph.graph] == ["ReduceSum"]


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257])
def test_a_row_of_any_length_may_be_empty_or_end_anywhere(rows):
    total, mean = (model(op, "N", (0,), 0, 1) for op in ("ReduceSum", "ReduceMean"))
    x = np.arange(1, rows + 1, dtype=np.float32)
    for graph in (total, mean):
        LongSumsPass()(graph)
    assert run(total, x) == rows * (rows + 1) / 2
    np.testing.assert_array_equal(run(mean, x), (rows + 1) / 2 if rows else np.nan)  # as torch.empty(0).mean()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["a row of any length", "all axes"])
def test_what_is_not_finite_comes_through(name, value):
    declared, shape, axes = LONG[name]
    x = np.ones(shape, np.float32)
    x.flat[300] = value
    graph = model("ReduceSum", declared, axes, 0, len(shape))
    LongSumsPass()(graph)
    np.testing.assert_array_equal(run(graph, x), value)


PIXELS = 512 * 512
LOSSES = {
    "binary cross-entropy": F.binary_cross_entropy_with_logits,
    "of rows": lambda output, label: F.binary_cross_entropy_with_logits(output.reshape(-1), label.reshape(-1)),
    "sum of absolute errors": lambda output, label: (output - label).abs().sum() / PIXELS,
    "cross-entropy": lambda output, label: F.cross_entropy(torch.cat([output, -output], 1), label[:, 0].long()),
}


@pytest.mark.parametrize("name, batch", in_turn(list(LOSSES), [4, "batch"]))
def test_a_segmentation_that_begins_with_a_constant_trains_as_in_pytorch(name, batch):
    """A head of zeros with a bias, as detectors have: the loss of all pixels is the same, and so is its gradient."""
    torch.manual_seed(0)
    module, loss_fn = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 1)), LOSSES[name]
    nn.init.zeros_(module[2].weight)
    nn.init.constant_(module[2].bias, -2.3)
    reference = copy.deepcopy(module).double()
    optimizer = torch.optim.SGD(reference.parameters(), 0.5)
    image = [batch, 1, 512, 512]
    description = ModelDescription(
        [IODescription("x", image, torch.float32), IODescription("label", image, torch.float32)],
        [IODescription("loss", [], torch.float32), IODescription("output", image, torch.float32)],
    )
    rate = IODescription("Learning_Rate", [1], torch.float32)
    trainer = ORTTrainer(module, loss_fn, description, "SGDOptimizer", None, rate, "cpu")
    label = torch.zeros(4, 1, 512, 512)
    for _ in range(2):
        x = torch.randn(4, 1, 512, 512)
        loss = trainer.train_step(x, label, torch.tensor([0.5]))[0].item()
        expected = loss_fn(reference(x.double()), label.double())
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(module[2].bias.double(), reference[2].bias, rtol=1e-4, atol=0)
