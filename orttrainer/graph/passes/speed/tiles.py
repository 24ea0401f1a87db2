"""Updates of large parameters, a tile at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.speed.late_norm import let_norm_be_late
from orttrainer.graph.passes.speed.sparse_update import is_written_through, scattered_first, sums_squares
from orttrainer.graph.passes.speed.tile_products import RowProduct, wait_for_operands
from orttrainer.graph.passes.unused import RemoveUnusedNodesPass

ELEMENTWISE = frozenset(["Add", "Div", "Max", "Mul", "Neg", "Sqrt", "Sub"])
ELEMENTS = 2**19  # of a tile, at most: six tensors of them are in the cache together
LEAST_SHARE = 8  # a tile may be this many times smaller, where the sizes of the parameter have no better divisor
LEAST_ELEMENTS = 2**19  # of a parameter: smaller ones with their moments are in the cache anyway
LEAST_OF_TABLE = 2**21  # of one whose moments are added to in place: W8 takes 15.8 ms and 80 MB more from 2^19, 14.3 so
COLUMNS = 4096  # of a tile at most, so that it has rows for all threads
FEW = 64  # nodes, as many as there are between the norm of a parameter and its step


View = tuple[str, tuple[int, ...]]  # name of a state, and the shape that its memory is seen in


class TileUpdatesPass(ir.passes.InPlacePass):
    """x' = f(x, g) -> x' = Scan(x, g) { f }, with x, g and x' as [tiles, rows, columns].

    ONNX Runtime runs one operator after the other over the whole tensor. A dozen of them over 5.8 M elements read and
    write memory a dozen times, 12.9 ms; in tiles that stay in the cache, 6.7 (2 threads, 32 MB of cache). A Scan hands
    its body the tiles where they are, copies nothing, and writes results where its outputs are bound to. States are
    inputs and outputs of the graph in the shape of the tiles; the gradient is reshaped, which costs nothing.

    An update is tiled if it is made of elementwise operators from state, scalars and tensors of that shape, and nobody
    else reads what is on the way but sums of squares, as LAMB's: these are summed by tiles, and what waits for them
    stays outside. Whoever reads an old value elsewhere still runs before it is written: in the whole graph it came
    before the new value, through something that the Scan waits for too.

    Args:
        groups: for each parameter, input -> output of its state tensors that are updated in place.
        norm: name of the output that is the norm of all gradients; empty if there is none.
        sizes: of symbolic dimensions, in the batch at hand.
        fuses: whether kernels of our own are to compute the tiles; then only updates are tiled that make their gradient.

    Attributes:
        inputs, outputs: name -> the state that it stands for; the whole outputs of these states are gone.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, str]],
        norm: str = "",
        sizes: Mapping[str, int] | None = None,
        fuses: bool = False,
    ):
        super().__init__()
        self._groups = list(groups)
        self._norm, self._sizes, self._fuses = norm, sizes or {}, fuses
        self.inputs: dict[str, View] = {}
        self.outputs: dict[str, View] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op, replaced, modified = Builder(graph, "tiles"), set(), False
        products: list[RowProduct] = []
        inputs, outputs = ({value.name: value for value in values} for values in (graph.inputs, graph.outputs))
        if self._groups and self._norm in outputs:
            modified = let_norm_be_late(op, outputs[self._norm])
        for group in self._groups:
            states = {inputs[old]: outputs[new] for old, new in group.items() if old in inputs and new in outputs}
            dims = common_dims(states)
            if not _is_large(dims):
                continue
            if math.prod(dims) < LEAST_OF_TABLE and any(is_written_through(*pair) for pair in states.items()):
                continue
            for old, new in () if self._fuses else list(states.items()):
                if (values := scattered_first(op, old, new)) is not None:
                    first, states[old] = values
                    self.outputs[first.name] = (old.name, dims)
                    modified = True
            update = _Update.of(states, dims)
            if update is not None and (shape := self._shape(update)) is not None:
                replaced |= update.tile(op, shape, self.inputs, self.outputs, self._fuses)
                products += [update.product] if update.product is not None else []
                modified = True
        if modified:
            wait_for_operands(op, products)
            kept = [value for value in graph.outputs if value.name not in replaced]
            graph.outputs.clear()
            graph.outputs.extend(kept)
            RemoveUnusedNodesPass()(model)
            remove_unread(graph, {inputs[name] for name, _ in self.inputs.values()})
            graph.sort()
        return ir.passes.PassResult(model, modified)

    def _shape(self, update: _Update) -> tuple[int, int, int] | None:
        """The tiles of an update, their rows and columns; None if it stays whole. Finds the product that is part of it."""
        product = update.find_product(self._sizes)
        if product is not None and (tiles := product.tiles(ELEMENTS)) is not None:
            update.product = product
            rows, columns = update.dims
            return tiles, rows // tiles, columns
        size = math.prod(update.dims)
        if self._fuses or (tiles := equal_tiles(size)) is None:
            return None
        return tiles, *_matrix(size // tiles)


@dataclass
class _Update:
    """The nodes that make new values of one parameter and its state.

    Attributes:
        dims: of all of them.
        states: old value -> new value, in the Scan or behind it.
        nodes: those for the Scan, in an order in which they can run.
        sums: ReduceSumSquare of what they make and of what they read, for others behind them.
        made: what they make that is read behind these sums.
        product: the gradient that is made in the Scan too, if any.
    """

    dims: tuple[int, ...]
    states: dict[ir.Value, ir.Value]
    nodes: list[ir.Node]
    sums: list[ir.Node]
    made: list[ir.Value]
    product: RowProduct | None = None

    @classmethod
    def of(cls, states: Mapping[ir.Value, ir.Value], dims: tuple[int, ...]) -> _Update | None:
        """None where it cannot be tiled."""
        nodes: dict[ir.Node, None] = {}
        for new in states.values():
            collect(new, dims, nodes)
        results = dict.fromkeys(y for node in nodes for y in node.outputs)
        readers = dict.fromkeys(reader for y in results for reader, _ in y.uses() if reader not in nodes)
        if not all(sums_squares(reader) for reader in readers):
            return None
        outside = [*(y for y in results if y not in states.values()), *(sum.outputs[0] for sum in readers)]
        if any(y.is_graph_output() for y in outside):
            return None
        late = _behind(readers, nodes)
        early = [node for node in nodes if node not in late]
        made = [y for node in early for y in node.outputs if any(reader in late for reader, _ in y.uses())]
        sums = [reader for reader in readers if reader.inputs[0].producer() not in late]
        if not any(new.producer() in early for new in states.values()):
            return None
        read = dict.fromkeys(x for node in early for x in node.inputs if x not in results and static_dims(x) == dims)
        sums += [reader for x in read for reader, _ in x.uses() if sums_squares(reader) and _is_apart(reader, early)]
        return cls(dims, dict(states), early, sums, made)

    def find_product(self, sizes: Mapping[str, int]) -> RowProduct | None:
        """A product that nothing else reads, if the update reads one."""
        own = {*self.nodes, *self.sums}
        for x in dict.fromkeys(x for node in self.nodes for x in node.inputs):
            product = None if x in self.states else RowProduct.of(x, sizes)
            if product is not None and own.issuperset(product.readers()):
                return product
        return None

    def tile(
        self,
        op: Builder,
        shape: tuple[int, int, int],
        inputs: dict[str, View],
        outputs: dict[str, View],
        fuses: bool = False,
    ) -> set[str]:
        """Put the nodes into a Scan.

        Args:
            shape: how many tiles, their rows and columns.
            fuses: whether one kernel will compute what the tiles are for.
            inputs, outputs: take the names of those of the Scan that are states.

        Returns:
            Names of the graph's outputs that are gone.
        """
        graph, name = op.graph, f"{self.nodes[-1].outputs[0].name}/scan"
        gradient = self.product.node.outputs[0] if self.product is not None else None
        body = ir.Graph([], [], nodes=[], opset_imports=graph.opset_imports, name=name)
        inside: dict[ir.Value, ir.Value] = {}
        given: list[ir.Value] = []
        results = {y for node in self.nodes for y in node.outputs}
        for x in dict.fromkeys(x for node in self.nodes for x in node.inputs if x not in results):
            if _is_scalar(x):  # no rank above that of a tile
                inside[x] = x if len(x.shape) <= 2 else op.Reshape(x, [1])
                continue
            if x is gradient:
                continue
            if x in self.states:
                whole = ir.Value(name=f"{x.name}/tiles", type=x.type, shape=ir.Shape(shape))
                graph.inputs.append(whole)
                inputs[whole.name] = x.name, shape
            else:
                whole = op.Reshape(x, shape)
            given.append(whole)
            inside[x] = ir.Value(name=f"{x.name}/tile", type=x.type, shape=ir.Shape(shape[1:]))
            body.inputs.append(inside[x])
        if gradient is not None:
            left = self.product.left(op)
            given.append(op.Reshape(left, [*shape[:2], -1]))
            rows = ir.Value(name=f"{left.name}/tile", type=left.type, shape=ir.Shape([shape[1], left.shape[1]]))
            body.inputs.append(rows)
            inside[gradient] = _added(body, self.product.of_tile(rows), gradient, ir.Shape(shape[1:]))
        for node in self.nodes:
            inside[node.outputs[0]] = _copied(body, node, inside, ir.Shape(shape[1:]))
        states = {old: new for old, new in self.states.items() if new in results}
        kept = list(dict.fromkeys([*states.values(), *self.made]))
        body.outputs.extend(inside[y] for y in kept)
        for node in self.sums:
            body.outputs.append(self._summed(op, body, node, inside, fuses))
        attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(given))]
        scan = ir.Node("", "Scan", given, attributes, num_outputs=len(body.outputs), name=name)
        graph.append(scan)
        for whole, value, tile in zip([*kept, *(node.outputs[0] for node in self.sums)], scan.outputs, body.outputs):
            value.name, value.type, value.shape = (
                f"{whole.name}/tiles",
                tile.type,
                ir.Shape([shape[0], *tile.shape.dims]),
            )
        of_value = dict(zip([*kept, *self.sums], scan.outputs))
        for old, new in states.items():
            graph.outputs.append(of_value[new])
            outputs[of_value[new].name] = old.name, shape
        self._read_outside(op, of_value)
        return {new.name for new in states.values()}

    def _summed(self, op: Builder, body: ir.Graph, node: ir.Node, inside: Mapping[ir.Value, ir.Value], fuses: bool):
        """Sums of squares of one tile: of its rows where the squares are made anyway, for that uses all threads."""
        x, total = node.inputs[0], node.outputs[0]
        square = next((n for n in self.nodes if n.op_type == "Mul" and all(y is x for y in n.inputs)), None)
        if square is None or fuses:
            inputs, op_type, dims = [inside[x]], "ReduceSumSquare", []
        else:
            y = inside[square.outputs[0]]
            inputs, op_type, dims = [y, op.const([1])], "ReduceSum", y.shape.dims[:1]
        copy = ir.Node("", op_type, inputs, [ir.AttrInt64("keepdims", 0)], name=f"{node.outputs[0].name}/tile")
        (y,) = copy.outputs
        y.name, y.type, y.shape = copy.name, total.type, ir.Shape(dims)
        body.append(copy)
        return y

    def _read_outside(self, op: Builder, results: Mapping[ir.Value | ir.Node, ir.Value]) -> None:
        """Let what is behind the sums read the results of the Scan."""
        nodes = set(self.nodes)
        for y in self.made:
            whole = op.Reshape(results[y], self.dims)
            for reader, k in [use for use in y.uses() if use[0] not in nodes]:
                reader.replace_input_with(k, whole)
        for node in self.sums:
            by_tile, total = results[node], node.outputs[0]
            if len(total.shape):  # squares of rows, which somebody sums up
                total.replace_all_uses_with(by_tile)
            else:
                total.replace_all_uses_with(op.ReduceSum(by_tile, keepdims=0))
            op.graph.remove(node, safe=True)


def _copied(body: ir.Graph, node: ir.Node, inside: Mapping[ir.Value, ir.Value], shape: ir.Shape) -> ir.Value:
    """The result of a copy of `node` that reads what is inside a body."""
    copy = ir.Node(node.domain, node.op_type, [inside[x] for x in node.inputs], name=f"{node.outputs[0].name}/tile")
    return _added(body, copy, node.outputs[0], shape)


def _added(body: ir.Graph, node: ir.Node, whole: ir.Value, shape: ir.Shape) -> ir.Value:
    """What `node`, now the last of a body, makes: a tile of `whole`."""
    (y,) = node.outputs
    y.name, y.type, y.shape = node.name, whole.type, shape
    body.append(node)
    return y


def _behind(sums: Iterable[ir.Node], nodes: Mapping[ir.Node, None]) -> set[ir.Node]:
    """Those of `nodes` that need one of the sums."""
    seen, stack = set(), list(sums)
    while stack:
        for y in stack.pop().outputs:
            for reader, _ in y.uses():
                if reader not in seen:
                    seen.add(reader)
                    stack.append(reader)
    return {node for node in nodes if node in seen}


def _is_apart(node: ir.Node, others: Iterable[ir.Node]) -> bool:
    """Whether a few nodes are behind `node`, and none of `others` among them."""
    others, seen, stack = set(others), {node}, [node]
    while stack:
        for y in stack.pop().outputs:
            for reader, _ in y.uses():
                if reader in others or len(seen) > FEW:
                    return False
                if reader not in seen:
                    seen.add(reader)
                    stack.append(reader)
    return not any(y.is_graph_output() for y in node.outputs)


def remove_unread(graph: ir.Graph, inputs: Iterable[ir.Value]) -> None:
    """Remove those of the graph's `inputs` that nobody reads any more."""
    for value in inputs:
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)


def common_dims(states: Mapping[ir.Value, ir.Value]) -> tuple[int, ...] | None:
    """The sizes that all old and new values have."""
    found = {static_dims(value) for pair in states.items() for value in pair}
    return found.pop() if len(found) == 1 else None


def _is_large(dims: tuple[int, ...] | None) -> bool:
    return dims is not None and math.prod(dims) >= LEAST_ELEMENTS


def equal_tiles(size: int) -> int | None:
    """How many equal tiles a parameter of `size` elements is cut into; None where none suit."""
    least = -(-size // ELEMENTS)
    return next((n for n in range(max(least, 2), LEAST_SHARE * least + 1) if size % n == 0), None)


def _matrix(size: int) -> tuple[int, int]:
    """Rows and columns of a tile of `size` elements."""
    columns = next(n for n in range(min(size, COLUMNS), 0, -1) if size % n == 0)
    return size // columns, columns


def collect(value: ir.Value, dims: tuple[int, ...], nodes: dict[ir.Node, None]) -> None:
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
