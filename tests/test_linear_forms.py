"""What looks up, counts or orders along an axis holds a few values for each of its elements, not one for each pair of them."""

from __future__ import annotations

import math

import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from marks import slow
from onnx import helper
from torch import nn

from orttrainer import build_gradient
from orttrainer.describe import IODescription, ModelDescription
from orttrainer.export import export_module

SIZE = 1000
FEW = 100  # values for each element, of all pairs 1000
COUNTS = torch.arange(SIZE) % 3  # 999 in all

# Of elements [n] and places in another order [n].
FUNCTIONS = {
    "repeat_interleave": lambda x, place: x.repeat_interleave((place % 3).int()),
    "repeat_interleave of a size": lambda x, place: x.repeat_interleave(COUNTS.to(place), output_size=999),
    "segment_reduce": lambda x, place: torch.segment_reduce(x[:999], "sum", lengths=COUNTS.to(place)),
    "searchsorted": lambda x, place: x * torch.searchsorted(x.detach().sort().values, x),
    "bucketize": lambda x, place: x * torch.bucketize(place, COUNTS.cumsum(0), right=True),
    "isin": lambda x, place: x * torch.isin(place, place * 2),
    "isin, of floats": lambda x, place: x * torch.isin((x / 2).round(), x.detach().round()),
    "index_fill": lambda x, place: x.index_fill(0, place // 2, 0.5),
    "index_fill, from the end": lambda x, place: x[:999].index_fill(0, place[:500] // 2 - 900, 0.5),
    "cummax": lambda x, place: torch.cat([x.cummax(0).values, x.sum() * (place // 3).cummax(0).indices / SIZE**2]),
    "cummin": lambda x, place: x.round(decimals=1).cummin(0).indices * x.mean() + (place // 3).cummin(0).values,
    "cumprod": lambda x, place: ((1 + x / 20) * (place != 500)).cumprod(0),  # with a zero
    "logcumsumexp": lambda x, place: x.logcumsumexp(0),
    "multilabel_margin_loss": lambda x, place: F.multilabel_margin_loss(
        x[None, :999], place[place < 999].where(COUNTS[:999].cumsum(0) < 10, -1)[None], reduction="none"
    ),
    "a mode": lambda x, place: x.round(decimals=2).mode()[0][None] + (x * (place // 2 == (place // 2).mode()[0])),
}


class Sum(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.scales = names, nn.ParameterList([torch.tensor(2.0) for _ in names])

    def forward(self, x, place):
        results = [FUNCTIONS[name](x * scale, place) for name, scale in zip(self.names, self.scales)]
        return sum(y.square().sum() for y in results), *results


def values(model, feeds) -> dict:
    """Those of every node."""
    names = [name for node in model.graph.node for name in node.output if name]
    model.graph.ClearField("output")
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feeds)))


@pytest.mark.parametrize(
    ("rows", "names"),
    [("n", ["repeat_interleave", "searchsorted", "cumprod"]), slow("n", [*FUNCTIONS]), slow(SIZE, [*FUNCTIONS])],
)
def test_no_value_has_an_element_for_each_pair(rows, names):
    module, generator = Sum(names), torch.Generator().manual_seed(0)
    x, place = torch.randn(SIZE, generator=generator), torch.randperm(SIZE, generator=generator)
    description = ModelDescription(
        [IODescription("x", [rows]), IODescription("place", [rows], torch.int64)],
        [IODescription("loss", []), *(IODescription(name, [f"rows of {name}"]) for name in names)],
    )
    forward = export_module(module, None, description, [x, place])
    gradient = build_gradient(ir.to_proto(forward.model), of="loss", wrt=list(forward.parameters))
    found = values(gradient, {"x": x.numpy(), "place": place.numpy()})
    loss, *results = module(x, place)
    loss.backward()
    for name, y, (parameter, scale) in zip(names, results, module.named_parameters()):
        torch.testing.assert_close(torch.from_numpy(found[name]), y.detach(), msg=name)
        torch.testing.assert_close(
            torch.from_numpy(found[f"{parameter}_grad"]), scale.grad, rtol=1e-5, atol=0, msg=name
        )
    assert {name: x.shape for name, x in found.items() if math.prod(x.shape) > FEW * SIZE} == {}
