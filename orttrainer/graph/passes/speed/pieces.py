"""Rows that ScatterND adds to a table at places that repeat, no more numbers at a time than it adds in one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed.tile_products import length_at_hand
from orttrainer.graph.passes.speed.usual_batch import either

PIECE = 2**17  # numbers that ScatterND adds in one thread: it takes two from 210,000 on, which race
MOST = 64  # blocks of columns
SHAPED = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
# Nanoseconds, of a Zen 3 and a Zen 4.
PLACED = 4.0  # to add a number at its place, as ScatterElements does
ADDED, ROW = 0.5, 20.0  # as one of a row, and for the row
COPIED = 0.2  # a number of the table, of which ScatterND makes a copy first, or one that is split off or joined
COPIED_FAR, FAR = 0.45, 2**21  # of a table of so many, which is not in the cache
NODE = 5000.0


@dataclass(frozen=True)
class Pieces:
    """Blocks of rows, one added behind the other in a Loop, and of columns, each added to columns of the table and joined.

    Every block of rows costs a copy of the table, and the loop one more; every further block of columns a pass through all
    places.

    Attributes:
        rows: in a block.
        blocks: of rows, in the batch at hand.
        columns: blocks of columns.
    """

    rows: int
    blocks: int
    columns: int

    def nanoseconds(self, rows: int, width: int, size: int) -> float:
        """Of `rows` into a table of `size` numbers."""
        split = 2 * COPIED * (rows * width + size) if self.columns > 1 else 0.0
        each = NODE * self.blocks * self.columns + ROW * rows * self.columns + ADDED * rows * width
        return each + split + (self.blocks + (self.blocks > 1)) * size * _to_copy(size)


@dataclass(frozen=True)
class Gathered:
    """Rows that are read from elsewhere, to be read as they are added: they are never all there.

    Attributes:
        source: [height, ...].
        places: of the rows in there, [rows].
    """

    source: ir.Value
    places: ir.Value


def pieces_of(node: ir.Node, sizes: Mapping[str, int]) -> Pieces | None:
    """How to add the rows of a ScatterElements along the first axis; None where that is not faster.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
    """
    table, _, updates = node.inputs
    lengths = [length_at_hand(x, 0, sizes) for x in (table, updates)]
    if (
        table.dtype != ir.DataType.FLOAT
        or not all(lengths)
        or not all(isinstance(n, int) for n in table.shape.dims[1:])
    ):
        return None
    (height, rows), width = lengths, math.prod(table.shape.dims[1:])
    size = height * width
    found = [_pieces(rows, width, columns) for columns in range(-(-width // PIECE), MOST + 1)]
    best = min(found, key=lambda pieces: pieces.nanoseconds(rows, width, size), default=None)
    in_one_go = rows * width * PLACED + size * _to_copy(size)
    return best if best is not None and best.nanoseconds(rows, width, size) < in_one_go else None


def added(op: Builder, node: ir.Node, at: ir.Value, pieces: Pieces) -> ir.Value:
    """The result of `node`.

    Args:
        at: the places, [rows, 1].
    """
    table, _, updates = node.inputs
    if pieces.columns == 1:
        return _added(op, table, at, updates, pieces)
    width = math.prod(table.shape.dims[1:])
    widths = [len(part) for part in np.array_split(np.arange(width), pieces.columns)]
    columns = op.Split(op.Reshape(updates, [-1, width]), np.array(widths), axis=1, outputs=len(widths))
    if added_to_zeros(node.outputs[0]):
        zeros = {width: op.ConstantOfShape(op.Concat(op.dim(table, 0), [width], axis=0)) for width in set(widths)}
        tables = [zeros[width] for width in widths]
    else:
        tables = op.Split(op.Reshape(table, [-1, width]), np.array(widths), axis=1, outputs=len(widths))
    parts = [_added(op, table, at, part, pieces) for table, part in zip(tables, columns)]
    return op.reshape_as(op.Concat(*parts, axis=1), table)


def _added(op: Builder, table: ir.Value, at: ir.Value, updates: ir.Value, pieces: Pieces) -> ir.Value:
    if pieces.blocks > 1:
        return _some_at_a_time(op, table, at, updates, pieces.rows)
    if isinstance(updates.shape[0], int):
        return _at_once(op, table, at, updates)
    return either(
        op, op.Squeeze(op.LessOrEqual(op.dim(at, 0), np.array([pieces.rows]))), table,
        lambda inner: _at_once(inner, table, at, updates),
        lambda inner: _some_at_a_time(inner, table, at, updates, pieces.rows),
    )  # fmt: skip


def _at_once(op: Builder, table: ir.Value, at: ir.Value, updates: ir.Value) -> ir.Value:
    return op.ScatterND(table, at, updates, reduction="add")


def _some_at_a_time(op: Builder, table: ir.Value, at: ir.Value, updates: ir.Value, most: int) -> ir.Value:
    """A loop over pieces of `most` rows, the last of what is left."""
    gathered, name = _gathered(op, updates), op.new_name("Loop")
    count = op.Div(op.Add(op.dim(at, 0), np.array([most - 1])), np.array([most]))
    index, on = (ir.Value(name=f"{name}/{key}", type=ir.TensorType(dtype), shape=ir.Shape([])) for key, dtype in LOOPS)
    before = ir.Value(name=f"{name}/before", type=table.type, shape=table.shape.copy())
    graph = ir.Graph([index, on, before], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
    inner = Builder(graph, name)
    start = inner.Mul(inner.Reshape(index, [1]), np.array([most]))
    end = inner.Add(start, np.array([most]))
    if gathered is None:
        rows = inner.Slice(updates, start, end, [0])
    else:
        rows = inner.Gather(gathered.source, inner.Slice(gathered.places, start, end, [0]), axis=0)
    graph.outputs.extend([inner.Identity(on), _at_once(inner, before, inner.Slice(at, start, end, [0]), rows)])
    loop = ir.Node("", "Loop", [op.Squeeze(count, [0]), None, table], [ir.AttrGraph("body", graph)], name=name)
    (y,) = loop.outputs
    y.name, y.type, y.shape = name, table.type, table.shape.copy()
    op.graph.append(loop)
    return y


def _gathered(op: Builder, updates: ir.Value) -> Gathered | None:
    """What `updates` are read from or repeat, if nothing else needs them."""
    dims, rows = updates.shape.dims[1:], updates
    while _is_read_once(rows) and (node := rows.producer()) is not None and node.op_type in SHAPED:
        rows = node.inputs[0]
    node = rows.producer()
    if node is None or node.domain or not _is_read_once(rows) or node.inputs[0].shape is None:
        return None
    source = node.inputs[0]
    if node.op_type == "Gather" and not node.attributes.get_int("axis", 0) and source.shape.dims[1:] == dims:
        return Gathered(source, op.Reshape(node.inputs[1], [-1]))
    if node.op_type == "Expand" and _repeats_rows(node, dims):
        times = op.Gather(node.inputs[1], np.array([1]))
        numbers = op.Range(np.int64(0), op.Squeeze(op.Mul(op.dim(source, 0), times), [0]), np.int64(1))
        return Gathered(op.Squeeze(source, [1]), op.Div(numbers, times))
    return None


def _repeats_rows(expand: ir.Node, dims: Sequence[int]) -> bool:
    """[n, 1, *dims] -> [n, times, *dims]."""
    (source, shape), (rows,) = expand.inputs, expand.outputs
    if rows.shape is None or shape.shape is None or not len(source.shape) == len(rows.shape) == shape.shape[0] > 1:
        return False
    repeats = same_dim(source.shape[0], rows.shape[0]) and source.shape[1] == 1
    return repeats and source.shape.dims[2:] == rows.shape.dims[2:] == dims


def _is_read_once(x: ir.Value) -> bool:
    """Not counting who asks for its shape, which here are the places that are made of it."""
    return not x.is_graph_output() and sum(node.op_type != "Shape" for node, _ in x.uses()) == 1


def _pieces(rows: int, width: int, columns: int) -> Pieces:
    """As many rows at a time as one thread adds, of `columns` blocks of columns."""
    most = PIECE // -(-width // columns)
    return Pieces(most, -(-rows // most), columns)


def _to_copy(size: int) -> float:
    return COPIED if size < FAR else COPIED_FAR


LOOPS = {"index": ir.DataType.INT64, "on": ir.DataType.BOOL}.items()  # what ONNX gives the body of a Loop
