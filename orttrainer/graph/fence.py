"""Order without arithmetic: who reads a buffer before it is overwritten.

State inputs and outputs may share memory, which ONNX Runtime does not know. An update in
place is right only if every node that reads the old value runs before the node that writes
the new one, or is that node. `fence` makes it so, `unordered_readers` proves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.subgraphs import captured_values, subgraphs

# The output may be the input's own memory: ONNX Runtime computes the first eight without a copy, and removes any of
# the others that does nothing, such as a product with 1. An If whose condition it folds becomes the nodes of a branch;
# what other subgraphs hand out is a copy.
VIEWS = frozenset(
    ["ExpandDims", "Flatten", "Identity", "Optional", "OptionalGetElement", "Reshape", "Squeeze", "Unsqueeze"]
    + ["Add", "Cast", "CastLike", "Concat", "Div", "Dropout", "Expand", "If", "Mul", "Slice", "Sub", "Sum", "Transpose"]
)

# At a place that there is not, by a divisor of 0, by sizes that do not fit.
_MAY_FAIL = frozenset([
    "Compress", "Div", "Expand", "Gather", "GatherElements", "GatherND", "Mod", "NegativeLogLikelihoodLoss", "OneHot", "Pad", "Reshape",
    "ScatterElements", "ScatterND", "SequenceAt", "SoftmaxCrossEntropyLoss", "Split", "Tile", "TopK",
])  # fmt: skip

# ONNX Runtime folds these where it knows the shape: they neither read numbers nor wait for the node that makes them.
_SIZES = frozenset(["Shape", "Size"])


def fence(op: Builder, value: ir.Value, after: Iterable[ir.Value | ir.Node]) -> ir.Value:
    """A copy of the small `value`, of one element or shape [n], that cannot be computed before all of `after`.

    Its bits are those of `value`, also where `after` holds NaN: one element of each is put
    behind it in one tensor, of which only the first elements are taken.
    """
    count = math.prod(value.shape.dims)
    pieces = [op.Reshape(value, [count])]
    for other in after:
        first = op.Slice(numbers_of(op, other), [0], [1])
        pieces.append(op.cast_as(first, value))
    return op.Gather(op.Concat(*pieces, axis=0), np.arange(count))


def may_fail_beside(values: Iterable[ir.Value], made: ir.Value) -> list[ir.Value]:
    """Those of `values` that take nodes which `made` does not, of which one may fail by the numbers of a batch."""
    before = _ancestors(made, set())
    found = []
    for value in values:
        own = _ancestors(value, before) - before
        inner = (part for node in own for body in subgraphs(node) for part in body.all_nodes())
        if any(node.op_type in _MAY_FAIL for node in (*own, *inner)):
            found.append(value)
    return found


def numbers_of(op: Builder, made: ir.Value | ir.Node) -> ir.Value:
    """Numbers in a row that are there once `made` is: its own; of a node those of the first output that is not left out."""
    value = made if isinstance(made, ir.Value) else next(y for y in made.outputs if y.name)
    if isinstance(value.type, ir.SequenceType):
        value = op.SequenceLength(value)
    return op.Reshape(value, [-1])


def unordered_readers(
    graph: ir.Graph, updates: Mapping[ir.Value, ir.Value], barrier: ir.Value | None = None
) -> dict[ir.Value, list[ir.Node]]:
    """For each old value the nodes that read it and need not run before its new value is written.

    Args:
        graph: the training graph.
        updates: old value (a graph input) -> new value.
        barrier: a value that most updates depend on; it only makes the search shorter.

    Returns:
        The old values that have such readers, with them.
    """
    readers = _readers(graph)
    before_barrier = _ancestors(barrier, set()) if barrier is not None else set()
    unordered = {}
    for old, new in updates.items():
        seen = _ancestors(new, before_barrier)
        behind_barrier = before_barrier if barrier is not None and barrier.producer() in seen else ()
        late = [
            node
            for node in _all_readers(old, new.producer(), readers)
            if node not in seen and node not in behind_barrier
        ]
        if late:
            unordered[old] = late
    return unordered


def _all_readers(
    value: ir.Value, writer: ir.Node | None, readers: Mapping[ir.Value, list[ir.Node]]
) -> Iterable[ir.Node]:
    """The nodes that read the memory of `value`, be it through what may be a view of it.

    What `writer` makes is the new value: whoever reads that reads the right one.
    """
    found: dict[ir.Node, None] = {}
    stack = [value]
    while stack:
        source = stack.pop()
        for node in readers.get(source, ()):
            if node not in found and node is not writer and node.op_type in VIEWS and not _is_decided_late(node):
                stack.extend(y for y in node.outputs if _may_view(source, y))
            found[node] = None
    return found


def _is_decided_late(node: ir.Node) -> bool:
    """Whether it is an If whose condition the run alone knows, which ONNX Runtime does not fold."""
    if node.op_type != "If" or node.inputs[0] is None:
        return False
    made_of = [node.inputs[0], *(x for made_by in _ancestors(node.inputs[0], set()) for x in _inputs(made_by))]
    return any(x.is_graph_input() for x in made_of)


def _may_view(source: ir.Value, output: ir.Value) -> bool:
    """Whether the output can be all of the source's memory: as many elements, as far as is known."""
    if source.shape is None or output.shape is None:
        return True
    dims = [value.shape.dims for value in (source, output)]
    if not all(isinstance(dim, int) for shape in dims for dim in shape):
        return True
    return math.prod(dims[0]) == math.prod(dims[1])


def _readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in _inputs(node):
            readers.setdefault(value, []).append(node)
    return readers


def _inputs(node: ir.Node) -> list[ir.Value]:
    """The values whose numbers a node reads."""
    return [x for x in (*_read(node), *captured_values(node, _read)) if x is not None]


def _read(node: ir.Node) -> Sequence[ir.Value | None]:
    return () if node.op_type in _SIZES else node.inputs


def _ancestors(value: ir.Value, known: set[ir.Node]) -> set[ir.Node]:
    """The node that makes `value` and every node before it; nodes in `known` are not searched further."""
    seen: set[ir.Node] = set()
    stack = [value.producer()]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in known:
            stack.extend(x.producer() for x in _inputs(node))
    return seen
