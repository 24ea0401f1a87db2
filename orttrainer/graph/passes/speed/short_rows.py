"""Operands that are repeated for each of many short rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim
from orttrainer.graph.passes.sized import SizedPass
from orttrainer.graph.scopes import put_in_place
from orttrainer.graph.sizes import size_at_hand

BINARY = frozenset(
    ["Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Pow", "Sub"]
)
OPERANDS = {**dict.fromkeys(BINARY, 2), "Where": 3}
SHORT = 32  # numbers of a row
FEW = 16  # of one that is a number repeated: rows are transposed from as many columns
MANY = 1024  # rows
UNKNOWN = 64  # a size


class ShortRowsPass(SizedPass):
    """Mul(x, w) -> Mul(x, Expand(w)), where w would be repeated for many short rows; so for all that works element by element.

    ONNX Runtime's kernels go through one row after the other, where an operand is repeated along an axis that the other is
    not, or along another than the one behind: 12 ns each, however few numbers it has. Vectors in space times a number each,
    16,384 x 3, 0.19 -> 0.05 ms; differences of all pairs of 256 such vectors 0.76 -> 0.07; a choice between such vectors by a
    mask, for which Where takes 30 ns each, 0.50 -> 0.04. Expand itself is quick, but for a last axis: that is repeated as the
    first one, and transposed, 0.28 -> 0.03. Nothing is computed for it: the same bits.

    Args:
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        op = Builder(graph, "short")
        for node in list(graph):
            if node.domain or any(x is None or x.shape is None for x in (*node.inputs, *node.outputs)):
                continue
            if node.op_type == "Expand" and self._is_slow(node):
                put_in_place(op, node, _expanded)
                modified = True
            places = self._places(node) if node.op_type in OPERANDS else ()
            with op.scope(node.name):
                for place in places:
                    node.replace_input_with(place, _repeated(op, node, node.inputs[place]))
                if node.op_type == "Where" and 0 in places and all(size == 1 for size in node.inputs[2].shape):
                    _turn_around(op, node)
            modified |= bool(places)
        if modified:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, modified)

    def _is_slow(self, node: ir.Node) -> bool:
        x, y = node.inputs[0].shape.dims, node.outputs[0].shape.dims
        return bool(x) and x[-1] == 1 and isinstance(y[-1], int) and self._count(x) >= MANY and 1 < y[-1] <= FEW

    def _places(self, node: ir.Node) -> Sequence[int]:
        """The operands to be repeated."""
        if len(node.inputs) != OPERANDS[node.op_type] or _is_bias(node):
            return ()
        y = node.outputs[0].shape.dims
        operands = [[1] * (len(y) - len(x.shape)) + list(x.shape.dims) for x in node.inputs]
        if 0 in y or not all(
            size in (1, whole) or same_dim(size, whole) for x in operands for size, whole in zip(x, y)
        ):
            return ()
        row = self._row(*operands)
        if row > SHORT or self._count(y) < MANY * row:
            return ()
        numbers = range(len(operands))
        for places in (places for count in numbers for places in itertools.combinations(numbers, count + 1)):
            after = [y if place in places else x for place, x in enumerate(operands)]
            columns = any(operands[place][-1] == 1 != y[-1] for place in places)
            if self._row(*after) > SHORT and not (columns and self._count(y[-1:]) > FEW):
                return places
        return ()

    def _row(self, *operands: Sequence[int | ir.SymbolicDim]) -> int:
        """How many numbers lie behind each other up to the last axis along which another operand is repeated."""
        axes = [(tuple(size == 1 for size in sizes), sizes) for sizes in zip(*operands)]
        axes = [(ones, sizes[ones.index(False)]) for ones, sizes in reversed(axes) if not all(ones)]
        _, last = next(itertools.groupby(axes, key=lambda axis: axis[0]), (None, ()))
        return self._count(size for _, size in last)

    def _count(self, dims: Iterable[int | ir.SymbolicDim]) -> int:
        sizes = (size_at_hand(size, self.sizes) for size in dims)
        return math.prod(UNKNOWN if size is None else size for size in sizes)


def _is_bias(node: ir.Node) -> bool:
    """Whether ONNX Runtime makes one product with a bias of it."""
    products = [x.producer() is not None and x.producer().op_type == "MatMul" for x in node.inputs]
    return node.op_type == "Add" and any(products) and any(len(x.shape) == 1 for x in node.inputs)


def _repeated(op: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    """An operand in the shape of the result."""
    y = node.outputs[0].shape
    sizes = [_size(op, node, axis) for axis in range(-len(y), 0)]
    if x.shape.dims and x.shape[-1] == 1 != y[-1]:
        x = _along_last(op, x, sizes[-1])
    if len(x.shape) < len(y) or any(size == 1 != whole for size, whole in zip(x.shape.dims, y.dims)):
        x = op.Expand(x, op.Concat(*sizes, axis=0))
        x.shape = ir.Shape(y.dims)
    return x


def _turn_around(op: Builder, where: ir.Node) -> None:
    """Let a single number be the first to choose from: of the first that is as large as the result, Where makes 0 of -0."""
    condition, first, number = where.inputs
    inverse = op.Equal(condition, np.array(False))  # a Not would be undone by ONNX Runtime, with this
    for place, x in enumerate((inverse, number, first)):
        where.replace_input_with(place, x)


def _size(op: Builder, node: ir.Node, axis: int) -> ir.Value:
    """How many elements the result has along an axis, counted from the last one."""
    having = [x for x in node.inputs if len(x.shape) >= -axis]
    return op.dim(next((x for x in having if x.shape[axis] != 1), having[0]), axis)


def _along_last(op: Builder, x: ir.Value, size: ir.Value) -> ir.Value:
    """`x`, whose last axis has one element, with this repeated: as an Expand along the first one and a transpose."""
    rank = len(x.shape)
    first = op.Transpose(x, perm=[rank - 1, *range(rank - 1)])
    repeated = op.Expand(first, op.Concat(size, np.ones([rank - 1], np.int64), axis=0))
    return op.Transpose(repeated, perm=[*range(1, rank), 0])


def _expanded(op: Builder, node: ir.Node) -> ir.Value:
    x, shape = node.inputs
    y = node.outputs[0].shape.dims
    return op.Expand(_along_last(op, x, op.const(np.array(y[-1:], np.int64))), shape)
