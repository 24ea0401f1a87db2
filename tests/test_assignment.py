"""Predictions are matched with targets as SciPy's `linear_sum_assignment` does, in the graph: each step matches anew."""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from in_step import check_equal, step
from scipy import optimize
from scipy.optimize import linear_sum_assignment  # as scripts import it
from torch import nn

from orttrainer import IODescription, ModelDescription
from orttrainer.engine.engine import Engine
from orttrainer.engine.settings import OptimizerChoice, Settings
from orttrainer.export.forms.assignment import define_assignments
from orttrainer.runtime import load

RATE = 0.05


@pytest.fixture(scope="module")
def in_graph():
    """Rows and columns of a matrix, by ONNX Runtime."""
    model = ir.from_onnx_text("""
    <ir_version: 10, opset_import: ["" : 18, "orttrainer" : 1]>
    g (double[n, m] cost) => (int64[k] rows, int64[k] columns) { rows, columns = orttrainer.LinearSumAssignment(cost) }""")
    define_assignments(model)
    options = load().SessionOptions()
    options.log_severity_level = 3
    session = load().InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return lambda cost: session.run(None, {"cost": cost})


COSTS = {
    "all different": lambda rng, shape: rng.normal(size=shape),
    "many alike": lambda rng, shape: rng.integers(0, 3, shape).astype(float),
    "far apart": lambda rng, shape: np.exp(9 * rng.normal(size=shape)),
    "some forbidden": lambda rng, shape: np.where(rng.random(shape) < 0.2, np.inf, rng.integers(0, 3, shape)),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_the_assignment_is_scipys(in_graph, costs):
    rng = np.random.default_rng(0)
    for shape in [*(tuple(rng.integers(1, 9, 2)) for _ in range(100)), (0, 3), (3, 0), (40, 7), (7, 40)]:
        cost = costs(rng, shape)
        try:
            expected = linear_sum_assignment(cost)
        except ValueError:  # no assignment is finite
            continue
        for found, wanted in zip(in_graph(cost), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_costs_that_scipy_refuses_have_some_assignment(in_graph, number):
    with pytest.raises(ValueError):
        linear_sum_assignment(np.full((4, 3), number))
    rows, columns = in_graph(np.full((4, 3), number))
    assert len({*rows}) == len({*columns}) == 3


class Matched(nn.Module):
    """The distance of predictions from the targets that are nearest to them, taken together."""

    def __init__(self, match):
        super().__init__()
        self.linear, self.match = nn.Linear(4, 3), match

    def forward(self, x, target):
        y = self.linear(x)
        if self.match is not by_arrays:  # a symbol for each number, and a graph for each number of targets
            target = target[target[:, 0] > -1]
        rows, columns = self.match(torch.cdist(y, target).square())
        return (y[rows] - target[columns]).square().sum() + 0.1 * y.square().sum()


def by_tensors(cost):
    return [torch.as_tensor(x, dtype=torch.int64) for x in linear_sum_assignment(cost.detach().cpu())]


def of_most(cost):
    rows, columns = optimize.linear_sum_assignment(cost.detach(), maximize=True)
    return rows, columns


def by_arrays(cost):
    with torch.no_grad():
        return linear_sum_assignment(cost.numpy())


@pytest.mark.parametrize(
    ("match", "size"), [(by_tensors, 3), (of_most, 9), (by_arrays, 4)], ids=["tensors, wide", "of most, tall", "arrays"]
)
def test_matched_predictions_train_as_in_pytorch(match, size):
    torch.manual_seed(0)
    inputs = [IODescription("x", ["n", 4]), IODescription("target", [5, 3])]
    module = Matched(match)
    twin = copy.deepcopy(module)
    description = ModelDescription(inputs, [IODescription("loss", [])])
    engine = Engine(module, None, description, OptimizerChoice("SGDOptimizer", clip=False), Settings())
    for _ in range(4):
        step(engine, twin, {"x": torch.randn(size, 4), "target": torch.randn(5, 3)}, RATE)
    check_equal(module, twin)
    assert optimize.linear_sum_assignment is linear_sum_assignment
