"""Updates of small parameters, many at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.tiles import View, collect, common_dims, remove_unread
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

MOST_ELEMENTS = 2**14  # of a parameter: with more, a pass over it takes longer than what runs a node
LEAST_TOGETHER = 4  # fewer have as many nodes as what joins and parts them
LEAST_NODES = 5  # of an update: where each has few, as SGD's, joining and parting take as long


class JoinSmallUpdatesPass(ir.passes.InPlacePass):
    """x1' = f(x1, g1), x2' = f(x2, g2), ... -> x1', x2', ... = Split(f(Concat(x1, x2, ...), Concat(g1, g2, ...))).

    A node costs ONNX Runtime 1 to 3 us, however little there is to compute, and an update by Adam has nine for each bias and
    each scale of a norm. States are inputs and outputs of the graph as vectors, so that only the gradients are reshaped.

    Updates are joined if they are made of the same elementwise operators from state, the gradient and the same scalars, and if
    nobody else reads what is made of state on the way. What is made of the gradient alone, as its square, others may read: the
    two biases of a recurrent layer have one gradient. Whoever reads an old value runs before it is written as before: a new one waits for
    what it waited for, and for more.

    Args:
        groups: for each parameter, input -> output of its state tensors that are updated in place.

    Attributes:
        inputs, outputs: name -> the state that it stands for; the outputs of these states in their own shape are gone.
    """

    def __init__(self, groups: Iterable[Mapping[str, str]]):
        super().__init__()
        self._groups = list(groups)
        self.inputs: dict[str, View] = {}
        self.outputs: dict[str, View] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
        alike: dict[tuple, list[_SmallUpdate]] = {}
        for group in self._groups:
            states = {inputs[old]: outputs[new] for old, new in group.items() if old in inputs and new in outputs}
            if (update := _SmallUpdate.of(states)) is not None:
                alike.setdefault(update.form, []).append(update)
        joined = [updates for updates in alike.values() if len(updates) >= LEAST_TOGETHER]
        op, parts = Builder(graph, "joined"), {}
        for updates in joined:
            with op.scope(_name_of_all(updates[0])):
                parts |= self._join(op, updates)
        if joined:
            graph.outputs[:] = [parts.get(value, value) for value in graph.outputs]
            RemoveUnusedNodesPass()(model)
            remove_unread(graph, {inputs[name] for name, _ in self.inputs.values()})
            graph.sort()
        return ir.passes.PassResult(model, bool(joined))

    def _join(self, op: Builder, updates: list[_SmallUpdate]) -> dict[ir.Value, ir.Value]:
        """One update instead of several of the same form; of each new value what is in its place."""
        sizes, first = [math.prod(update.dims) for update in updates], updates[0]
        inside: dict[ir.Value, ir.Value] = {}
        parts: dict[ir.Value, ir.Value] = {}
        for alike in zip(*(update.states for update in updates)):
            inside[alike[0]] = op.Concat(*(self._flat_input(op, x) for x in alike), axis=0)
        for alike in zip(*(update.given for update in updates)):
            inside[alike[0]] = op.Concat(*(_flat(op, x) for x in alike), axis=0)
        for node in first.nodes:
            for x in node.inputs:
                if x not in inside:  # a scalar
                    inside[x] = x if len(x.shape) <= 1 else op.Reshape(x, [1])
            inside[node.outputs[0]] = op.node(node.op_type, *(inside[x] for x in node.inputs))
        for alike in zip(*(update.states.items() for update in updates)):
            _, new = alike[0]
            split = op.Split(inside[new], sizes, axis=0, outputs=len(updates))
            for (old, whole), size, part in zip(alike, sizes, split):
                part.name = f"{whole.name}/flat"
                self.outputs[part.name], parts[whole] = (old.name, (size,)), part
        return parts

    def _flat_input(self, op: Builder, x: ir.Value) -> ir.Value:
        """The memory of a state as a vector."""
        if len(x.shape) == 1:
            return x
        size = math.prod(x.shape.dims)
        flat = ir.Value(name=f"{x.name}/flat", type=x.type, shape=ir.Shape([size]))
        op.graph.inputs.append(flat)
        self.inputs[flat.name] = x.name, (size,)
        return flat


@dataclass
class _SmallUpdate:
    """The nodes that make the new values of one parameter and its state.

    Attributes:
        dims: of all of them.
        states: old value -> new value.
        given: what else of these dims the nodes read, such as the gradient.
        nodes: in an order in which they can run.
        form: the same for updates that may be joined.
    """

    dims: tuple[int, ...]
    states: dict[ir.Value, ir.Value]
    given: list[ir.Value]
    nodes: list[ir.Node]
    form: tuple

    @classmethod
    def of(cls, states: dict[ir.Value, ir.Value]) -> _SmallUpdate | None:
        """None where it cannot be joined with others."""
        dims = common_dims(states)
        if dims is None or not 0 < math.prod(dims) <= MOST_ELEMENTS:
            return None
        found: dict[ir.Node, None] = {}
        for new in states.values():
            collect(new, dims, found)
        nodes, given = list(found), []
        own = {node.outputs[0] for node in nodes}
        if len(nodes) < LEAST_NODES or not own.issuperset(states.values()):
            return None
        of_state = set(states)
        for node in nodes:
            of_state.update(node.outputs if of_state.intersection(node.inputs) else ())
        if not all(_stays_inside(y, states, found) for y in own & of_state):
            return None
        place: dict[ir.Value, tuple] = {x: ("state", k) for k, x in enumerate(states)}
        form: list = [x.dtype for x in states]
        for node in nodes:
            for x in node.inputs:
                if x not in place and static_dims(x) == dims:
                    place[x] = "given", len(given), x.dtype
                    given.append(x)
            form.append((node.op_type, *(place.get(x, x) for x in node.inputs)))
            place[node.outputs[0]] = "made", len(place)
        form += [place[new] for new in states.values()]
        return cls(dims, states, given, nodes, tuple(form))


def _stays_inside(y: ir.Value, states: Mapping[ir.Value, ir.Value], nodes: Mapping[ir.Node, None]) -> bool:
    """Whether nobody but these nodes reads `y`, and it is an output of the graph only as a new state."""
    return all(reader in nodes for reader, _ in y.uses()) and (not y.is_graph_output() or y in states.values())


def _name_of_all(update: _SmallUpdate) -> str:
    """Of a node that all updates of the form read, which belongs to none alone: a profile looks for places by names."""
    read = dict.fromkeys(
        x for node in update.nodes for x in node.inputs if x not in update.given and x not in update.states
    )
    made = [x.producer() for x in read if x.producer() not in (None, *update.nodes)]
    return made[0].name if made else update.nodes[0].name


def _flat(op: Builder, x: ir.Value) -> ir.Value:
    return x if len(x.shape) == 1 else op.Reshape(x, [-1])
