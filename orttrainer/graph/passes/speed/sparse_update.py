"""The update of a large table from the few rows that a batch looked up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.fence import fence
from orttrainer.graph.passes.scatter import added_to_zeros
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

LEAST_ELEMENTS = 2**16  # of a table: below, the nodes cost more than the passes over it
LEAST_SHARE = 2  # rows of a table per row of the batch: the sums at an index use one thread, passes over a table all
LEAST_SHARE_OF_KERNELS = 8  # which make the whole gradient in all threads, and update the table in one pass


class SparseUpdatePass(ir.passes.InPlacePass):
    """Add(a, f(g)) -> a with its rows i replaced by Add(a[i], f(g[i])), where g = ScatterElements(zeros, i, u, "add").

    f multiplies with a finite scalar or squares; what it makes of 0 is 0, so the other rows of the sum are those of a.
    g is never made: g[i] are the sums of the rows of u that go to one place, each as often as the place is named, and
    each time the same row is written there. A g with any other reader stays, but for the sum of its squares.

    An update by Adam goes over the table seven times instead of twelve, one by SGD not at all, for it is made in place.

    Args:
        rows: how many rows u has where the graph does not know.
        native: whether kernels in C are to follow.
    """

    def __init__(self, rows: int, native: bool = False):
        super().__init__()
        self._rows, self._share = rows, LEAST_SHARE_OF_KERNELS if native else LEAST_SHARE

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        op, places = Builder(graph, "rows"), {}
        for node in [node for node in graph if self._is_large(node)]:
            if not _is_linear_or_square(node.outputs[0]):
                continue
            (y,), (_, index, updates) = node.outputs, node.inputs
            key = index.producer().inputs[0], y.shape[0]
            if key not in places:
                places[key] = _Places(op, *key)
            _replace(op, y, places[key].sums(updates))
            graph.remove(node, safe=True)
            modified = True
        if modified:
            graph.sort()
            RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified)

    def _is_large(self, node: ir.Node) -> bool:
        (y, *others) = node.outputs
        if others or not added_to_zeros(y) or node.attributes.get_int("axis", 0) != 0:
            return False
        _, index, updates = node.inputs
        dims, expand = static_dims(y), index.producer()
        if dims is None or math.prod(dims) < LEAST_ELEMENTS or expand is None or expand.op_type != "Expand":
            return False
        column = expand.inputs[0]
        if updates.shape is None or column.shape is None or any(d != 1 for d in column.shape.dims[1:]):
            return False
        rows = updates.shape[0]
        return dims[0] >= self._share * (rows if isinstance(rows, int) else self._rows)


def written_through(graph: ir.Graph, updates: Mapping[str, str]) -> Iterator[tuple[str, ir.Value]]:
    """Values that may be made in the memory of a state before its new value is added to them there.

    A new value m' = ScatterND(a, i, a[i] + ...) with a = m * scalar copies a, unless a has been made where m' is to be.
    That is right if nothing else reads a, and nothing but the product reads m.

    Args:
        updates: for each state that is updated in place its input and its output.

    Yields:
        The name of the state, and the value that may be an output of the graph bound to the same memory.
    """
    found = _scatters(graph, updates)
    op = Builder(graph, "late") if found else None
    for name, scatter in found:
        _let_wait(op, scatter)
        yield name, scatter.inputs[0]
    if found:
        graph.sort()


def nodes_written_through(graph: ir.Graph, updates: Mapping[str, str]) -> set[ir.Node]:
    """The nodes that such values are recognised by."""
    scatters = [scatter for _, scatter in _scatters(graph, updates)]
    return {scatter.inputs[k].producer() for scatter in scatters for k in (0, 2)}


def _scatters(graph: ir.Graph, updates: Mapping[str, str]) -> list[tuple[str, ir.Node]]:
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    return [
        (name, outputs[output].producer())
        for name, output in updates.items()
        if name in inputs and output in outputs and is_written_through(inputs[name], outputs[output])
    ]


def _let_wait(op: Builder, scatter: ir.Node) -> None:
    """Let the product m * scalar run behind the gradient: a step that fails before leaves m as it was."""
    product, rows = scatter.inputs[0].producer(), scatter.inputs[2].producer()
    added = next(x for x in rows.inputs if x.producer() is None or product.outputs[0] not in x.producer().inputs)
    for index, factor in enumerate(product.inputs):
        if _is_scalar(factor, scatter.outputs[0]):
            late = fence(op, factor, [added])
            product.replace_input_with(index, op.Reshape(late, np.array(factor.shape.dims, np.int64)))


def is_written_through(old: ir.Value, new: ir.Value) -> bool:
    """Whether `new` is such a value, and `old` the state m."""
    scatter = new.producer()
    if scatter is None or scatter.op_type != "ScatterND":
        return False
    made, rows = scatter.inputs[0], scatter.inputs[2].producer()
    product = made.producer()
    if product is None or product.op_type != "Mul" or made.is_graph_output() or rows is None:
        return False
    before = {scatter, *(x.producer() for x in rows.inputs)}
    return {node for node, _ in made.uses()} <= before and {node for node, _ in old.uses()} == {product}


def scattered_first(op: Builder, old: ir.Value, new: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """m' = ScatterND(a, i, a[i] + u) with a = m * s -> m' = ScatterND(m, i, m[i] + u / s) * s, elementwise at last.

    The product reads m when the result of ScatterND is there, which is to be bound to the memory of m: its factor
    waits for it.

    Returns:
        That result, an output of the graph, and m' as it is made now; None where it is not made in this way.
    """
    graph, scatter = op.graph, new.producer()
    if not is_written_through(old, new):
        return None
    product, rows = scatter.inputs[0].producer(), scatter.inputs[2].producer()
    factor = product.inputs[1 - product.inputs.index(old)]
    known = op.constant_value(factor)
    if known is None or not known.all() or rows.op_type not in ("Add", "Sub"):
        return None
    picked, added = rows.inputs
    if (
        picked.producer() is None
        or picked.producer().op_type != "Gather"
        or picked.producer().inputs[0] is not product.outputs[0]
    ):
        return None
    before = op.Gather(old, picked.producer().inputs[1])
    first = op.ScatterND(old, scatter.inputs[1], op.node(rows.op_type, before, op.Div(added, factor)))
    late = op.Reshape(fence(op, op.const(known.reshape(1), factor.dtype), [first]), [1] * len(old.shape))
    result = op.Mul(old, late)
    new.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(scatter, safe=True)
    result.name, result.type, result.shape = new.name, new.type, new.shape
    graph.outputs.append(first)
    return first, result


def _is_linear_or_square(y: ir.Value) -> bool:
    """Whether only sums, products with scalars and squares are made of `y`, and sums of squares."""
    if y.is_graph_output():
        return False
    for node, k in y.uses():
        if node.domain:
            return False
        if node.op_type == "Mul" and (node.inputs[1 - k] is y or _is_scalar(node.inputs[1 - k], y)):
            if not _is_linear_or_square(node.outputs[0]):
                return False
        elif node.op_type in ("Add", "Sub"):
            if node.inputs[1 - k] is y or static_dims(node.inputs[1 - k]) != static_dims(y):
                return False
            if node.op_type == "Sub" and k == 0:
                return False
        elif not sums_squares(node):
            return False
    return True


def sums_squares(node: ir.Node) -> bool:
    """Whether `node` sums all squares, or those of each row for nodes that sum these up."""
    if node.op_type != "ReduceSumSquare" or node.attributes.get_int("keepdims", 1):
        return False
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return True
    axes = node.inputs[1].const_value
    if axes is None or list(axes.numpy()) != list(range(1, len(node.inputs[0].shape))):
        return False
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return all(reader.op_type == "ReduceSum" and len(reader.inputs) == 1 for reader in readers)


def _is_scalar(s: ir.Value, x: ir.Value) -> bool:
    return s.shape is not None and len(s.shape) <= len(x.shape) and all(d == 1 for d in s.shape.dims)


class _Places:
    """Where the rows of a lookup are in a table.

    Args:
        column: the indices, [rows, 1, ...].
        size: number of rows of the table.

    Attributes:
        indices: int64 [rows].
        columns: int64 [rows, 1].
        first: for each row of the lookup one, the same for all that are one row of the table: int64 [rows].
    """

    def __init__(self, op: Builder, column: ir.Value, size: int):
        self._op = op
        self.indices = op.Reshape(column, [-1])
        self.columns = op.Unsqueeze(self.indices, [1])
        table = op.ConstantOfShape([size], value=ir.tensor(np.zeros(1, np.int64)))
        numbers = op.Range(np.int64(0), op.Size(self.indices), np.int64(1))
        self.first = op.Gather(op.ScatterElements(table, self.indices, numbers, axis=0), self.indices)

    def sums(self, updates: ir.Value) -> _Rows:
        op, rank = self._op, len(updates.shape)
        shape = op.Shape(updates)
        column = op.Unsqueeze(self.first, list(range(1, rank))) if rank > 1 else self.first
        zeros = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, updates.dtype.numpy())))
        zeros.shape = updates.shape.copy()
        once = op.ScatterElements(zeros, op.Expand(column, shape), updates, axis=0, reduction="add")
        return _Rows(self, once, op.Gather(once, self.first))


@dataclass(frozen=True)
class _Rows:
    """Rows of zeros with something added at places.

    Attributes:
        once: each sum in one of the rows of its place, zeros in the others; None where nobody asks for it.
        values: each sum in all rows of its place.
    """

    places: _Places
    once: ir.Value | None
    values: ir.Value


def _replace(op: Builder, y: ir.Value, rows: _Rows) -> None:
    """Let the readers of `y`, zeros with `rows` added at their places, read the rows."""
    for node in dict.fromkeys(reader for reader, _ in y.uses()):
        (result,) = node.outputs
        if node.op_type == "ReduceSumSquare":
            node.replace_input_with(0, rows.once)
            continue
        k = node.inputs.index(y)
        other = node.inputs[1 - k]
        if node.op_type == "Mul":
            once, values = (op.Mul(x, x if other is y else other) for x in (rows.once, rows.values))
            _replace(op, result, _Rows(rows.places, once, values))
        else:
            pair = [op.Gather(other, rows.places.indices), rows.values]
            new = op.ScatterND(other, rows.places.columns, op.node(node.op_type, *(pair if k else pair[::-1])))
            result.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name, new.type, new.shape = result.name, result.type, result.shape
        node.graph.remove(node, safe=True)
