"""Forms of a result that hold for one size of batch, beside those for any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.speed.nchwc_nodes import int64s
from orttrainer.graph.sizes import size_at_hand

Write = Callable[[Builder], ir.Value]


class UsualBatch:
    """The batch at hand, and what is written for its size alone.

    Args:
        op: of the graph.
        sizes: of symbolic dimensions, in the batch at hand.
    """

    def __init__(self, op: Builder, sizes: Mapping[str, int]):
        self.op, self.sizes = op, sizes
        self._is_here: dict[str, ir.Value] = {}

    def size(self, x: ir.Value) -> int | None:
        """How many images `x` has; None where that is not known."""
        return batch_at_hand(x, self.sizes)

    def either(self, x: ir.Value, shape: Sequence, usual: Write, other: Write) -> ir.Value:
        """What `usual` writes; where the batch of `x` may have another size as well, an `If` with what `other` writes for it.

        Args:
            x: of float32, as is the result.
            shape: of the result.
            usual: writes the result for `size(x)` images.
            other: writes it for any number.
        """
        if isinstance(x.shape[0], int):
            return usual(self.op)
        return either(self.op, self._is_usual(x), ir.Value(type=x.type, shape=ir.Shape(shape)), usual, other)

    def _is_usual(self, x: ir.Value) -> ir.Value:
        """Whether the batch is as large as the one at hand."""
        name = x.shape[0].value
        if name not in self._is_here:
            self._is_here[name] = self.op.Squeeze(self.op.Equal(self.op.dim(x, 0), int64s(self.size(x))))
        return self._is_here[name]


def sizes_at_hand(graph: ir.Graph, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The symbolic dimensions of the graph's inputs, for a batch of these shapes."""
    inputs = [value for value in graph.inputs if value.name in shapes and value.shape is not None]
    pairs = [pair for value in inputs for pair in zip(value.shape.dims, shapes[value.name])]
    return {dim.value: size for dim, size in pairs if isinstance(dim, ir.SymbolicDim) and dim.value is not None}


def batch_at_hand(x: ir.Value, sizes: Mapping[str, int]) -> int | None:
    """How many images `x` has in the batch at hand; None where that is not known."""
    return size_at_hand(x.shape[0], sizes)


def either(op: Builder, condition: ir.Value, like: ir.Value, then: Write, otherwise: Write) -> ir.Value:
    """An `If`: what one of two write, of the dtype and shape of `like`."""
    name = op.new_name("If")
    branches = {"then_branch": _branch(op, f"{name}/then", then), "else_branch": _branch(op, f"{name}/else", otherwise)}
    attributes = [ir.AttrGraph(key, branch) for key, branch in branches.items()]
    node = ir.Node("", "If", [condition], attributes, name=name)
    (y,) = node.outputs
    y.name, y.type, y.shape = name, like.type, like.shape
    op.graph.append(node)
    return y


def _branch(op: Builder, name: str, write: Write) -> ir.Graph:
    """A graph of one result that reads what is around it."""
    graph = ir.Graph([], [], nodes=[], opset_imports=op.graph.opset_imports, name=name)
    graph.outputs.append(write(Builder(graph, name)))
    return graph
