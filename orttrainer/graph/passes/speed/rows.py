"""Rows of a table that are read or added to at places, each place given once for every element of its row."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim, static_dims, take_place
from orttrainer.graph.scopes import copy_scope

LEAST_ROW = 8  # elements, from which on their places are computed faster than ONNX Runtime goes down the columns


class GatherRowsPass(ir.passes.InPlacePass):
    """GatherElements(x, Expand(places)) along the first axis -> Gather(x, places), where that reads whole rows.

    This is the gradient of `index_add`, which torch's exporter writes as ScatterElements: of 4,000 rows of 64 numbers, 0.9
    -> 0.05 ms, the Expand among it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if node.op_type == "GatherElements" and not node.domain and _reads_rows(node)]
        op = Builder(graph, "rows") if nodes else None
        for node in nodes:
            x, places = node.inputs[0], _column(node.inputs[1], 0)
            y = op.Gather(x, op.Reshape(places, [-1]), axis=0)
            copy_scope(node, y.producer())
            take_place(y, node)
        if nodes:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))


class FlatScatterPass(ir.passes.InPlacePass):
    """ScatterElements(table, places, updates) along an axis that others lie behind -> the same on one axis of all elements.

    ONNX Runtime's kernel goes down one column after the other, which lie apart in memory, and wants a place for each element
    in any case: computed from that of the row, they cost no more than its copies do. 4,000 rows of 64 numbers into 500:
    2.0 -> 1.0 ms; 3,584 into 5,000, 2.5 to 3.8 -> 1.1; 1,024 of 256 into 30,522, the zeros among it, 9.5 -> 8.5. Places that
    repeat are added in the same order. One past the end of the table is past the end still; behind other axes it would be in
    the next part, so there only what a GatherElements has read at the same places is placed like this.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if node.op_type == "ScatterElements" and not node.domain and _pays(node)]
        op = Builder(graph, "flat") if nodes else None
        for node in nodes:
            with op.scope(node.name):
                before = set(graph)
                y = _flat(op, node)
                for new in graph:
                    if new not in before:
                        copy_scope(node, new)
            take_place(y, node)
        if nodes:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, bool(nodes))


def _flat(op: Builder, node: ir.Node) -> ir.Value:
    table, places, updates = node.inputs
    axis = _axis(node)
    places = places if (column := _column(places, axis)) is None else column
    rows, dims = table.shape[axis], static_dims(table)
    dtype = ir.DataType.INT64 if dims is None or math.prod(dims) >= 2**31 else ir.DataType.INT32
    number = dtype.numpy().type
    if places.dtype != dtype:
        places = op.Cast(places, to=int(dtype))
    if not _is_first(table, axis):  # else what counts from the back still does
        places = op.Where(op.Less(places, number(0)), op.Add(places, number(rows)), places)
    behind = table.shape.dims[axis + 1 :]
    within = np.arange(math.prod(behind)).astype(number).reshape([1] * (axis + 1) + list(behind))
    flat = op.Mul(places, number(within.size))
    for other in [k for k in range(axis) if table.shape[k] != 1]:
        flat = op.Add(flat, _offsets(op, table, other, updates, dtype))
    flat = op.Add(flat, within)
    whole = op.ScatterElements(
        op.Reshape(table, [-1]), op.Reshape(flat, [-1]), op.Reshape(updates, [-1]), axis=0,
        reduction=node.attributes.get_string("reduction", "none"),
    )  # fmt: skip
    return op.reshape_as(whole, table)


def _offsets(op: Builder, table: ir.Value, axis: int, updates: ir.Value, dtype: ir.DataType) -> ir.Value:
    """How many elements of `table` lie before each place along an axis, which `updates` has whole."""
    number, stride = dtype.numpy().type, math.prod(table.shape.dims[axis + 1 :])
    shape = [-1 if k == axis else 1 for k in range(len(table.shape))]
    if isinstance(size := table.shape[axis], int):
        return op.const((np.arange(size) * stride).astype(number).reshape(shape))
    numbers = op.Range(np.int64(0), op.Squeeze(op.dim(updates, axis), [0]), np.int64(1))
    return op.Reshape(op.Mul(op.Cast(numbers, to=int(dtype)), number(stride)), shape)


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


def _pays(node: ir.Node) -> bool:
    table, _, updates = node.inputs
    if any(x.shape is None or x.dtype is None for x in node.inputs) or node.outputs[0].is_graph_output():
        return False  # which ONNX Runtime would copy to be reshaped
    axis = _axis(node)
    behind = table.shape.dims[axis + 1 :]
    if not all(isinstance(size, int) for size in (*table.shape.dims[1:axis], *behind)) or math.prod(behind) < LEAST_ROW:
        return False
    if not all(same_dim(a, b) for k, (a, b) in enumerate(zip(table.shape.dims, updates.shape.dims)) if k != axis):
        return False  # some of its columns only
    return _is_first(table, axis) or _is_read_at(node, axis)


def _is_read_at(node: ir.Node, axis: int) -> bool:
    """Whether a GatherElements fails for any place that is outside of the table."""
    table, places, _ = node.inputs
    readers = (use.node for use in places.uses() if use.idx == 1 and use.node.op_type == "GatherElements")
    read = (
        reader.inputs[0].shape[axis]
        for reader in readers
        if reader.inputs[0].shape is not None and _axis(reader) == axis
    )
    return isinstance(table.shape[axis], int) and any(size == table.shape[axis] for size in read)
