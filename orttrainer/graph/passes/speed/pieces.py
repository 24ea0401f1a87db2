"""Rows that ScatterND adds to a table at places that repeat, no more numbers at a time than it adds in one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.speed.tile_products import length_at_hand

PIECE = 2**16  # numbers that ScatterND adds in one thread: it takes two from 200,000 on, which race
MOST = 64
# Nanoseconds, of a Zen 3 and a Zen 4.
PLACED = 4.0  # to add a number at its place, as ScatterElements does
ADDED, ROW = 0.5, 20.0  # as one of a row, and for the row
COPIED = 0.2  # a number of the table, of which ScatterND makes a copy first, or one that is split off or joined
COPIED_FAR, FAR = 0.45, 2**21  # of a table of so many, which is not in the cache
NODE = 5000.0


@dataclass(frozen=True)
class Pieces:
    """Blocks of rows, one added behind the other, and of columns, each added to columns of the table and joined.

    Every further block of rows costs a copy of the table, every further block of columns a pass through all places.
    """

    rows: int
    columns: int

    def most(self, width: int) -> int:
        """Rows of `width` numbers that there may be."""
        return PIECE // -(-width // self.columns) * self.rows

    def nanoseconds(self, rows: int, width: int, size: int) -> float:
        """Of `rows` into a table of `size` numbers."""
        split = 2 * COPIED * (rows * width + size) if self.columns > 1 else 0.0
        each = NODE * self.rows * self.columns + ROW * rows * self.columns + ADDED * rows * width
        return each + split + self.rows * size * _to_copy(size)


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
    found = [Pieces(blocks, columns) for blocks in range(1, MOST + 1) if (columns := _columns(rows, width, blocks))]
    found = [pieces for pieces in found if pieces.rows * pieces.columns <= MOST]
    best = min(found, key=lambda pieces: pieces.nanoseconds(rows, width, size), default=None)
    in_one_go = rows * width * PLACED + size * _to_copy(size)
    return best if best is not None and best.nanoseconds(rows, width, size) < in_one_go else None


def added(op: Builder, node: ir.Node, at: ir.Value, shares: ir.Value, pieces: Pieces) -> ir.Value:
    """The result of `node`.

    Args:
        at: the places, [rows, 1].
        shares: number of rows in each block.
    """
    table, _, updates = node.inputs
    if pieces.columns == 1:
        return _added(op, table, at, updates, shares, pieces.rows)
    widths = _split(math.prod(table.shape.dims[1:]), pieces.columns)
    columns = op.Split(op.Reshape(updates, [-1, sum(widths)]), np.array(widths), axis=1, outputs=len(widths))
    if added_to_zeros(node.outputs[0]):
        zeros = {width: op.ConstantOfShape(op.Concat(op.dim(table, 0), [width], axis=0)) for width in set(widths)}
        tables = [zeros[width] for width in widths]
    else:
        tables = op.Split(op.Reshape(table, [-1, sum(widths)]), np.array(widths), axis=1, outputs=len(widths))
    parts = [_added(op, table, at, part, shares, pieces.rows) for table, part in zip(tables, columns)]
    return op.reshape_as(op.Concat(*parts, axis=1), table)


def even_shares(op: Builder, rows: int, blocks: int) -> ir.Value:
    return op.const(np.array(_split(rows, blocks)))


def _added(op: Builder, table: ir.Value, at: ir.Value, updates: ir.Value, shares: ir.Value, blocks: int) -> ir.Value:
    if blocks == 1:
        return op.ScatterND(table, at, updates, reduction="add")
    for some, rows in zip(*(op.Split(x, shares, axis=0, outputs=blocks) for x in (at, updates))):
        table = op.ScatterND(table, some, rows, reduction="add")
    return table


def _columns(rows: int, width: int, blocks: int) -> int | None:
    """As few blocks of columns as let one be added in one thread, where there are `blocks` of rows."""
    together = PIECE // -(-rows // blocks)  # columns
    return -(-width // together) if together else None


def _to_copy(size: int) -> float:
    return COPIED if size < FAR else COPIED_FAR


def _split(n: int, parts: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(n), parts)]
