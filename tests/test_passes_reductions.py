"""Reductions with axes of one element behind what they reduce: the same numbers, of axes that lie side by side."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fidelity import assert_trains_with_and_without
from torch import nn

from orttrainer.graph.passes.speed import reductions
from orttrainer.graph.passes.speed.reductions import ReduceOnesPass, ShortSumsPass
from orttrainer.testing import evaluate

REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]
# shape, axes that are reduced, all of them then
CASES = [
    ("2,3,4,1", [2], [2, 3]),
    ("2,3,1,1", [1], [1, 2, 3]),
    ("2,N,1,4", [-3], [1, 2]),
    ("2,3,1,4", [3, 1], [1, 2, 3]),
    ("N,1", [0], [0, 1]),
    ("0,3,1", [1], [1, 2]),  # as of an empty batch
]


def reduction(kind: str, shape: str, axes: list[int], keep: int) -> ir.Model:
    rank = shape.count(",") + 1
    out = ",".join(f"D{k}" for k in range(rank if keep else rank - len(axes)))
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (double[{shape}] x) => (double{f"[{out}]" if out else ""} y)
    <int64[{len(axes)}] axes = {{{", ".join(map(str, axes))}}}> {{ y = Reduce{kind} <keepdims = {keep}> (x, axes) }}"""
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text))))


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("shape, axes, all_axes", CASES, ids=str)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_an_axis_of_one_element_behind_them_is_reduced_too(kind, shape, axes, all_axes, keep):
    model = reduction(kind, shape, axes, keep)
    dims = [3 if size == "N" else int(size) for size in shape.split(",")]
    feeds = {"x": np.random.default_rng(0).uniform(0.5, 2, dims)}
    expected = evaluate(ir.to_proto(model), feeds)["y"]
    assert ReduceOnesPass()(model).modified
    (node,) = [node for node in model.graph if node.op_type == f"Reduce{kind}"]
    assert node.inputs[1].const_value.numpy().tolist() == all_axes
    found = evaluate(ir.to_proto(model), feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert not ReduceOnesPass()(model).modified


@pytest.mark.parametrize(
    "shape, axes", [("2,3,4,1", [1]), ("2,3,1", [0]), ("1,3", [1]), ("2,1,3", [1, 2]), ("2,3,N", [1])]
)
def test_other_reductions_stay(shape, axes):
    assert not ReduceOnesPass()(reduction("Sum", shape, axes, 1)).modified


class Steps(nn.Module):
    """Numbers of [.., 1] are repeated along the axis before, whose gradients are such sums."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        return (self.rates * torch.arange(5.0)[:, None] * x[:, None, None, :1]).sin().sum((2, 3)).square().mean()


def test_it_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("ReduceOnesPass", Steps, [2], None)


SHORT = [
    ("300,8,2", [1]),
    ("N,8,2", [1]),
    ("20,15,3,4,2", [-3, 3]),
    ("300,2,2,2,2", [1]),
    ("300,8,2,1", [1]),
    ("300,8,2", [-2]),
]


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("given", [300, 1, 0])
@pytest.mark.parametrize("shape, axes", SHORT, ids=str)
@pytest.mark.parametrize("kind", ["Sum", "Mean"])
def test_few_short_rows_are_summed_as_parts(kind, shape, axes, given, keep):
    if given != 300 and "N" not in shape:
        return
    model = reduction(kind, shape, axes, keep)
    feeds = {"x": np.random.default_rng(0).standard_normal([given if n == "N" else int(n) for n in shape.split(",")])}
    expected = {"Sum": np.sum, "Mean": np.mean}[kind](feeds["x"], tuple(axes), keepdims=bool(keep))
    assert ShortSumsPass({"N": 300})(model).modified
    found = {node.op_type for node in model.graph}
    assert {"Split", "Sum"} <= found and not found & {"ReduceSum", "ReduceMean"}
    found = evaluate(ir.to_proto(model), feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert not ShortSumsPass({"N": 300})(model).modified


LONG = [
    ("N,8,2", [1]), ("200,8,2", [1]), ("300,8,1", [1]), ("300,8,64", [1]), ("300,32,2", [1]), ("300,8,2", [2]), ("300,8,2", [0]),
    ("300,2,2,2,2", [1, 3]), ("300,N,2", [1]), ("300,0,2", [1]),
]  # fmt: skip


@pytest.mark.parametrize("kind, shape, axes", [*(("Sum", *case) for case in LONG), ("Max", "300,8,2", [1])], ids=str)
def test_other_sums_stay(kind, shape, axes):
    assert not ShortSumsPass()(reduction(kind, shape, axes, 1)).modified


class Corners(nn.Module):
    """A hash grid's: rows of two numbers, weighted."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.randn(50, 2)), nn.Linear(4, 8)

    def forward(self, x):
        at = (x[:, :1] * torch.arange(1.0, 9.0)).long().abs() % 50  # [points, corners]
        return (self.table[at] * self.linear(x).sigmoid()[:, :, None]).sum(1).square().mean()


def test_a_hash_grid_trains_as_in_pytorch_with_and_without(monkeypatch):
    monkeypatch.setattr(reductions, "MANY", 4)
    assert_trains_with_and_without("ShortSumsPass", Corners, [4], replaces=None)
