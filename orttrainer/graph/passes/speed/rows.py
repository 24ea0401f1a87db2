"""Rows of a table that are read or added to at places, each place given once for every element of its row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim, static_dims
from orttrainer.graph.infinite import is_backward, may_be_infinite
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed.pieces import PLACED, Pieces, added, pieces_of
from orttrainer.graph.passes.speed.row_blocks import SHAPED
from orttrainer.graph.scopes import put_all_in_place, put_in_place

LEAST_ROW = 8  # elements, from which on their places are computed faster than ONNX Runtime goes down the columns
LEAST_LINES = 1024  # of which one element each is placed, likewise
ONE_NS = 1.5  # to make one element of a matrix of ones and zeros; with two threads of an Intel Xeon, as the next
PRODUCT_NS = 0.008  # to multiply it by a number of a row


class GatherRowsPass(ir.passes.InPlacePass):
    """GatherElements(x, Expand(places)) along the first axis -> Gather(x, places), where that reads whole rows.

    This is the gradient of `index_add`, which torch's exporter writes as ScatterElements: of 4,000 rows of 64 numbers, 0.8
    -> 0.05 ms, the Expand among it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [
            node for node in model.graph if node.op_type == "GatherElements" and not node.domain and _reads_rows(node)
        ]
        return put_all_in_place(model, "rows", nodes, _gathered)


class FlatScatterPass(ir.passes.InPlacePass):
    """ScatterElements(table, places, updates) along an axis that others lie behind -> the same on one axis of all elements.

    ONNX Runtime's kernel goes down one column after the other, which lie apart in memory, and wants a place for each element
    in any case: computed from that of the row, they cost no more than its copies do. 4,000 rows of 64 numbers into 500:
    2.0 -> 1.0 ms; 3,584 into 5,000, 2.5 to 3.8 -> 1.1; 1,024 of 256 into 30,522, the zeros among it, 9.5 -> 8.5. Places that
    repeat are added in the same order. One past the end of the table is past the end still; behind other axes it would be in
    the next part, so there only what has been read at the same places is placed like this.

    The gradient of a small table, of letters or of kinds, is a product with a matrix of ones and zeros: 16,384 rows of 384
    into 65, 49 ms in one thread -> 4.9 in two, 1,024 of 256 into 2, 0.73 -> 0.06.

    ScatterND adds whole rows as vectors, to the same bits, but in several threads at once where there is much to add: so in
    blocks of rows or of columns, where the table is quickly copied for each; one thread adds them all at once. 4,000 rows of 64 numbers into 500: 0.76 -> 0.13 ms.
    A row costs about the same whether it has two numbers or eight: 32,768 of 4 into 16,384, 0.43 -> 0.16 ms. Rows that are
    gathered, or repeated, just for this, are so a block at a time: they are never all there.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
        in_turn: whether ScatterND adds `PIECE` numbers in one thread.
        alone: whether there is one thread, which adds any number.
    """

    def __init__(
        self, sizes: Mapping[str, int] | None = None, in_turn: Callable[[], bool] = lambda: False, alone: bool = False
    ):
        super().__init__()
        self.sizes, self.in_turn, self.alone = sizes or {}, in_turn, alone

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if node.op_type == "ScatterElements" and not node.domain and _is_of_rows(node)]
        pieces = {node: found for node in nodes if (found := self._pieces(node)) is not None}
        nodes = [node for node in nodes if node in pieces or _is_long(node)]
        op = Builder(graph, "flat") if nodes else None
        some_at_a_time = {node for node, found in pieces.items() if found.blocks > 1 and found.columns == 1}
        for node in nodes:
            if node in pieces:
                form = functools.partial(_in_pieces, pieces=pieces[node], others=some_at_a_time)
            else:
                form = _product if _is_small(node) else _flat
            with op.scope(node.name):
                put_in_place(op, node, form)
        if nodes:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))

    def _pieces(self, node: ir.Node) -> Pieces | None:
        reduces = node.attributes.get_string("reduction", "none") != "none"
        if not reduces or _is_small(node) or _axis(node) or _column(node.inputs[1], 0) is None:
            return None
        found = pieces_of(node, self.sizes, self.alone)
        return found if found is not None and self.in_turn() else None


def _gathered(op: Builder, node: ir.Node) -> ir.Value:
    return op.Gather(node.inputs[0], op.Reshape(_column(node.inputs[1], 0), [-1]), axis=0)


def _product(op: Builder, node: ir.Node) -> ir.Value:
    """The rows that go to a place are those where its row of a matrix has ones."""
    table, places, updates = node.inputs
    rows, *row = table.shape.dims
    ones = op.OneHot(op.Reshape(_column(places, 0), [-1]), np.int64(rows), np.array([0, 1], np.float32), axis=0)
    sums = op.reshape_as(op.MatMul(ones, op.Reshape(updates, [-1, math.prod(row)])), table)
    return sums if added_to_zeros(node.outputs[0]) else op.Add(table, sums)


def _flat(op: Builder, node: ir.Node) -> ir.Value:
    table, places, updates = node.inputs
    axis, dims = _axis(node), static_dims(table)
    rows, behind = table.shape[axis], math.prod(table.shape.dims[axis + 1 :])
    dtype = ir.DataType.INT64 if dims is None or math.prod(dims) >= 2**31 else ir.DataType.INT32
    number = dtype.numpy().type
    column = _column(places, axis)
    at = op.Reshape(places if column is None else column, [-1])  # since single numbers are slow to meet other shapes
    if at.dtype != dtype:
        at = op.Cast(at, to=int(dtype))
    first = _is_first(table, axis)
    if not first:  # else what counts from the back still does
        at = op.Where(op.Less(at, number(0)), op.Add(at, number(rows)), at)
    if behind != 1:
        at = op.Mul(at, number(behind))
    lead = op.const(np.int64(1)) if first or column is not None else op.size(updates, list(range(axis)))
    shape = op.Concat(op.Reshape(lead, [1]), op.dim(updates, axis), [1 if column is not None else behind], axis=0)
    at = op.Reshape(at, shape, allowzero=1)  # of none, too
    if not first:
        at = op.Add(at, op.Mul(_numbers(op, updates, axis, dtype), number(rows * behind)))
    if behind != 1:
        at = op.Add(at, np.arange(behind).astype(number))
    whole = op.ScatterElements(
        op.Reshape(table, [-1]), op.Reshape(at, [-1]), op.Reshape(updates, [-1]), axis=0,
        reduction=node.attributes.get_string("reduction", "none"),
    )  # fmt: skip
    return op.reshape_as(whole, table)


def _in_pieces(op: Builder, node: ir.Node, pieces: Pieces, others: Collection[ir.Node]) -> ir.Value:
    return added(op, node, op.Reshape(_column(node.inputs[1], 0), [-1, 1]), pieces, others)


def _numbers(op: Builder, updates: ir.Value, axis: int, dtype: ir.DataType) -> ir.Value:
    """0, 1, ... for what lies before `axis`, [.., 1, 1]."""
    known = [size for size in updates.shape.dims[:axis] if isinstance(size, int)]
    if len(known) == axis:
        return op.const(np.arange(math.prod(known)).astype(dtype.numpy()).reshape(-1, 1, 1))
    count = op.Mul(op.dim(updates, 0), np.array([math.prod(known)]))
    numbers = op.Range(np.int64(0), op.Squeeze(count, [0]), np.int64(1))
    return op.Reshape(op.Cast(numbers, to=int(dtype)), [-1, 1, 1])


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get_int("axis", 0)
    return axis if axis >= 0 else axis + len(node.inputs[0].shape)


def _column(places: ir.Value, axis: int) -> ir.Value | None:
    """What `places` repeats along all axes but `axis`."""
    expand = places.producer()
    if expand is None or expand.domain or expand.op_type != "Expand":
        return None
    column = expand.inputs[0]
    if column.shape is None or places.shape is None or len(column.shape) != len(places.shape):
        return None
    whole = same_dim(column.shape[axis], places.shape[axis])
    return column if whole and all(size == 1 for k, size in enumerate(column.shape.dims) if k != axis) else None


def _is_first(table: ir.Value, axis: int) -> bool:
    return all(size == 1 for size in table.shape.dims[:axis])


def _reads_rows(node: ir.Node) -> bool:
    x, places = node.inputs
    if any(v.shape is None for v in (x, places)) or len(x.shape) < 2 or _axis(node) != 0:
        return False
    return _column(places, 0) is not None and all(map(same_dim, x.shape.dims[1:], places.shape.dims[1:]))


def _is_of_rows(node: ir.Node) -> bool:
    """Whether whole rows are placed, of known sizes."""
    table, _, updates = node.inputs
    if any(x.shape is None or x.dtype is None for x in node.inputs) or node.outputs[0].is_graph_output():
        return False  # which ONNX Runtime would copy to be reshaped
    axis = _axis(node)
    behind = table.shape.dims[axis + 1 :]
    if not all(isinstance(size, int) for size in (*table.shape.dims[1:axis], *behind)):
        return False
    if not all(same_dim(a, b) for k, (a, b) in enumerate(zip(table.shape.dims, updates.shape.dims)) if k != axis):
        return False  # some of its columns only
    return _is_first(table, axis) or _is_read(node, axis) is not None


def _is_long(node: ir.Node) -> bool:
    """Whether the places of single elements are quickly computed."""
    (table, _, updates), axis = node.inputs, _axis(node)
    lines = math.prod(size for size in table.shape.dims[:axis] if isinstance(size, int))
    is_one_of_many = updates.shape[axis] == 1 and lines >= LEAST_LINES
    return is_one_of_many or math.prod(table.shape.dims[axis + 1 :]) >= LEAST_ROW


def _is_small(node: ir.Node) -> bool:
    """Whether this is the gradient of a table with so few rows that a product with ones and zeros is faster."""
    table, places, _ = node.inputs
    dims = static_dims(table)
    if dims is None or table.dtype != ir.DataType.FLOAT or _axis(node) != 0 or _column(places, 0) is None:
        return False
    if node.attributes.get_string("reduction", "none") != "add" or not is_backward(node):
        return False
    lookup, row = _is_read(node, 0), math.prod(dims[1:])
    if lookup is None or lookup.op_type != "Gather" or may_be_infinite(lookup.outputs[0]):
        return False
    return dims[0] * (ONE_NS + PRODUCT_NS * row) < PLACED * row


def _is_read(node: ir.Node, axis: int) -> ir.Node | None:
    """The operator that has read a table of this size at the same places, and fails for any that is outside of it."""
    table, places, _ = node.inputs
    size, column = table.shape[axis], places if _column(places, axis) is None else _source(_column(places, axis))
    if not isinstance(size, int):
        return None
    for use in (*places.uses(), *column.uses()):
        reader, at = use.node, places if use.node.op_type == "GatherElements" else column
        if reader.domain or reader.op_type not in ("Gather", "GatherElements") or reader.inputs[1] is not at:
            continue
        if reader.inputs[0].shape is not None and _axis(reader) == axis and reader.inputs[0].shape[axis] == size:
            return reader
    return None


def _source(places: ir.Value) -> ir.Value:
    """What gives `places`, in another shape."""
    while (node := places.producer()) is not None and not node.domain and node.op_type in SHAPED:
        places = node.inputs[0]
    return places
