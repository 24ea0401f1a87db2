"""Places that are given by several numbers, as the number of a row."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, constant_array, same_shape
from orttrainer.graph.scopes import Form, put_all_in_place


class TuplesAsRowsPass(ir.passes.InPlacePass):
    """GatherND(x, Concat(i, j)) -> Gather(rows of x, i * columns + j); of numbers, where rows are of any length.

    GatherND computes and checks each place by itself, and its gradient adds to each number by a place of its own. Those of
    rows know better: of 16,384 rows of 32 numbers the gradient takes 17 -> 2 ms. `i * columns` is looked up by i, so that
    what is outside of x is an error still, and counts from the back as before. To come before gradients.

    What each pair of features gives, `z[:, i, j]`, torch's exporter reads between two Transposes: its rows are as long as
    the batch. Number by number along the last axis it is read as it lies: of 1,024 x 40 x 40, both ways, 18 -> 5 ms.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "GatherND" and not node.domain]
        forms = {node: form for node in nodes if (form := _form(node)) is not None}
        return put_all_in_place(model, "tuples", list(forms), lambda op, node: forms[node](op, node))


def _form(node: ir.Node) -> Form | None:
    x, indices = node.inputs
    if x.shape is None or indices.shape is None or node.attributes.get_int("batch_dims", 0):
        return None
    depth, known = indices.shape[-1], [isinstance(n, int) and n > 0 for n in x.shape.dims]
    if not isinstance(depth, int):
        return None
    if all(known[1:]):
        return _by_rows
    if all(known[:depth]) and _brings_to_front(x.producer(), depth):
        return _by_numbers
    return _by_rows if depth == 1 else None


def _brings_to_front(node: ir.Node | None, count: int) -> bool:
    """Whether a Transpose moves the last `count` axes, and not all, before the others."""
    perm = list(node.attributes.get_ints("perm", [])) if node is not None and node.op_type == "Transpose" else []
    return count < len(perm) and perm == [*range(len(perm) - count, len(perm)), *range(len(perm) - count)]


def _by_numbers(op: Builder, node: ir.Node) -> ir.Value:
    """From `x` [.., sizes] at places [..] the numbers, [places, ..]."""
    front, indices = node.inputs
    x = front.producer().inputs[0]
    depth, lead = indices.shape[-1], len(front.shape) - indices.shape[-1]
    table = op.Reshape(x, [0] * lead + [math.prod(front.shape.dims[:depth])])
    row = _row(op, front, _parts(op, indices))
    row.shape = ir.Shape(indices.shape.dims[:-1])
    found = op.Gather(table, row, axis=lead)
    return op.Transpose(found, perm=[*range(lead, len(found.shape)), *range(lead)])


def _by_rows(op: Builder, node: ir.Node) -> ir.Value:
    x, indices = node.inputs
    parts = _parts(op, indices)
    if len(parts) == 1:
        return op.Gather(x, parts[0], axis=0)
    row = _row(op, x, parts)
    row.shape = ir.Shape(indices.shape.dims[:-1])
    return op.Gather(op.Reshape(x, [-1, *x.shape.dims[len(parts) :]]), row, axis=0)


def _row(op: Builder, x: ir.Value, parts: list[ir.Value]) -> ir.Value:
    """The numbers of the places, of all in the first axes of `x`."""
    rows = (op.Gather(starts(op, x, axis, len(parts)), part, axis=0) for axis, part in enumerate(parts))
    return functools.reduce(op.Add, rows)


def starts(op: Builder, x: ir.Value, axis: int, depth: int) -> ir.Value:
    """The number of the first place in each slice of `x` along an axis, of all places in the first `depth` axes."""
    size, stride = x.shape[axis], math.prod(x.shape.dims[axis + 1 : depth])
    known = isinstance(size, int)
    end = np.int64(size * stride) if known else op.Squeeze(op.Mul(op.dim(x, axis), np.int64(stride)), [0])
    return op.Range(np.int64(0), end, np.int64(stride))


def _parts(op: Builder, indices: ir.Value) -> list[ir.Value]:
    """The numbers of each place, apart: as they were before they were put together; what others repeat, once."""
    depth, joined = indices.shape[-1], indices.producer()
    columns = list(joined.inputs) if joined is not None and _joins_columns(joined, len(indices.shape)) else []
    if len(columns) != depth:
        columns = [indices] if depth == 1 else op.Split(indices, np.ones(depth, np.int64), axis=-1, outputs=depth)
    parts = [_without_last(op, column) for column in columns]
    whole = [part for part in parts if _repeated(part) is None]
    return [_repeated(p) if p not in whole and any(same_shape(p, other) for other in whole) else p for p in parts]


def _joins_columns(node: ir.Node, rank: int) -> bool:
    """Whether a Concat puts columns, each of one number, side by side."""
    return (
        node.op_type == "Concat"
        and not node.domain
        and node.attributes.get_int("axis") % rank == rank - 1
        and all(x.shape is not None and x.shape[-1] == 1 for x in node.inputs)
    )


def _without_last(op: Builder, column: ir.Value) -> ir.Value:
    node, last = column.producer(), len(column.shape) - 1
    if node is not None and node.op_type == "Unsqueeze" and not node.domain:
        axes = constant_array(node.inputs[1])
        if axes is not None and [axis % (last + 1) for axis in axes.tolist()] == [last]:
            return node.inputs[0]
    return op.Squeeze(column, [last])


def _repeated(part: ir.Value) -> ir.Value | None:
    """What an Expand repeats."""
    node = part.producer()
    return node.inputs[0] if node is not None and node.op_type == "Expand" and not node.domain else None
