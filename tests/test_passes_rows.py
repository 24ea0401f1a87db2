"""Rows that are read or added to at places: the same numbers in the forms that ONNX Runtime is fast at."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from fidelity import assert_trains_with_and_without
from torch import nn

from orttrainer import runtime
from orttrainer.graph.passes.speed import pieces
from orttrainer.graph.passes.speed import rows as rows_of_tables
from orttrainer.graph.passes.speed.rows import FlatScatterPass, GatherRowsPass
from orttrainer.runtime import scattered

SCATTER = """
<ir_version: 8, opset_import: ["" : 18]>
g (float[{table}] t, int64[{places}] i, float[{updates}] u) => (float[{table}] y)
<int64[{rank}] shape = {{{sizes}}}> {{
  e = {expand}
  s = ScatterElements <axis = {axis}, reduction = "{reduction}"> (t, e, u)
  y = Neg (s)
}}
"""


def scatter(table, places, updates, axis=0, reduction="add", dtype="float") -> ir.Model:
    def listed(sizes):
        return ",".join(map(str, sizes))

    expand = "Identity (i)" if places == updates else "Expand (i, shape)"
    text = SCATTER.format(
        table=listed(table), places=listed(places), updates=listed(updates), rank=len(updates), axis=axis,
        sizes=listed(1 if isinstance(size, str) else size for size in updates), expand=expand, reduction=reduction,
    )  # fmt: skip
    model = ir.from_onnx_text(text.replace("float", dtype))
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["e"].shape, values["e"].type = ir.Shape(updates), ir.TensorType(ir.DataType.INT64)
    return model


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


def run(model: ir.Model, feeds):
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def feeds_for(table, places, updates, rows, dtype=np.float32, low=None):
    rng = np.random.default_rng(0)
    return {
        "t": rng.standard_normal(table).astype(dtype),
        "i": rng.integers(-rows if low is None else low, rows, places),
        "u": rng.standard_normal(updates).astype(dtype),
    }


def expected(feeds, axis, reduction):
    """What ScatterElements is defined as, one element after the other."""
    t, u = feeds["t"].copy(), feeds["u"]
    places = np.broadcast_to(feeds["i"], u.shape)
    for at in np.ndindex(*u.shape):
        target = (*at[:axis], places[at], *at[axis + 1 :])
        t[target] = {"add": t[target] + u[at], "mul": t[target] * u[at], "max": max(t[target], u[at]), "none": u[at]}[
            reduction
        ]
    return -t


@pytest.mark.parametrize("reduction", ["add", "mul", "max"])
@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize(
    "table, places, updates, axis",
    [
        ((5, 8), (11, 1), (11, 8), 0),
        ((5, 8), (11, 8), (11, 8), 0),
        ((5, 2, 6), (3, 1, 1), (3, 2, 6), 0),
        ((1, 4, 9), (1, 6, 1), (1, 6, 9), 1),
        ((1, 4, 9), (1, 6, 1), (1, 6, 9), -2),
    ],
)
def test_rows_are_added_up_at_places_of_single_elements(table, places, updates, axis, dtype, reduction):
    model = scatter(table, places, updates, axis, reduction, dtype)
    assert FlatScatterPass()(model).modified
    assert "Expand" not in operators(model) or not model.graph.node(0).outputs[0].uses()
    feeds = feeds_for(table, places, updates, table[axis], np.dtype(dtype.replace("float", "float32")))
    np.testing.assert_allclose(run(model, feeds), expected(feeds, axis % len(table), reduction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [5, "R"])
@pytest.mark.parametrize("count, given", [(7, 7), ("N", 7), ("N", 0), (0, 0)])
@pytest.mark.parametrize("width", [1, 8])
def test_numbers_of_rows_may_be_unknown_or_none(rows, count, given, width):
    model = scatter((rows, 8), (count, width), (count, 8))
    assert FlatScatterPass()(model).modified
    feeds = feeds_for((5, 8), (given, width), (given, 8), 5)
    np.testing.assert_allclose(run(model, feeds), expected(feeds, 0, "add"), rtol=1e-5)


def behind_others(batch) -> ir.Model:
    """Of each image the element of one class is read, and put back."""
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{batch},4,9] t, int64[{batch},1,9] i, float[{batch},1,9] u) => (float[{batch},4,9] y)
    {{ r = GatherElements <axis = 1> (t, i) n = Add (r, u)
       s = ScatterElements <axis = 1> (t, i, n) y = Neg (s) }}"""
    model = ir.from_onnx_text(text)
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["n"].shape, values["n"].type = ir.Shape([batch, 1, 9]), ir.TensorType(ir.DataType.FLOAT)
    return model


@pytest.mark.parametrize("batch, given", [(3, 3), ("N", 3), ("N", 0)])
def test_places_behind_other_axes_that_were_read_are_single_elements_too(batch, given):
    model = behind_others(batch)
    assert FlatScatterPass()(model).modified
    feeds = feeds_for((given, 4, 9), (given, 1, 9), (given, 1, 9), 4)
    read = np.take_along_axis(feeds["t"], feeds["i"], 1)
    np.testing.assert_array_equal(run(model, feeds), expected(feeds | {"u": read + feeds["u"]}, 1, "none"))


@pytest.mark.parametrize("place", [4, -5])
@pytest.mark.parametrize("behind", [False, True])
def test_a_place_outside_of_the_table_is_an_error_as_before(behind, place):
    shapes = ((3, 4, 9), (3, 1, 9), (3, 1, 9)) if behind else ((4, 8), (7, 1), (7, 8))
    model = behind_others(3) if behind else scatter(*shapes)
    assert FlatScatterPass()(model).modified
    feeds = feeds_for(*shapes, rows=4)
    feeds["i"].flat[1] = place
    with pytest.raises(Exception, match=r"out of data bounds|Out of range"):
        run(model, feeds)


@pytest.mark.parametrize(
    "table, places, updates, axis",
    [
        ((5, 4), (11, 1), (11, 4), 0),  # short rows
        ((5, 16), (11, 1), (11, 8), 0),  # some of the columns
        ((3, 5, 8), (3, 4, 8), (3, 4, 8), 1),  # a place past the end would be in the next matrix
        ((8, 5), (8, 4), (8, 4), 1),  # elements of rows
    ],
)
def test_other_places_stay(table, places, updates, axis):
    assert not FlatScatterPass()(scatter(table, places, updates, axis)).modified


def gather(places="7,1", sizes="7, 8", x="5,8") -> ir.Model:
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{x}] t, int64[{places}] i) => (float[{sizes}] y) <int64[2] shape = {{{sizes}}}>
    {{ e = Expand (i, shape) y = GatherElements <axis = 0> (t, e) }}""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["e"].shape, values["e"].type = ir.Shape([int(n) for n in sizes.split(",")]), ir.TensorType(ir.DataType.INT64)
    return model


def test_whole_rows_are_gathered():
    model = gather()
    assert GatherRowsPass()(model).modified and "GatherElements" not in operators(model)
    feeds = feeds_for((5, 8), (7, 1), (7, 8), 5)
    del feeds["u"]
    np.testing.assert_array_equal(run(model, feeds), feeds["t"][feeds["i"][:, 0]])


@pytest.mark.parametrize("changed", [{"places": "1,8"}, {"x": "5,9"}, {"places": "7,8"}])
def test_what_is_not_a_whole_row_stays(changed):
    assert not GatherRowsPass()(gather(**changed)).modified


class Graph(nn.Module):
    """Sums over neighbours."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.register_buffer("edges", torch.tensor([[0, 1, 1, 3, 2, -1], [3, 0, 0, 1, 0, 2]]))

    def forward(self, x):
        source, target = self.edges
        sums = torch.zeros(4, 16).index_add(0, target, self.linear(x[:4])[source].tanh())
        return (sums * sums.roll(1, 0)).mean()


def test_a_graph_s_convolution_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("GatherRowsPass", Graph, [8], replaces="GatherElements")


def looked_up(rows="5", count="7", name="step/s", table="5,64", zeros=True, more="", width=64) -> ir.Model:
    """A lookup and the gradient of its table, or the sum of that and `t`."""
    start = "ConstantOfShape (shape)" if zeros else "Identity (t)"
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{table}] t, int64[{count}] i, float[{count},{width}] u) => (float[{table}] y, float[{count},{width}] r)
    <int64[2] shape = {{{rows}, {width}}}, int64[1] one = {{1}}> {{
      r = Gather <axis = 0> (t, i) {more}
      z = {start} c = Unsqueeze (i, one) k = Shape (u) e = Expand (c, k)
      s = ScatterElements <axis = 0, reduction = "add"> (z, e, u) y = Neg (s) }}""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    sizes = {"z": table, "c": f"{count},1", "e": f"{count},{width}", "s": table, "r": f"{count},{width}"}
    for key, size in sizes.items():
        values[key].shape = ir.Shape([int(n) if n.isdigit() else n for n in size.split(",")])
        values[key].type = ir.TensorType(ir.DataType.INT64 if key in "ce" else ir.DataType.FLOAT)
    values["s"].producer().name = name
    return model


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("count, given", [("7", 7), ("N", 7), ("N", 0)])
def test_the_gradient_of_a_small_table_is_a_product(count, given, zeros):
    model = looked_up(count=count, zeros=zeros)
    assert FlatScatterPass()(model).modified
    assert "ScatterElements" not in operators(model) and {"OneHot", "MatMul"} <= operators(model)
    feeds = feeds_for((5, 64), (given,), (given, 64), 5)  # places that count from the back among them
    sums = np.zeros((5, 64)) if zeros else feeds["t"].astype(np.float64)
    np.add.at(sums, feeds["i"], feeds["u"])
    np.testing.assert_allclose(run(model, feeds), -sums, atol=1e-5)
    if not given:
        return
    feeds["i"][2] = 5
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(model, feeds)


OF_PLACES = {
    "many rows": {"rows": "500", "table": "500,64"},
    "the forward": {"name": "node_index_add"},
    "a gradient that may be infinite": {"more": "l = Log (r)"},
}


@pytest.mark.parametrize("changed", OF_PLACES.values(), ids=OF_PLACES)
def test_these_are_added_at_their_places(changed):
    model = looked_up(**changed)
    assert FlatScatterPass()(model).modified
    assert "OneHot" not in operators(model) and "ScatterElements" in operators(model)


@pytest.mark.parametrize(
    "count, table, zeros",
    [("41", "150", True), ("41", "150", False), ("N", "150", True), ("N", "150", False), ("N", "M", True)],
)
@pytest.mark.parametrize("blocks, columns", [(1, 1), (4, 1), (7, 1), (1, 4), (1, 7), (2, 3)])
def test_many_rows_are_added_some_at_a_time(blocks, columns, count, table, zeros, monkeypatch):
    found = pieces.Pieces(-(-41 // blocks), blocks, columns)
    monkeypatch.setattr(rows_of_tables, "pieces_of", lambda node, sizes, alone: found)
    model = looked_up(rows="150", table=f"{table},64", count=count, zeros=zeros)
    assert FlatScatterPass({}, lambda: True)(model).modified
    for_any_number = "Loop" in [node.op_type for node in model.graph.all_nodes()]
    assert for_any_number == (count == "N" or blocks > 1) and "ScatterElements" not in operators(model)
    for given in [41] if count == "41" else [41, 1, 0, 3, 40, 43, 44, 45, 300]:
        feeds = feeds_for((150, 64), (given,), (given, 64), 5)  # places that repeat, and that count from the back
        sums = np.zeros((150, 64), np.float32) if zeros else feeds["t"].copy()
        for place, row in zip(feeds["i"], feeds["u"]):
            sums[place] += row
        np.testing.assert_array_equal(run(model, feeds), -sums)  # one after the other: to the last bit
        if given:
            feeds["i"][given // 2] = 150
            with pytest.raises(Exception, match=r"out of data bounds|invalid ind"):
                run(model, feeds)


def scattered_rows(rows, width, height) -> ir.Node:
    model = looked_up(rows="5", table=f"{height},{width}", count=str(rows), width=width)
    return next(node for node in model.graph if node.op_type == "ScatterElements")


@pytest.mark.parametrize("height", [50, 3_000, 100_000, "N"])
@pytest.mark.parametrize("width", [8, 96, 1_000])
@pytest.mark.parametrize("rows", [1, 700, 5_000, 60_000])
def test_one_thread_adds_each_piece_and_no_other_pieces_would_be_faster(rows, width, height):
    node, size = scattered_rows(rows, width, height), (rows if height == "N" else height) * width
    fit = [
        pieces.Pieces(each, -(-rows // each), columns)
        for each in {-(-rows // blocks) for blocks in range(1, 65)}
        for columns in range(1, pieces.MOST + 1)
        if each * -(-width // columns) <= pieces.PIECE
    ]
    fastest = min((each.nanoseconds(rows, width, size) for each in fit), default=np.inf)
    found = pieces.pieces_of(node, {"N": rows})
    if found is None:
        assert fastest >= pieces.PLACED * rows * width
    else:
        assert found.rows * -(-width // found.columns) <= pieces.PIECE and found.rows * found.blocks >= rows
        assert found.nanoseconds(rows, width, size) <= fastest


@pytest.mark.parametrize(
    "rows, width, height, expected",
    [
        (4_000, 64, 500, pieces.Pieces(2048, 2, 1)),  # a copy of the table is nothing
        (1_024, 768, 1_024, pieces.Pieces(1024, 1, 6)),  # a copy of it is much, and places are few
        (7, 64, 20_000, None),  # a copy of it is more than all that is added
        (60_000, 1_000, 60_000, None),  # too many pieces
        (32_768, 2, 16_384, pieces.Pieces(65_536, 1, 1)),  # short rows
        (32_768, 1, 16_384, None),  # no rows
        (500, 2, 16_384, None),  # few
    ],
)
def test_how_rows_are_added(rows, width, height, expected):
    assert pieces.pieces_of(scattered_rows(rows, width, height), {}) == expected


@pytest.mark.parametrize("rows, height, at_once", [(60_000, 20_000, True), (60_000, 100, False), (1_000, 100, False)])
def test_one_thread_adds_all_rows_at_once_where_a_copy_of_the_table_is_much(rows, height, at_once):
    node = scattered_rows(rows, 64, height)
    assert (pieces.pieces_of(node, {}, alone=True) == pieces.Pieces(None, 1, 1)) == at_once
    assert pieces.pieces_of(node, {}, alone=False) != pieces.Pieces(None, 1, 1)


def test_sizes_of_a_batch_and_their_products_are_known():
    node = scattered_rows("N", 64, "M")
    for x, rows in zip(node.inputs, ("time*batch", "64*batch", "64*batch")):
        x.shape = ir.Shape([rows, 64])
    assert pieces.pieces_of(node, {"batch": 16, "time": 32}) == pieces.pieces_of(scattered_rows(1024, 64, 512), {})
    assert pieces.pieces_of(node, {"batch": 16}) is None
    node.inputs[0].shape = ir.Shape(["2*batch + time + 1", 64])
    assert pieces.pieces_of(node, {"batch": 16, "time": 32}) == pieces.pieces_of(scattered_rows(1024, 64, 65), {})


def test_a_table_of_unknown_size_is_not_added_to_in_pieces():
    model = scatter(("R", 64), (400, 1), (400, 64))
    assert FlatScatterPass({}, lambda: True)(model).modified
    assert "ScatterND" not in operators(model)


@pytest.mark.parametrize("width, changes", [(1, False), (2, True), (3, True), (7, True)])
def test_short_rows_are_added_as_rows_or_stay(width, changes):
    sizes = (50, width), (9_000, 1), (9_000, width)
    model = scatter(*sizes)
    assert FlatScatterPass({}, lambda: True)(model).modified == changes
    assert ("ScatterND" in operators(model)) == changes
    feeds = feeds_for(*sizes, 50)
    np.testing.assert_array_equal(run(model, feeds), run(scatter(*sizes), feeds))  # in the same order
    assert not FlatScatterPass({}, lambda: False)(scatter(*sizes)).modified


REDUCED = [("mul", "float"), ("max", "float"), ("min", "double"), ("add", "double"), ("max", "int32"), ("add", "int64")]


@pytest.mark.parametrize("reduction, dtype", REDUCED)
@pytest.mark.parametrize("rows, given", [(400, 400), ("N", 400), ("N", 3000), (3000, 3000)])
def test_rows_are_combined_in_pieces_by_any_reduction(rows, given, reduction, dtype):
    model = scatter((5, 64), (rows, 1), (rows, 64), 0, reduction, dtype)
    assert FlatScatterPass({"N": given}, lambda: True)(model).modified
    found = {node.op_type for node in model.graph.all_nodes()}
    assert "ScatterND" in found and "ScatterElements" not in found and ("Loop" in found) == (given > 400 or rows == "N")
    feeds = feeds_for((5, 64), (given, 1), (given, 64), 5, np.dtype(dtype.replace("float", "float32")))
    feeds["u"] = 1 + feeds["u"] / 100 if "int" not in dtype else feeds["u"] + np.arange(64, dtype=dtype)
    reduced = {"mul": np.multiply, "max": np.maximum, "min": np.minimum, "add": np.add}[reduction]
    wanted = feeds["t"].copy()
    reduced.at(wanted, feeds["i"][:, 0], feeds["u"])
    np.testing.assert_allclose(run(model, feeds), -wanted, rtol=1e-5)


@pytest.mark.parametrize("reduction, dtype", [("none", "float"), ("add", "float16")])
def test_what_is_only_placed_and_other_types_are_not_added_in_pieces(reduction, dtype):
    model = scatter((5, 64), (400, 1), (400, 64), 0, reduction, dtype)
    assert FlatScatterPass({}, lambda: True)(model).modified
    assert "ScatterND" not in operators(model)


class Loses:
    """A session that loses one of the numbers in rows of this width, in its last run, as two threads may that race."""

    def __init__(self, session, width):
        self.session, self.width, self.left = session, width, scattered.TIMES

    def run(self, names, feeds):
        (sums,), self.left = self.session.run(names, feeds), self.left - 1
        sums[0, -1] -= self.left == 0 and feeds["updates"].shape[1] == self.width
        return [sums]


@pytest.mark.parametrize("width", scattered.ROWS)
def test_a_runtime_that_loses_what_is_added_at_one_place_is_found_out(width, monkeypatch):
    scattered.adds_in_turn.cache_clear()
    assert scattered.adds_in_turn()
    session = runtime.checking_session
    monkeypatch.setattr(runtime, "checking_session", lambda model: Loses(session(model), width))
    scattered.adds_in_turn.cache_clear()
    assert not scattered.adds_in_turn()
    scattered.adds_in_turn.cache_clear()


def test_pieces_are_far_from_what_several_threads_share():
    assert 3 * pieces.PIECE < 2 * 210_000


class Letters(nn.Module):
    """Few letters, many of them."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(9, 64, padding_idx=0), nn.Linear(64, 9)

    def forward(self, x):
        letters = (x * 4).long().abs() % 9
        return nn.functional.cross_entropy(self.linear(self.table(letters)).flatten(0, 1), letters.flatten())


class Means(Graph):
    """Over more neighbours than are added at once."""

    def __init__(self):
        super().__init__()
        self.edges = torch.randint(0, 4, (2, 3000), generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return super().forward(x / 30)


@pytest.mark.parametrize("piece", [pieces.PIECE, 1000 * 16])
def test_a_graph_of_many_edges_trains_as_in_pytorch_with_and_without(piece, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", piece)
    assert_trains_with_and_without("FlatScatterPass", Means, [8], replaces=None)


def test_a_model_of_letters_trains_as_in_pytorch_with_and_without():
    assert_trains_with_and_without("FlatScatterPass", Letters, [20], replaces=None)


@pytest.mark.parametrize("lines, changes", [(40, True), (4, False)])
def test_one_element_of_each_of_many_rows_is_placed_as_one_of_all(lines, changes):
    sizes = f"N,{lines},32"
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[{sizes},6] t, int64[{sizes},1] i) => (float[{sizes},6] y)
    {{ r = GatherElements <axis = 3> (t, i) n = Neg (r) s = ScatterElements <axis = 3> (t, i, n) y = Neg (s) }}""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["n"].shape, values["n"].type = ir.Shape(["N", lines, 32, 1]), ir.TensorType(ir.DataType.FLOAT)
    values["s"].shape, values["s"].type = ir.Shape(["N", lines, 32, 6]), ir.TensorType(ir.DataType.FLOAT)
    assert FlatScatterPass()(model).modified == changes
    feeds = feeds_for((2, lines, 32, 6), (2, lines, 32, 1), (1,), 6)
    wanted = feeds["t"].copy()
    np.put_along_axis(wanted, feeds["i"], -np.take_along_axis(wanted, feeds["i"], 3), 3)
    np.testing.assert_array_equal(run(model, {key: feeds[key] for key in "ti"}), -wanted)
