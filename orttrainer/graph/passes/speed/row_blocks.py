"""A block of the rows of a value, made of the same rows of what it is made of: the value is never all there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim

SHAPED = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Div", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Log",
    "Max", "Min", "Mul", "Neg", "Not", "Or", "Reciprocal", "Relu", "Sigmoid", "Sign", "Softplus", "Sqrt", "Sub", "Tanh", "Where",
}  # fmt: skip


class RowBlock:
    """The rows from `start` to `end` of values that are read in such blocks alone.

    What is gathered or repeated is so for the block, and what is made element by element is made of blocks of the operands;
    from anything else they are cut.

    Args:
        op: of the graph around, for what serves all blocks.
        inner: of the graph that makes one.
        start, end: [1], in there.
        readers: nodes that are to read blocks, or do.
    """

    def __init__(self, op: Builder, inner: Builder, start: ir.Value, end: ir.Value, readers: Collection[ir.Node]):
        self._op, self._inner, self._ends, self._readers = op, inner, (start, end), readers
        self._made: dict[ir.Value, ir.Value] = {}

    def of(self, x: ir.Value) -> ir.Value:
        """Those of `x`, which has as many rows as there are in all blocks."""
        if x not in self._made:
            self._made[x] = self._gathered(x) or self._elementwise(x) or self._cut(x)
        return self._made[x]

    def _cut(self, x: ir.Value) -> ir.Value:
        return self._inner.Slice(x, *self._ends, [0])

    def _gathered(self, x: ir.Value) -> ir.Value | None:
        found = _gathered(self._op, x, self._readers)
        return None if found is None else self._inner.Gather(found.source, self._cut(found.places), axis=0)

    def _elementwise(self, x: ir.Value) -> ir.Value | None:
        node = x.producer()
        if node is None or node.domain or node.op_type not in ELEMENTWISE or not _is_read_once(x):
            return None
        meets = [_meets(operand, x) for operand in node.inputs]
        if None in meets:
            return None
        operands = [self.of(operand) if rows else operand for operand, rows in zip(node.inputs, meets)]
        attributes = {attribute.name: attribute.value for attribute in node.attributes.values()}
        return self._inner.node(node.op_type, *operands, **attributes)


@dataclass(frozen=True)
class _Gathered:
    """Rows that are read from elsewhere.

    Attributes:
        source: [height, ...].
        places: of the rows in there, [rows].
    """

    source: ir.Value
    places: ir.Value


def _gathered(op: Builder, x: ir.Value, readers: Collection[ir.Node]) -> _Gathered | None:
    """What `x` is read from or repeats, if nothing else needs it."""
    dims, rows = x.shape.dims[1:], x
    while _is_read_once(rows) and (node := rows.producer()) is not None and node.op_type in SHAPED:
        rows = node.inputs[0]
    node = rows.producer()
    if node is None or node.domain or not _is_read_in_blocks(rows, readers) or node.inputs[0].shape is None:
        return None
    source = node.inputs[0]
    if node.op_type == "Gather" and not node.attributes.get_int("axis", 0) and source.shape.dims[1:] == dims:
        return _Gathered(source, op.Reshape(node.inputs[1], [-1]))
    if node.op_type == "Expand" and _repeats_rows(node, dims):
        times = op.Gather(node.inputs[1], np.array([1]))
        numbers = op.Range(np.int64(0), op.Squeeze(op.Mul(op.dim(source, 0), times), [0]), np.int64(1))
        return _Gathered(op.Squeeze(source, [1]), op.Div(numbers, times))
    return None


def _repeats_rows(expand: ir.Node, dims: Sequence[int]) -> bool:
    """[n, 1, *dims] -> [n, times, *dims]."""
    (source, shape), (rows,) = expand.inputs, expand.outputs
    if rows.shape is None or shape.shape is None or not len(source.shape) == len(rows.shape) == shape.shape[0] > 1:
        return False
    repeats = same_dim(source.shape[0], rows.shape[0]) and source.shape[1] == 1
    return repeats and source.shape.dims[2:] == rows.shape.dims[2:] == dims


def _meets(operand: ir.Value | None, x: ir.Value) -> bool | None:
    """Whether the rows of `operand` are those of `x`, which is made of it; None where that is not known."""
    if operand is None or operand.shape is None or x.shape is None:
        return None
    if len(operand.shape) < len(x.shape) or operand.shape[0] == 1:
        return False
    return True if same_dim(operand.shape[0], x.shape[0]) else None


def _is_read_once(x: ir.Value) -> bool:
    """Not counting who asks for its shape, which here are the places that are made of it."""
    return not x.is_graph_output() and sum(node.op_type != "Shape" for node, _ in x.uses()) == 1


def _is_read_in_blocks(x: ir.Value, readers: Collection[ir.Node]) -> bool:
    """Whether all who read `x` do it in blocks, or by way of what is made in blocks."""
    if _is_read_once(x):
        return True
    others = [node for node, _ in x.uses() if node.op_type != "Shape" and node not in readers]
    return not x.is_graph_output() and all(_leads_to(node, readers) for node in others)


def _leads_to(node: ir.Node, readers: Collection[ir.Node]) -> bool:
    """Whether what `node` makes element by element is for the blocks alone."""
    while node not in readers:
        (y,) = node.outputs if len(node.outputs) == 1 else (None,)
        if y is None or node.domain or node.op_type not in ELEMENTWISE or not _is_read_once(y):
            return False
        node = next(reader for reader, _ in y.uses() if reader.op_type != "Shape")
    return True
