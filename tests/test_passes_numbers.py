"""Numbers at places along the last axis: the same numbers, the same errors, the gradient of PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fidelity import assert_trains_with_and_without
from test_passes_rows import operators, run
from torch import nn

from orttrainer.graph.passes.speed.numbers import GatherNumbersPass

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[{x}] x, {dtype}[{places}] i) => (float[{y}] y) {{ y = Gather <axis = {axis}> (x, i) }}"""


def gather(x, places, axis=-1, dtype="int64") -> ir.Model:
    y = [*x[: axis % len(x)], *places, *x[axis % len(x) + 1 :]]
    listed = [",".join(map(str, given)) for given in (x, places, y)]
    text = TEXT.format(x=listed[0], places=listed[1], y=listed[2], axis=axis, dtype=dtype)
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("places", [["m"], [5], [2, "m"], [1]], ids=str)
@pytest.mark.parametrize("x", [["B", 7], ["B", 3, 7], ["B", "N"], [2, 3, 7]], ids=str)
def test_numbers_along_the_last_axis_are_read_as_elements(x, places, dtype):
    model = gather(x, places, dtype=dtype)
    assert GatherNumbersPass()(model).modified
    assert "Gather" not in operators(model)
    rng = np.random.default_rng(0)
    for some in (5, 0):
        sizes = {"B": some, "N": 7, "m": some}
        given = rng.standard_normal([sizes.get(n, n) for n in x]).astype(np.float32)
        at = rng.integers(-7, 7, [sizes.get(n, n) for n in places]).astype(dtype)  # some count from the back
        np.testing.assert_array_equal(run(model, {"x": given, "i": at}), given[..., at])
        for wrong in (7, -8, *[2**32, -(2**40)] * (dtype == "int64")) if some else ():
            with pytest.raises(Exception, match="Out of range value in index"):
                run(model, {"x": given, "i": np.full_like(at, wrong)})


@pytest.mark.parametrize(
    "case", [(["B", 7], [], -1), (["B", 7], [5], 0), (["B", 7, 2], [5], 1), (["N"], [5], 0)], ids=str
)
def test_others_stay(case):
    assert not GatherNumbersPass()(gather(*case)).modified


class Columns(nn.Module):
    """Columns in another order, as in a flow, and a bias for each pair of places, some more than once."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 7))
        self.register_buffer("order", torch.tensor([3, 1, 7, -1, 0, 2, 2, 5]))

    def forward(self, x):
        y, apart = self.linear(x), torch.arange(4)[:, None] - torch.arange(4) + 3
        pairs = torch.stack([y.index_select(1, self.order.abs()), y[:, self.order]])
        return pairs.sin().mean() + (y.view(-1, 2, 4).mT @ y.view(-1, 2, 4) + self.bias[:, apart][:1]).tanh().mean()


def test_columns_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("GatherNumbersPass", Columns, [6], replaces="Gather", some=True)
