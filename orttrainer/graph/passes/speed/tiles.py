"""Updates of large parameters, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.fence import fence
from orttrainer.graph.passes.speed.sparse_update import is_written_through

ELEMENTWISE = frozenset(["Add", "Div", "Mul", "Neg", "Sqrt", "Sub"])
ELEMENTS = 2**19  # of a tile: six tensors of them are in the cache together
LEAST_ELEMENTS = 2**21  # of a parameter: smaller ones with their moments are in the cache anyway


Rows = tuple[str, int, int]  # name of a state, first row, row behind the last


class TileUpdatesPass(ir.passes.InPlacePass):
    """x' = f(x, g) -> x'[0:r] = f(x[0:r], Slice(g, 0, r)), x'[r:2r] = ..., each with an input and an output of its own.

    ONNX Runtime runs one operator after the other over the whole tensor. A dozen of them over 5.8 M elements read and
    write memory a dozen times, 12.9 ms; in tiles that stay in the cache, 6.7 (2 threads, 32 MB of cache). The rows are
    inputs and outputs of the graph, so that they may be bound to parts of the state's memory and nothing is copied.

    An update is tiled if it is made of elementwise operators from state, scalars and tensors of that shape, and nobody
    else reads what is on the way. Whoever reads an old value elsewhere still runs before it is written: in the whole
    graph it came before the new value, through something that each tile waits for too.

    Args:
        groups: for each parameter, input -> output of its state tensors that are updated in place.

    Attributes:
        inputs, outputs: name -> the rows of a state that it stands for; the whole outputs of these states are gone.
    """

    def __init__(self, groups: Iterable[Mapping[str, str]]):
        super().__init__()
        self._groups = list(groups)
        self.inputs: dict[str, Rows] = {}
        self.outputs: dict[str, Rows] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op, replaced, modified = Builder(graph, "tiles"), set(), False
        inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
        for group in self._groups:
            states = {inputs[old]: outputs[new] for old, new in group.items() if old in inputs and new in outputs}
            if (dims := _common_dims(states)) is None:
                continue
            for old, new in list(states.items()):
                if (values := _scattered_first(op, old, new)) is not None:
                    first, states[old] = values
                    self.outputs[first.name] = (old.name, 0, dims[0])
                    modified = True
            if (update := _Update.of(states, dims)) is not None:
                update.tile(op, self.inputs, self.outputs)
                replaced |= {new.name for new in update.states.values()}
                modified = True
        if modified:
            kept = [value for value in graph.outputs if value.name not in replaced]
            graph.outputs.clear()
            graph.outputs.extend(kept)
            common.RemoveUnusedNodesPass()(model)
            for value in {inputs[name] for name, _, _ in self.inputs.values()}:
                if not value.uses() and not value.is_graph_output():
                    graph.inputs.remove(value)
            graph.sort()
        return ir.passes.PassResult(model, modified)


@dataclass
class _Update:
    """The nodes that make new values of one parameter and its state.

    Attributes:
        dims: of all of them.
        states: old value -> new value.
        nodes: in an order in which they can run.
        others: what else they read that has these dims.
    """

    dims: tuple[int, ...]
    states: dict[ir.Value, ir.Value]
    nodes: list[ir.Node]
    others: list[ir.Value]

    @classmethod
    def of(cls, states: Mapping[ir.Value, ir.Value], dims: tuple[int, ...]) -> _Update | None:
        """None where it cannot be tiled."""
        nodes: dict[ir.Node, None] = {}
        for new in states.values():
            _collect(new, dims, nodes)
        made = {y for node in nodes for y in node.outputs}
        states = {old: new for old, new in states.items() if new in made}
        if any(reader not in nodes for y in made for reader, _ in y.uses()):
            return None
        if any(y.is_graph_output() and y not in states.values() for y in made):
            return None
        read = dict.fromkeys(x for node in nodes for x in node.inputs)
        others = [x for x in read if x not in made and x not in states and static_dims(x) == dims]
        if not states:
            return None
        return cls(dims, states, list(nodes), others)

    def tile(self, op: Builder, inputs: dict[str, Rows], outputs: dict[str, Rows]) -> None:
        graph, rows = op.graph, max(1, ELEMENTS // math.prod(self.dims[1:]))
        read = {x for node in self.nodes for x in node.inputs}
        for start in range(0, self.dims[0], rows):
            end = min(start + rows, self.dims[0])
            shape = ir.Shape([end - start, *self.dims[1:]])
            values: dict[ir.Value, ir.Value] = {x: op.Slice(x, [start], [end], [0]) for x in self.others}
            for old in self.states:
                if old in read:
                    part = ir.Value(name=f"{old.name}/rows_{start}", type=old.type, shape=shape)
                    graph.inputs.append(part)
                    inputs[part.name] = (old.name, start, end)
                    values[old] = part
            for node in self.nodes:
                copy = ir.Node(
                    "", node.op_type, [values.get(x, x) for x in node.inputs], name=f"{node.name}/rows_{start}"
                )
                (y,), (new,) = node.outputs, copy.outputs
                new.name, new.type, new.shape = f"{y.name}/rows_{start}", y.type, shape
                graph.append(copy)
                values[y] = new
            for old, new in self.states.items():
                graph.outputs.append(values[new])
                outputs[values[new].name] = (old.name, start, end)


def _common_dims(states: Mapping[ir.Value, ir.Value]) -> tuple[int, ...] | None:
    """The sizes that old and new values of a large parameter have; None for a small one."""
    found = {static_dims(value) for pair in states.items() for value in pair}
    if len(found) != 1 or (dims := found.pop()) is None:
        return None
    return dims if math.prod(dims) >= LEAST_ELEMENTS and dims[0] > 1 else None


def _scattered_first(op: Builder, old: ir.Value, new: ir.Value) -> tuple[ir.Value, ir.Value] | None:
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


def _collect(value: ir.Value, dims: tuple[int, ...], nodes: dict[ir.Node, None]) -> None:
    """Add the elementwise nodes of these dims that `value` is made by, those that come first first."""
    stack = [(value.producer(), False)]
    while stack:
        node, done = stack.pop()
        if done:
            nodes[node] = None
            continue
        if node is None or node in nodes or not _is_tiled(node, dims):
            continue
        stack.append((node, True))
        stack.extend((x.producer(), False) for x in node.inputs)


def _is_tiled(node: ir.Node, dims: tuple[int, ...]) -> bool:
    if node.domain or node.op_type not in ELEMENTWISE or static_dims(node.outputs[0]) != dims:
        return False
    return all(static_dims(x) == dims or _is_scalar(x) for x in node.inputs)


def _is_scalar(x: ir.Value) -> bool:
    return x.shape is not None and all(d == 1 for d in x.shape.dims)
