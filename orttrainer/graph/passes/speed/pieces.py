"""Rows that ScatterND adds to a table at places that repeat, no more numbers at a time than it adds in one thread."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed.row_blocks import RowBlock
from orttrainer.graph.passes.speed.tile_products import length_at_hand
from orttrainer.graph.passes.speed.usual_batch import either

PIECE = 2**17  # numbers that ScatterND adds in one thread: it takes two from 210,000 on, which race
MOST = 64  # blocks of columns
REDUCED = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64}
# Nanoseconds, of a Zen 3 and two Zen 4.
PLACED = 4.0  # to add a number at its place, as ScatterElements does
ADDED, ROW = 0.5, 6.0  # as one of a row, and for the row
COPIED = 0.2  # a number of the table, of which ScatterND makes a copy first, or one that is split off or joined
WRITTEN = 0.4  # a number of all rows, which a block has in the cache
COPIED_FAR, FAR = 0.45, 2**21  # of a table of so many, which is not in the cache
NODE = 5000.0


@dataclass(frozen=True)
class Pieces:
    """Blocks of rows, one added behind the other in a Loop, and of columns, each added to columns of the table and joined.

    Every block of rows costs a copy of the table, and the loop one more; every further block of columns a pass through all
    places.

    Attributes:
        rows: in a block; None for any number in one.
        blocks: of rows, in the batch at hand.
        columns: blocks of columns.
    """

    rows: int | None
    blocks: int
    columns: int

    def nanoseconds(self, rows: int, width: int, size: int) -> float:
        """Of `rows` into a table of `size` numbers."""
        split = 2 * COPIED * (rows * width + size) if self.columns > 1 else 0.0
        each = NODE * self.blocks * self.columns + ROW * rows * self.columns + ADDED * rows * width
        if self.rows is None and rows * width > PIECE:
            each += WRITTEN * rows * width
        return each + split + (self.blocks + (self.blocks > 1)) * size * _to_copy(size)


def pieces_of(node: ir.Node, sizes: Mapping[str, int], alone: bool = False) -> Pieces | None:
    """How to add the rows of a ScatterElements along the first axis; None where that is not faster.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
        alone: whether there is one thread, so that no two race.
    """
    table, _, updates = node.inputs
    lengths = [length_at_hand(x, 0, sizes) for x in (table, updates)]
    if table.dtype not in REDUCED or not all(lengths) or not all(isinstance(n, int) for n in table.shape.dims[1:]):
        return None
    (height, rows), width = lengths, math.prod(table.shape.dims[1:])
    size = height * width
    found = [_pieces(rows, width, columns) for columns in range(-(-width // PIECE), MOST + 1)]
    found += [Pieces(None, 1, 1)] if alone else []
    best = min(found, key=lambda pieces: pieces.nanoseconds(rows, width, size), default=None)
    in_one_go = rows * width * PLACED + size * _to_copy(size)
    return best if best is not None and best.nanoseconds(rows, width, size) < in_one_go else None


def added(op: Builder, node: ir.Node, at: ir.Value, pieces: Pieces, others: Collection[ir.Node]) -> ir.Value:
    """The result of `node`.

    Args:
        at: the places, [rows, 1].
        others: nodes whose rows are added some at a time, too.
    """
    table, _, updates = node.inputs
    reduction = node.attributes.get_string("reduction")
    if pieces.columns == 1:
        return _Added(op, reduction, at, pieces, others).to(table, updates)
    width = math.prod(table.shape.dims[1:])
    widths = [len(part) for part in np.array_split(np.arange(width), pieces.columns)]
    columns = op.Split(op.Reshape(updates, [-1, width]), np.array(widths), axis=1, outputs=len(widths))
    if added_to_zeros(node.outputs[0]):
        zeros = {width: op.ConstantOfShape(op.Concat(op.dim(table, 0), [width], axis=0)) for width in set(widths)}
        tables = [zeros[width] for width in widths]
    else:
        tables = op.Split(op.Reshape(table, [-1, width]), np.array(widths), axis=1, outputs=len(widths))
    parts = [_Added(op, reduction, at, pieces, ()).to(table, part) for table, part in zip(tables, columns)]
    return op.reshape_as(op.Concat(*parts, axis=1), table)


@dataclass(frozen=True)
class _Added:
    """How rows are added to a table, or combined with it by another reduction: the arguments of `added`."""

    op: Builder
    reduction: str
    at: ir.Value
    pieces: Pieces
    others: Collection[ir.Node]

    def to(self, table: ir.Value, updates: ir.Value) -> ir.Value:
        if self.pieces.blocks > 1:
            return self._some_at_a_time(self.op, table, updates)
        if self.pieces.rows is None or isinstance(updates.shape[0], int):
            return self._at_once(self.op, table, self.at, updates)
        return either(
            self.op, self.op.Squeeze(self.op.LessOrEqual(self.op.dim(self.at, 0), np.array([self.pieces.rows]))), table,
            lambda inner: self._at_once(inner, table, self.at, updates),
            lambda inner: self._some_at_a_time(inner, table, updates),
        )  # fmt: skip

    def _at_once(self, op: Builder, table: ir.Value, at: ir.Value, updates: ir.Value) -> ir.Value:
        return op.ScatterND(table, at, updates, reduction=self.reduction)

    def _some_at_a_time(self, op: Builder, table: ir.Value, updates: ir.Value) -> ir.Value:
        """A loop over pieces, the last of what is left."""
        name, most = op.new_name("Loop"), self.pieces.rows
        count = op.Div(op.Add(op.dim(self.at, 0), np.array([most - 1])), np.array([most]))
        index, on = (
            ir.Value(name=f"{name}/{key}", type=ir.TensorType(dtype), shape=ir.Shape([])) for key, dtype in LOOPS
        )
        before = ir.Value(name=f"{name}/before", type=table.type, shape=table.shape.copy())
        graph = ir.Graph([index, on, before], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
        inner = Builder(graph, name)
        start = inner.Mul(inner.Reshape(index, [1]), np.array([most]))
        block = RowBlock(op, inner, start, inner.Add(start, np.array([most])), self.others)
        after = self._at_once(inner, before, block.of(self.at), block.of(updates))
        graph.outputs.extend([inner.Identity(on), after])
        loop = ir.Node("", "Loop", [op.Squeeze(count, [0]), None, table], [ir.AttrGraph("body", graph)], name=name)
        (y,) = loop.outputs
        y.name, y.type, y.shape = name, table.type, table.shape.copy()
        op.graph.append(loop)
        return y


def _pieces(rows: int, width: int, columns: int) -> Pieces:
    """As many rows at a time as one thread adds, of `columns` blocks of columns."""
    most = PIECE // -(-width // columns)
    return Pieces(most, -(-rows // most), columns)


def _to_copy(size: int) -> float:
    return COPIED if size < FAR else COPIED_FAR


LOOPS = {"index": ir.DataType.INT64, "on": ir.DataType.BOOL}.items()  # what ONNX gives the body of a Loop
