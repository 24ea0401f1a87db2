"""Find the parts of a graph that work element by element, and let one kernel compute each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from orttrainer.graph.builder import same_dim, same_shape
from orttrainer.graph.subgraphs import node_inputs, subgraphs
from orttrainer.native.kernel import FLOATS, TRANSCENDENTAL, Kernel, formula
from orttrainer.native.toolchain import DOMAIN

MOST_TENSORS, MOST_AXES = 64, 16  # as in custom_op.c
MOST_AGAIN = 32  # nodes that a kernel computes again
LEAST_SQUARED = 2**12  # elements of a gradient whose squares are summed up as it is used
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")


class FusePointwisePass(ir.passes.InPlacePass):
    """Add(Mul(a, b), Sqrt(c)) -> Pointwise_...(a, b, c), a custom operator that reads and writes each tensor once.

    ONNX Runtime runs one operator after the other over the whole tensor: an update by Adam reads and writes memory a
    dozen times. What is fused has one shape; inputs may broadcast to it. What else is made on the way for others is an
    output too, if all of them run later: the nodes have an order, and a kernel stands where the last of its nodes did,
    so that no two kernels can wait for each other.

    A kernel makes again what an earlier one has made, where that spares it to read more than it costs: the mask of a
    dropout is never kept for the backward.

    Args:
        kept: nodes to leave as they are.

    Attributes:
        kernels: of the operators that the graph has now.
    """

    def __init__(self, kept: Collection[ir.Node] = ()):
        super().__init__()
        self._kept = frozenset(kept)
        self.kernels: list[Kernel] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        model.graph.sort()
        self._fuse_in(model.graph)
        if self.kernels:
            model.graph.opset_imports[DOMAIN] = 1
            model.graph.sort()
        return ir.passes.PassResult(model, bool(self.kernels))

    def _fuse_in(self, graph: ir.Graph) -> None:
        for node in graph:
            for inner in subgraphs(node):
                self._fuse_in(inner)
        order = _early(graph, self._is_pointwise)
        groups = _groups(order, self._is_pointwise)
        _make_again(groups)
        _sum_squares(groups, order)
        fitting, replaced = _that_fit(graph, groups), {}
        for group, made in fitting:
            self.kernels.append(_insert(graph, group, made, replaced))
        gone = [node for group, _ in reversed(fitting) for node in (*group.absorbed, *reversed(group.nodes))]
        graph.remove(gone, safe=True)

    def _is_pointwise(self, node: ir.Node) -> bool:
        if node in self._kept or formula(node) is None:
            return False
        (y,) = node.outputs
        if y.shape is None or not 0 < len(y.shape) <= MOST_AXES:
            return False
        return all(_broadcasts(x, y) for x in node.inputs)


@dataclass
class _Group:
    """What one kernel computes.

    Attributes:
        nodes: to be replaced, in an order in which they can run.
        again: nodes of other groups that it runs as well, before its own.
        squares: total -> what it is the sum of the squares of.
        absorbed: the nodes that made these totals, those that run last first.
    """

    nodes: list[ir.Node]
    again: list[ir.Node] = field(default_factory=list)
    squares: dict[ir.Value, ir.Value] = field(default_factory=dict)
    absorbed: list[ir.Node] = field(default_factory=list)

    @property
    def inputs(self) -> list[ir.Value]:
        made = {node.outputs[0] for node in (*self.again, *self.nodes)}
        return list(dict.fromkeys(x for node in (*self.again, *self.nodes) for x in node.inputs if x not in made))

    def tensors(self, made: Sequence[ir.Value]) -> int:
        return max(len(self.inputs), len(made) + len(self.squares))

    def outputs(self, read: Collection[ir.Value]) -> list[ir.Value]:
        return [node.outputs[0] for node in self.nodes if node.outputs[0] in read]

    def closure(self, values: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes of its own that some of its values are made by."""
        needed = set(values)
        for node in reversed(self.nodes):
            if node.outputs[0] in needed:
                needed.update(node.inputs)
        return [node for node in self.nodes if node.outputs[0] in needed]


def _insert(graph: ir.Graph, group: _Group, made: Sequence[ir.Value], replaced: dict[ir.Value, ir.Value]) -> Kernel:
    """Add the node of a group; `replaced`: value -> the one that stands for it now."""
    inputs, last = group.inputs, group.nodes[-1]
    kernel = Kernel.of([*group.again, *group.nodes], inputs, made, list(group.squares.values()))
    outputs = len(made) + len(group.squares)
    fused = ir.Node(DOMAIN, kernel.name, [replaced.get(x, x) for x in inputs], num_outputs=outputs, name=last.name)
    fused.metadata_props.update(last.metadata_props)
    graph.insert_after(last, fused)
    for y, new in zip((*made, *group.squares), fused.outputs):
        new.type, new.shape, name = y.type, y.shape, y.name
        y.replace_all_uses_with(new, replace_graph_outputs=True)
        y.name, new.name = None, name
        replaced[y] = new
    return kernel


def _that_fit(graph: ir.Graph, groups: Sequence[_Group]) -> list[tuple[_Group, list[ir.Value]]]:
    """Groups and their outputs, but for those that nobody reads or of too many tensors: their nodes stay.

    These then read what they were to make again, and have no place in a sum: more outputs of the groups that are left.
    """
    while True:
        read = _read_by_others(graph, groups)
        found = [(group, group.outputs(read)) for group in groups]
        fitting = [(group, made) for group, made in found if made and group.tensors(made) <= MOST_TENSORS]
        if len(fitting) == len(found):
            return fitting
        groups = [group for group, _ in fitting]


def _read_by_others(graph: ir.Graph, groups: Sequence[_Group]) -> set[ir.Value]:
    """What the graph returns, or somebody reads who does not make it."""
    own = {node for group in groups for node in (*group.nodes, *group.absorbed)}
    read = {y for y in graph.outputs if y is not None}
    read.update(x for node in graph if node not in own for x in node_inputs(node))
    read.update(x for group in groups for x in group.inputs)
    return read


def _make_again(groups: Sequence[_Group]) -> None:
    """Let groups make again what they read of earlier ones, where that takes fewer large tensors than it spares.

    Nothing is read later that another node may overwrite by then: new inputs are not of the graph, nor views of such.
    """
    home = {node.outputs[0]: group for group in groups for node in group.nodes}
    place = {node: k for k, node in enumerate(node for group in groups for node in group.nodes)}
    for group in groups:
        wanted: dict[int, list[ir.Value]] = {}
        for x in group.inputs:
            if x in home:
                wanted.setdefault(id(home[x]), []).append(x)
        for values in wanted.values():
            again = sorted({*group.again, *home[values[0]].closure(values)}, key=place.__getitem__)
            if len(again) > MOST_AGAIN or any(node.op_type in TRANSCENDENTAL for node in again):
                continue
            trial = _Group(group.nodes, again)
            before, after = set(group.inputs), set(trial.inputs)
            shape = group.nodes[-1].outputs[0]
            spared, added = (sum(same_shape(x, shape) for x in part) for part in (before - after, after - before))
            if added < spared and not any(_is_fed(x) for x in after - before):
                group.again = trial.again


def _sum_squares(groups: Sequence[_Group], order: Sequence[ir.Node]) -> None:
    """Let groups sum up the squares of what passes through them, if all who read the total run later."""
    place = {node: k for k, node in enumerate(order)}
    taken: set[ir.Node] = set()
    for group in groups:
        last = group.nodes[-1]
        for x in dict.fromkeys((*group.inputs, *(node.outputs[0] for node in group.nodes))):
            if x.dtype not in FLOATS or not same_shape(x, last.outputs[0]):
                continue
            for reader, _ in x.uses():
                chain = _total_of_squares(reader)
                if chain is None or chain[0] in taken or not set(chain) <= place.keys():
                    continue
                total = chain[0].outputs[0]
                if any(place.get(user, -1) <= place[last] for user, _ in total.uses()):
                    continue
                taken.add(chain[0])
                group.squares[total] = x
                group.absorbed += chain


def _total_of_squares(node: ir.Node) -> list[ir.Node] | None:
    """The nodes that make a number of rank 0 by a ReduceSumSquare, `node`, the last first: of all axes, or in two parts."""
    if node.op_type != "ReduceSumSquare" or node.domain:
        return None
    chain, (y,) = [node], node.outputs
    uses = list(y.uses())
    if y.shape is not None and len(y.shape) == 1 and len(uses) == 1 and not y.is_graph_output():
        ((adds, _),) = uses
        if adds.op_type == "ReduceSum" and not adds.domain:
            chain, (y,) = [adds, node], adds.outputs
    return chain if y.shape is not None and len(y.shape) == 0 else None


def _is_fed(x: ir.Value) -> bool:
    """Whether `x` is in the memory of an input of the graph."""
    while (node := x.producer()) is not None and node.op_type in VIEWS:
        x = node.inputs[0]
    return x.is_graph_input()


def _broadcasts(x: ir.Value, y: ir.Value) -> bool:
    """Whether each axis of `x` surely is as long as that of `y`, or 1."""
    if x.shape is None or len(x.shape) > len(y.shape):
        return False
    behind = y.shape.dims[len(y.shape) - len(x.shape) :]
    return all(size == 1 or same_dim(size, other) for size, other in zip(x.shape.dims, behind))


def _early(graph: ir.Graph, is_pointwise: Callable[[ir.Node], bool]) -> list[ir.Node]:
    """The nodes in an order in which they can run, pointwise ones as soon and sums of squares as late as they can.

    The later the others come that read what is made on the way, the more of it may be fused. Last of all comes what no
    pointwise node waits for, such as the norm of all gradients where nothing clips.
    """
    nodes = list(graph)
    place = {node: k for k, node in enumerate(nodes)}
    waits, readers = {}, {node: [] for node in nodes}
    for node in nodes:
        before = {x.producer() for x in node_inputs(node)} & place.keys()
        waits[node] = len(before)
        for producer in before:
            readers[producer].append(node)
    urgency = [0 if is_pointwise(node) else 2 if node.op_type == "ReduceSumSquare" else 1 for node in nodes]
    for k, node in reversed(list(enumerate(nodes))):
        if urgency[k] and all(urgency[place[reader]] == 3 for reader in readers[node]):
            urgency[k] = 3
    ready = [(urgency[k], k) for k, node in enumerate(nodes) if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (urgency[place[reader]], place[reader]))
    return order


def _groups(order: Sequence[ir.Node], is_pointwise: Callable[[ir.Node], bool]) -> list[_Group]:
    """Nodes to be fused, in the order in which the groups can run."""
    place = {node: k for k, node in enumerate(order)}
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in order}
    for node in order:
        for x in node_inputs(node):
            if x.producer() in place:
                readers[x.producer()].append(node)
    taken, groups = set(), []
    for last in reversed(order):
        if last in taken or not is_pointwise(last):
            continue
        group, ahead = {last}, [-place[last]]  # the producers still to look at, the last first: its readers are decided
        while ahead:
            node = order[-heapq.heappop(ahead)]
            if node not in group:
                if node in taken or not is_pointwise(node) or not same_shape(node.outputs[0], last.outputs[0]):
                    continue
                if any(reader not in group and place[reader] < place[last] for reader in readers[node]):
                    continue
                group.add(node)
            elif node is not last:
                continue  # reached in two ways
            for x in node.inputs:
                if x.producer() in place:
                    heapq.heappush(ahead, -place[x.producer()])
        if len(group) > 1 or last.op_type in TRANSCENDENTAL:  # of which all are to round alike, as what is recomputed
            taken |= group
            groups.append(_Group(sorted(group, key=place.__getitem__)))
    return groups[::-1]
