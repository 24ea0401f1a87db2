"""Rows that are added to a table in blocks, each made of the same rows of what they are made of."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

import orttrainer
from orttrainer import phase
from orttrainer.graph.passes.speed import pieces
from orttrainer.graph.passes.speed import rows as rows_of_tables
from orttrainer.graph.passes.speed.rows import FlatScatterPass


def run(model: ir.Model, feeds):
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


ROWS_FROM = {
    "gathered": "float[30,64] x, int64[{n}] j) => (float[20,64] y) {{ u = Gather <axis = 0> (x, j)",
    "gathered by matrices": """float[30,64] x, int64[{m},3] j) => (float[20,64] y) <int64[2] whole = {{-1, 64}}>
        {{ r = Gather <axis = 0> (x, j) u = Reshape (r, whole)""",
    "repeated": """float[{m},1,64] x) => (float[20,64] y) <int64[2] whole = {{-1, 64}}, int64[3] three = {{1, 3, 1}}>
        {{ r = Expand (x, three) u = Reshape (r, whole)""",
}


@pytest.mark.parametrize("n, m, given", [("42", "14", 42), ("N", "M", 42), ("N", "M", 3), ("N", "M", 0)])
@pytest.mark.parametrize("form", ROWS_FROM)
def test_rows_from_elsewhere_are_read_a_block_at_a_time(form, n, m, given, monkeypatch):
    monkeypatch.setattr(rows_of_tables, "pieces_of", lambda node, sizes, alone: pieces.Pieces(8, 6, 1))
    model = ir.from_onnx_text(f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[20,64] t, int64[{n},1] i, {ROWS_FROM[form].format(n=n, m=m)}
       k = Shape (u) e = Expand (i, k) s = ScatterElements <axis = 0, reduction = "add"> (t, e, u) y = Neg (s) }}""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    sizes = {"u": [n, 64], "e": [n, 64], "s": [20, 64], "r": [m, 3, 64]}
    for name in sizes.keys() & values.keys():
        values[name].shape = ir.Shape([int(d) if str(d).isdigit() else d for d in sizes[name]])
        values[name].type = ir.TensorType(ir.DataType.INT64 if name == "e" else ir.DataType.FLOAT)
    assert FlatScatterPass({}, lambda: True)(model).modified
    RemoveUnusedNodesPass()(model)
    found = {(node.op_type, node.graph is model.graph) for node in model.graph.all_nodes()}
    assert ("Gather", False) in found and "u" not in {x.name for node in model.graph for x in node.outputs}
    rng = np.random.default_rng(0)
    places, source = rng.integers(-20, 20, (given, 1)), rng.integers(0, 30, given)
    x = rng.standard_normal({"repeated": (given // 3, 1, 64)}.get(form, (30, 64))).astype(np.float32)
    feeds = {"t": np.ones((20, 64), np.float32), "i": places, "x": x}
    if form != "repeated":
        feeds["j"] = source.reshape(-1, 3) if "matrices" in form else source
    sums = feeds["t"].copy()
    for place, row in zip(places[:, 0], x[:, 0].repeat(3, 0) if form == "repeated" else x[source]):
        sums[place] += row
    np.testing.assert_array_equal(run(model, feeds)[0], -sums)


MAXIMA = """<ir_version: 8, opset_import: ["" : 18]>
g (float[30,64] x, int64[{n}] j, int64[{n},1] i, float[20,64] low, int32[20,64] none) => (int32[20,64] y, float[20,64] b)
<int32 zero = {{0}}, int64[2] shape = {{{rows}, 64}}, int64[1] all = {{-1}}> {{
  u = Gather <axis = 0> (x, j) e = Expand (i, shape)
  best = ScatterElements <axis = 0, reduction = "max"> (low, e, u)
  at = Reshape (i, all) whole = Gather <axis = 0> (best, at) tied = Equal (u, whole)
  count = Cast <to = 6> (i) p = Where (tied, count, zero)
  first = ScatterElements <axis = 0, reduction = "max"> (none, e, p) y = Neg (first) b = Neg (best) {more} }}"""


@pytest.mark.parametrize(
    "more, there",
    [("", set()), ("again = Neg (u)", {"u"}), ("again = Cast <to = 1> (tied)", {"u", "tied"})],
    ids=["for blocks alone", "rows that are read", "what is made of them that is read"],
)
def test_what_is_made_of_rows_element_by_element_is_made_a_block_at_a_time(more, there, monkeypatch):
    monkeypatch.setattr(rows_of_tables, "pieces_of", lambda node, sizes, alone: pieces.Pieces(8, 6, 1))
    model = ir.from_onnx_text(MAXIMA.format(n=42, rows=42, more=more))
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["at"].shape, values["at"].type = ir.Shape([42]), ir.TensorType(ir.DataType.INT64)
    kinds = {"u": "FLOAT", "e": "INT64", "whole": "FLOAT", "tied": "BOOL", "count": "INT32", "p": "INT32"}
    for name, kind in kinds.items():
        values[name].shape = ir.Shape([42, 1 if name == "count" else 64])
        values[name].type = ir.TensorType(ir.DataType[kind])
    for name, kind in {"best": "FLOAT", "first": "INT32"}.items():
        values[name].shape, values[name].type = ir.Shape([20, 64]), ir.TensorType(ir.DataType[kind])
    if more:
        model.graph.outputs.append(values["again"])
    assert FlatScatterPass({}, lambda: True)(model).modified
    RemoveUnusedNodesPass()(model)
    assert {"u", "tied", "p", "whole"} & {x.name for node in model.graph for x in node.outputs} - {"whole"} == there
    rng = np.random.default_rng(0)
    x, j, i = rng.integers(0, 9, (30, 64)).astype(np.float32), rng.integers(0, 30, 42), rng.integers(0, 20, (42, 1))
    low = np.full((20, 64), -np.inf, np.float32)
    firsts, best = run(model, {"x": x, "j": j, "i": i, "low": low, "none": np.zeros((20, 64), np.int32)})[:2]
    wanted = np.stack([x[j][i[:, 0] == bag].max(0, initial=-np.inf) for bag in range(20)])
    np.testing.assert_array_equal(best, -wanted)
    tied = x[j] == wanted[i[:, 0]]
    np.testing.assert_array_equal(
        firsts, -np.stack([(tied * i)[i[:, 0] == bag].max(0, initial=0) for bag in range(20)])
    )


@pytest.mark.parametrize("given", [42, 3, 0])
def test_one_thread_adds_any_number_of_rows_at_once(given, monkeypatch):
    monkeypatch.setattr(rows_of_tables, "pieces_of", lambda node, sizes, alone: pieces.Pieces(None, 1, 1))
    model = ir.from_onnx_text("""<ir_version: 8, opset_import: ["" : 18]>
    g (float[20,64] t, int64[N,1] i, float[N,64] u) => (float[20,64] y) {
       k = Shape (u) e = Expand (i, k) s = ScatterElements <axis = 0, reduction = "add"> (t, e, u) y = Neg (s) }""")
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["e"].shape, values["e"].type = ir.Shape(["N", 64]), ir.TensorType(ir.DataType.INT64)
    values["s"].shape, values["s"].type = ir.Shape([20, 64]), ir.TensorType(ir.DataType.FLOAT)
    assert FlatScatterPass({}, lambda: True, alone=True)(model).modified
    RemoveUnusedNodesPass()(model)
    assert {node.op_type for node in model.graph.all_nodes()} == {"ScatterND", "Neg", "Reshape"}
    rng = np.random.default_rng(0)
    feeds = {"t": np.ones((20, 64), np.float32), "i": rng.integers(-20, 20, (given, 1))}
    feeds["u"] = rng.standard_normal((given, 64)).astype(np.float32)
    sums = feeds["t"].copy()
    np.add.at(sums, feeds["i"][:, 0], feeds["u"])
    np.testing.assert_array_equal(run(model, feeds)[0], -sums)


@pytest.mark.parametrize("threads, own, alone", [(1, None, True), (2, None, False), (1, 2, False), (2, 1, True)])
def test_a_session_is_asked_for_its_threads(threads, own, alone, monkeypatch):
    found, before = [], torch.get_num_threads()
    monkeypatch.setattr(
        phase, "FlatScatterPass", lambda sizes, in_turn, alone: found.append(alone) or FlatScatterPass(sizes, in_turn)
    )

    def configure(options, part):
        options.intra_op_num_threads = own

    module = torch.nn.Linear(2, 1)
    settings = {} if own is None else {"session_options": configure}
    try:
        torch.set_num_threads(threads)
        trainer = orttrainer.trainer(module, torch.nn.MSELoss(), torch.optim.SGD(module.parameters(), 0.1), **settings)
        trainer.step(torch.ones(2, 2), torch.ones(2, 1))
    finally:
        torch.set_num_threads(before)
    assert found and set(found) == {alone}
