"""What a backward keeps of its forward, and what would have to be computed to make it again.

Between `differentiate` and the update a graph holds the nodes of the forward and those of the backward. A forward
value that a backward node reads stays in memory from the one to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from orttrainer.graph.builder import same_shape, static_dims
from orttrainer.graph.passes.random import RANDOM_OPS
from orttrainer.graph.subgraphs import node_inputs, subgraphs

# The output is the memory of input 0: it costs nothing to keep beside it.
VIEWS = frozenset(["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
_SIZES = frozenset(["Shape", "Size"])  # they need no element of what they read


@dataclass(eq=False)
class Segment:
    """Forward nodes whose values are made again together, when the backward comes to them.

    Attributes:
        name: what messages call it.
        nodes: of the forward.
    """

    name: str
    nodes: frozenset[ir.Node]


@dataclass(eq=False)
class Recomputation:
    """What a segment comes to.

    Attributes:
        segment: the one it is for.
        nodes: those to run again, in the order of the forward.
        replaced: each value that the backward is to read no longer, with that whose second one it reads instead: the
            same, or where only the shape is asked for one of that shape.
        inputs: the activations that the second run reads from the first: they are kept for it.
    """

    segment: Segment
    nodes: list[ir.Node] = field(default_factory=list)
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)
    inputs: list[ir.Value] = field(default_factory=list)


class Activations:
    """The forward values of a differentiated graph.

    Args:
        graph: forward and backward, without the update.
        forward: the nodes of the forward, in an order in which they can run.
        weights: the graph inputs that are parameters or buffers; what depends on nothing else is not an activation.
        results: what is wanted beside the graph's outputs, that is the gradients. Nodes that lead to none of them will
            be removed, and count for nothing here.
    """

    def __init__(
        self,
        graph: ir.Graph,
        forward: Sequence[ir.Node],
        weights: Collection[ir.Value],
        results: Iterable[ir.Value],
    ):
        self.graph, self.forward, self.weights = graph, list(forward), set(weights)
        self._unused = set(graph) - ancestors([*graph.outputs, *results])
        self.position = {node: index for index, node in enumerate(self.forward)}
        self._owner = {inner: node for node in graph for inner in _inner_nodes(node)}
        sources = [value for value in graph.inputs if value not in self.weights]
        self.varying: set[ir.Value] = set(sources)
        random = [y for node in self.forward if not node.inputs for y in node.outputs if node.op_type in RANDOM_OPS]
        self.varying.update(random)
        for node in self.forward:
            if any(x in self.varying for x in node_inputs(node)):
                self.varying.update(node.outputs)

    def owner(self, node: ir.Node) -> ir.Node:
        """The node of the graph itself that `node` is or is inside of."""
        return self._owner.get(node, node)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes of the graph itself that read a value, each once."""
        return [n for n in dict.fromkeys(self.owner(use.node) for use in value.uses()) if n not in self._unused]

    def backward_readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that are not of the forward and read a value."""
        return [node for node in self.readers(value) if node not in self.position]

    def is_activation(self, value: ir.Value) -> bool:
        """Whether a value is worth to be made again: a tensor that grows with the batch."""
        if value not in self.varying or value.dtype is None or not isinstance(value.type, ir.TensorType):
            return False
        if value.dtype == ir.DataType.STRING:
            return False
        if value.shape is None:
            return True
        rank = len(value.shape)
        return rank > 1 or (rank == 1 and not value.dtype.is_integer() and static_dims(value) is None)

    def kept_by_backward(self) -> list[ir.Value]:
        """The activations of the forward that a backward node reads (not only for their shape)."""
        values = (y for node in self.forward for y in node.outputs)
        return [y for y in values if self.is_activation(y) and any(map(_reads_elements, self.backward_readers(y)))]

    def with_views(self, nodes: Iterable[ir.Node]) -> frozenset[ir.Node]:
        """`nodes` and the views of what they make: the backward may hold the memory through one."""
        found = set(nodes)
        stack = list(found)
        while stack:
            for y in stack.pop().outputs:
                for reader in self.readers(y):
                    view = reader.op_type in VIEWS and reader.inputs[0] is y
                    if view and reader in self.position and reader not in found:
                        found.add(reader)
                        stack.append(reader)
        return frozenset(found)

    def plan(self, segments: Sequence[Segment]) -> list[Recomputation]:
        """What each segment comes to, the last of the forward first.

        What one reads stays in memory, so no other makes it again, and the backward goes on reading it.
        """
        ordered = sorted(
            segments, key=lambda segment: max(map(self.position.get, segment.nodes), default=0), reverse=True
        )
        shared: set[ir.Value] = set()
        while True:
            kept, plans = set(shared), []
            for segment in ordered:
                plan = self._plan(segment, kept)
                if plan.replaced:
                    kept.update(plan.inputs)
                    plans.append(plan)
            clashes = {y for plan in plans for y in plan.replaced if y in kept}  # segments that lie across each other
            if not clashes:
                return plans
            shared |= clashes

    def _plan(self, segment: Segment, kept: set[ir.Value]) -> Recomputation:
        plan = Recomputation(segment)
        again: set[ir.Node] = set()
        inputs: dict[ir.Value, None] = {}
        only_sizes = []

        def repeatable(value: ir.Value) -> bool:
            node = value.producer()
            if node not in segment.nodes or not self.is_activation(value) or not _is_repeatable(node):
                return False
            return value not in kept and not value.is_graph_output()

        def run_again(value: ir.Value) -> None:
            stack = [value.producer()]
            while stack:
                node = stack.pop()
                if node in again:
                    continue
                again.add(node)
                for x in node_inputs(node):
                    if repeatable(x):
                        stack.append(x.producer())
                    elif x in self.varying:
                        inputs[x] = None

        for node in sorted(segment.nodes, key=self.position.get):
            for y in node.outputs:
                readers = self.backward_readers(y) if repeatable(y) else ()
                if any(map(_reads_elements, readers)):
                    run_again(y)
                    plan.replaced[y] = y
                elif readers:
                    only_sizes.append(y)
        for y in only_sizes if again else ():
            like = next((other for other in (*plan.replaced, *inputs) if same_shape(other, y)), None)
            if like is None:
                run_again(y)
            plan.replaced[y] = y if y.producer() in again else like
        plan.nodes = sorted(again, key=self.position.get)
        plan.inputs = [x for x in inputs if self.is_activation(x)]
        return plan


def ancestors(values: Iterable[ir.Value], known: Collection[ir.Node] = ()) -> set[ir.Node]:
    """The nodes that make `values` and all before them, as far as they are not in `known`."""
    found: set[ir.Node] = set()
    stack = [value.producer() for value in values]
    while stack:
        node = stack.pop()
        if node is not None and node not in found and node not in known:
            found.add(node)
            stack.extend(x.producer() for x in node_inputs(node))
    return found


def _is_repeatable(node: ir.Node) -> bool:
    """Whether a second run of a node surely makes what the first made, and can be one node."""
    random = node.op_type in RANDOM_OPS or "Dropout" in node.op_type or "Random" in node.op_type
    return not random and next(subgraphs(node), None) is None


def _reads_elements(node: ir.Node) -> bool:
    return node.op_type not in _SIZES


def _inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    for graph in subgraphs(node):
        for inner in graph:
            yield inner
            yield from _inner_nodes(inner)
