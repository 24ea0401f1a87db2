"""What is read at places of several numbers is read as rows: the same numbers, the same errors, the gradient of PyTorch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from fidelity import assert_trains_with_and_without
from onnx_models import assert_trains_like
from onnx_models import model as trained
from test_passes_rows import operators, run
from torch import nn

from orttrainer.graph.passes.speed.tuples import TuplesAsRowsPass

TEXT = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[{x}] x, int64[{places}] i) => (float[{y}] y) {{ y = GatherND (x, i) }}
"""


def gather(x, places, depth) -> ir.Model:
    sizes = [*places, *x[depth:]]
    listed = [",".join(map(str, given)) for given in (x, [*places, depth], sizes)]
    return ir.from_onnx_text(TEXT.format(x=listed[0], places=listed[1], y=listed[2]))


@pytest.mark.parametrize("open_", [False, True], ids=["known", "open"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("places", [(5,), (2, 3), (), (0,)], ids=str)
def test_places_are_read_as_rows(places, depth, open_):
    sizes = (4, 3, 5)
    model = gather(["n", *sizes[1:]] if open_ else sizes, ["m", *places[1:]] if open_ and places else places, depth)
    assert TuplesAsRowsPass()(model).modified
    assert "GatherND" not in operators(model)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(sizes).astype(np.float32)
    i = np.stack([rng.integers(-n, n, places) for n in sizes[:depth]], -1)  # some count from the back
    np.testing.assert_array_equal(run(model, {"x": x, "i": i}), x[tuple(np.moveaxis(i, -1, 0))])
    if i.size:
        for axis, place in ((0, 4), (depth - 1, sizes[depth - 1]), (depth - 1, -sizes[depth - 1] - 1)):
            wrong = i.copy()
            wrong[..., axis] = place
            with pytest.raises(Exception, match="indices element out of data bounds"):
                run(model, {"x": x, "i": wrong})


@pytest.mark.parametrize("place", [[-2], [1, -2]], ids=str)
def test_one_number_is_trained(place):
    """ONNX's inference finds no rank of it, which the gradient of what reads it needs."""
    body = f"""i = Constant <value = int64[{len(place)}] {{{", ".join(map(str, place))}}}> () n = GatherND (w, i)
               a = Constant <value = int64[1] {{0}}> () m = Unsqueeze (n, a) r = Mul (x, m)"""
    w = np.arange(1, 4 ** len(place) + 1).reshape([4] * len(place))
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    assert_trains_like(trained(body, "3", 18, w=w), lambda x, w: x * w[tuple(place)], [x], w=w.astype(np.float32))


def test_numbers_that_were_put_side_by_side_are_not_taken_apart():
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 18]>
    g (float[B,6,4] x, int64[B,1] b, int64[B,3] i) => (float[B,3,4] y) <int64[1] last = {-1}> {
        s = Shape (i) e = Expand (b, s) u = Unsqueeze (e, last) v = Unsqueeze (i, last)
        places = Concat <axis = -1> (u, v) y = GatherND (x, places) }""")
    sizes = {"s": [2], "e": ["B", 3], "u": ["B", 3, 1], "v": ["B", 3, 1], "places": ["B", 3, 2]}
    for value in (value for node in model.graph for value in node.outputs if value.name in sizes):
        value.shape, value.type = ir.Shape(sizes[value.name]), ir.TensorType(ir.DataType.INT64)
    assert TuplesAsRowsPass()(model).modified
    read = {x.name for node in model.graph if node.op_type == "Gather" for x in node.inputs}
    assert {"b", "i"} <= read and not operators(model) & {"GatherND", "Split"}
    rng = np.random.default_rng(0)
    x, b, i = rng.standard_normal((2, 6, 4)).astype(np.float32), np.array([[1], [0]]), rng.integers(-6, 6, (2, 3))
    np.testing.assert_array_equal(run(model, {"x": x, "b": b, "i": i}), x[b, i])


@pytest.mark.parametrize(
    "sizes, attribute", [(["B", "T", 4], ""), (["B", 0, 4], ""), (["B", 3, 4], "<batch_dims = 1>")], ids=str
)
def test_others_stay(sizes, attribute):
    text = TEXT.format(x=",".join(map(str, sizes)), places="5,2", y="5,4").replace("ND (", f"ND {attribute} (")
    assert not TuplesAsRowsPass()(ir.from_onnx_text(text)).modified


@pytest.mark.parametrize("places", [(5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("lead, depth", [(["B"], 2), (["B"], 1), (["B", "C"], 2), ([2, "C"], 3)], ids=str)
def test_rows_as_long_as_the_batch_are_read_number_by_number(lead, depth, places):
    sizes = (4, 3, 5)[:depth]
    front, rank = len(lead), len(lead) + depth
    perm = [*range(front, rank), *range(front)]
    x, moved, i, y = ([*lead, *sizes], [*sizes, *lead], [*places, depth], [*places, *lead])
    listed = [",".join(map(str, given)) for given in (x, i, y, perm)]
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{listed[0]}] x, int64[{listed[1]}] i) => (float[{listed[2]}] y) {{
        t = Transpose <perm = [{listed[3]}]> (x) y = GatherND (t, i) }}""")
    t = model.graph[0].outputs[0]
    t.shape, t.type = ir.Shape(moved), ir.TensorType(ir.DataType.FLOAT)
    assert TuplesAsRowsPass()(model).modified
    (last,) = [n for n in model.graph if n.op_type == "Gather" and n.attributes.get_int("axis", 0) == front]
    assert last.inputs[0].shape == (*lead, int(np.prod(sizes))) and "GatherND" not in operators(model)
    rng = np.random.default_rng(0)
    for batch in (3, 0):
        given = rng.standard_normal(([batch, 2] if lead[0] == "B" else [2, batch])[:front] + list(sizes))
        given, at = given.astype(np.float32), np.stack([rng.integers(-n, n, places) for n in sizes], -1)
        expected = given.transpose(perm)[tuple(np.moveaxis(at, -1, 0))]
        np.testing.assert_array_equal(run(model, {"x": given, "i": at}), expected)
        if at.size and batch:
            at[..., -1] = sizes[-1]
            with pytest.raises(Exception, match="indices element out of data bounds"):
                run(model, {"x": given, "i": at})


class Pairs(nn.Module):
    """Products of all features by one another, each once, as in DLRM; points of images, some more than once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, x):
        features = self.linear(x).unflatten(1, (4, 3))
        images = features.unsqueeze(3) * features.detach().unsqueeze(2)
        near = features @ features.mT
        points = images[:, :, self.pairs % 3, -self.pairs % 3]
        return (
            near[:, self.pairs[0], self.pairs[1]].sin().mean()
            + points.square().mean()
            + near[:, [3, 3], [-1, 0]].mean()
        )


def test_pairs_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("TuplesAsRowsPass", Pairs, [6], replaces="GatherND")


class Neighbours(nn.Module):
    """The nearest points of each, and a table that is looked up by two numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 16), nn.Parameter(torch.randn(3, 7, 2))

    def forward(self, x):
        near = (-torch.cdist(x, x)).topk(4, -1)[1]
        near = near - 9 * (near % 2)  # some counted from the back
        y = self.linear(x)
        found = y[torch.arange(len(x))[:, None, None], near] - y[:, :, None]
        kinds = self.table[torch.arange(3), (x * 3).long().abs() % 7]
        return found.sin().mean() + kinds.square().mean() + y[x[..., 0] > 0].sin().sum() / 50


def test_neighbours_train_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("TuplesAsRowsPass", Neighbours, [9, 3], replaces="GatherND")
