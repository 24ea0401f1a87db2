"""GatherElements of whole rows reads them as rows: the same numbers, the same errors, the gradient of PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from fidelity import assert_trains_with_and_without
from test_passes_rows import operators, run
from torch import nn

from orttrainer.graph.passes.speed.whole_rows import WholeRowsPass

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
g (float[{x}] x, int64[{places}] i) => (float[{y}] y) <int64[{rank}] times = {{{times}}}, int64[{rank}] each = {{{each}}}> {{
    r = Expand (x, times) e = Expand (i, each) y = GatherElements <axis = {axis}> (r, e) }}"""


def gather(x, places, times, each, axis) -> ir.Model:
    """Of `x`, repeated `times`, at `places` for `each` element of a row."""
    shapes = [",".join(map(str, given)) for given in (x, places, times, each)]
    y = [b if b != 1 else a for a, b in zip(places, each)]
    text = TEXT.format(
        x=shapes[0], places=shapes[1], y=",".join(map(str, y)), rank=len(x), times=shapes[2], each=shapes[3], axis=axis
    )
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))


CASES = {  # x, places, times, each, axis
    "of points": (["B", 6, 1, 9], ["B", 5, 4, 1], [1, 1, 4, 1], [1, 1, 1, 9], 1),
    "of few channels": (["B", 6, 1, 2], ["B", 5, 4, 1], [1, 1, 4, 1], [1, 1, 1, 2], 1),
    "of some points": (["B", 6, 9], ["B", 5, 1], [1, 1, 1], [1, 1, 9], 1),
    "beside others": (["B", 6, 3, 9], ["B", 5, 3, 1], [1, 1, 1, 1], [1, 1, 1, 9], -3),
    "behind others": (["B", 3, 6, 9], ["B", 3, 5, 1], [1, 1, 1, 1], [1, 1, 1, 9], 2),
    "behind repeated ones": (["B", 1, 6, 9], ["B", 3, 5, 1], [1, 3, 1, 1], [1, 1, 1, 9], 2),
    "of images": (["B", 6, 3, 4], ["B", 5, 1, 1], [1, 1, 1, 1], [1, 1, 3, 4], 1),
    "of the batch": (["B", 9], ["m", 1], [1, 1], [1, 9], 0),
    "of one": (["B", 6, 9], ["B", 1, 1], [1, 1, 1], [1, 1, 9], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_rows_are_read_as_rows(name):
    x, places, times, each, axis = CASES[name]
    model = gather(x, places, times, each, axis)
    assert WholeRowsPass()(model).modified
    assert "GatherElements" not in operators(model)
    rng, size = np.random.default_rng(0), 4 if axis == 0 else x[axis]
    for batch in (4, 0):
        sizes = {"B": batch, "m": 5 if batch else 0}
        given = rng.standard_normal([sizes.get(n, n) for n in x]).astype(np.float32)
        at = rng.integers(-size, size, [sizes.get(n, n) for n in places])  # some count from the back
        repeated = np.broadcast_to(given, np.maximum(given.shape, times) if batch else given.shape * np.array(times))
        shape = [n if m == 1 else m for n, m in zip(at.shape, each)]
        expected = np.take_along_axis(repeated, np.broadcast_to(at, shape), axis)
        np.testing.assert_array_equal(run(model, {"x": given, "i": at}), expected)
        for wrong in (size, -size - 1) if batch else ():
            with pytest.raises(Exception, match="indices element out of data bounds"):
                run(model, {"x": given, "i": np.full_like(at, wrong)})


@pytest.mark.parametrize(
    "case",
    [
        (["B", 6, 9], ["B", 5, 1], [1, 1, 1], [1, 1, 7], 1),  # a part of each row
        (["B", 6, 4], ["B", 5, 1], [1, 1, 1], [1, 1, 4], 1),  # short rows
        (["B", "N", 9], ["B", 5, 1], [1, 1, 1], [1, 1, 9], 1),
        (["B", 6, 9], ["m", 5, 1], [1, 1, 1], [1, 1, 9], 1),  # of another batch, perhaps a smaller one
        (["B", 6, 9], ["B", 5, 9], [1, 1, 1], [1, 1, 1], 1),  # a place for each number
        (["B", 6, 1], ["B", 5, 9], [1, 1, 9], [1, 1, 1], 2),  # along the last axis
        (["B", 1, 9], ["B", 5, 1], [1, 6, 1], [1, 1, 9], 1),  # of what is repeated along the axis itself
    ],
    ids=str,
)
def test_others_stay(case):
    assert not WholeRowsPass()(gather(*case)).modified


class Neighbours(nn.Module):
    """The greatest of the nearest points of each, and some points of each set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 16)

    def forward(self, x):
        y, near = self.linear(x), (-torch.cdist(x, x)).topk(4, -1)[1]
        each = y[:, :, None].expand(-1, -1, 4, -1).gather(1, near[..., None].expand(-1, -1, -1, 16))
        some = y.gather(1, near[:, :5, 1:2].expand(-1, -1, 16))
        return each.amax(2).sin().mean() + some.square().mean()


def test_neighbours_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("WholeRowsPass", Neighbours, [9, 3], replaces="GatherElements")
