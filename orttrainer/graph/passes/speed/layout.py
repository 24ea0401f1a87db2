"""How the state holds a weight: as the products of a step read and write it, not as the model declares it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.passes.speed.tiles import equal_tiles
from orttrainer.graph.scopes import copy_scope

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class WideLinearLayoutPass(ir.passes.InPlacePass):
    """x @ W^T + b, W [outputs, inputs] -> [x 1] @ S, S = [W^T; b] [inputs + 1, outputs], where outputs >> inputs.

    For the decoder of a language model. Its weight gradient is then one product [x 1]^T @ dy that reads dy as it lies
    and gives the gradient of the bias as well; no pass over dy adds or sums a bias, none over W transposes it.

    W may be a large table as well, that of the embedding: its rows are looked up as columns of S then, element by element.
    That costs less than to bring the product into the order of the table, which the gradient of rows is added to.

    Args:
        parameters: names of graph inputs that may be stored so.
        may_hold: (weight, bias) -> whether one buffer may hold both; else the bias stays apart.

    Attributes:
        stored: name of each weight whose input is S now -> name of the bias in its last row, which is no input any more;
            None if there is none.
    """

    WIDE = 8  # outputs over inputs
    LARGE = 1 << 18  # elements of W
    LARGE_TABLE = 1 << 22  # where it is looked up too

    def __init__(self, parameters: Collection[str], may_hold: Callable[[str, str], bool]):
        self._parameters, self._may_hold = frozenset(parameters), may_hold
        self.stored: dict[str, str | None] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        op = Builder(model.graph, "layout")
        for weight in [value for value in model.graph.inputs if self._is_wide(value)]:
            lookups = [reader for reader, index in weight.uses() if index == 0 and _is_lookup(reader)]
            others = [reader for reader, _ in weight.uses() if reader not in lookups]
            if any(reader.graph is not model.graph for reader in (*lookups, *others)):
                continue  # in a branch or a loop
            if len(others) != 1 or weight.is_graph_output() or (lookups and not self._is_large_table(weight)):
                continue
            if (linear := _linear(weight, *others)) is not None:
                self._store(op, weight, bool(lookups), *linear)
                for lookup in lookups:
                    _look_up_columns(op, lookup)
        if self.stored:
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(self.stored))

    def _is_wide(self, weight: ir.Value) -> bool:
        dims = static_dims(weight)
        if weight.name not in self._parameters or weight.dtype not in FLOATS or dims is None or len(dims) != 2:
            return False
        return dims[0] >= self.WIDE * dims[1] and dims[0] * dims[1] >= self.LARGE

    def _is_large_table(self, weight: ir.Value) -> bool:
        return math.prod(static_dims(weight)) >= self.LARGE_TABLE

    def _may_join(self, weight: ir.Value, bias: ir.Value, is_table: bool) -> bool:
        if is_table and equal_tiles(math.prod(static_dims(weight)) + static_dims(bias)[0]) is None:
            return False  # W10: 16 ms and 165 MB more than with an update in tiles
        fits = bias.name in self._parameters and bias.dtype == weight.dtype and len(bias.uses()) == 1
        return fits and self._may_hold(weight.name, bias.name)

    def _store(
        self,
        op: Builder,
        weight: ir.Value,
        is_table: bool,
        nodes: list[ir.Node],
        x: ir.Value,
        bias: ir.Value | None,
    ) -> None:
        """Take `nodes`, which compute x @ W^T + b, out of the graph; write the product with what is stored."""
        (outputs, inputs), joined = static_dims(weight), None
        if bias is not None and self._may_join(weight, bias, is_table):
            joined, bias, inputs = bias, None, inputs + 1
        before = set(op.graph)
        for index, value in enumerate(nodes[0].inputs):
            if value is weight:
                nodes[0].replace_input_with(index, None)
        weight.shape = ir.Shape([inputs, outputs])
        if joined is not None:
            x = op.Pad(x, np.array([0] * (2 * len(x.shape) - 1) + [1]), op.scalar(1.0, x))
        y = op.MatMul(x, weight)
        if bias is not None:
            y = op.Add(y, bias)
        _take_place(op, y, nodes, before)
        if joined is not None:
            op.graph.inputs.remove(joined)
        self.stored[weight.name] = None if joined is None else joined.name


def _is_lookup(node: ir.Node) -> bool:
    rows = node.op_type == "Gather" and not node.domain and node.attributes.get_int("axis", 0) == 0
    return rows and node.outputs[0].shape is not None


def _look_up_columns(op: Builder, lookup: ir.Node) -> None:
    """Gather(W, indices) -> what S, which `lookup` reads already, has of the rows of W in its columns.

    GatherElements takes 0.4 ms for 512 columns of 384, Gather along axis 1 takes 1.4: it uses one thread.
    """
    (stored, indices), (old,) = lookup.inputs, lookup.outputs
    width, before = old.shape[-1], set(op.graph)
    columns = op.Expand(op.Reshape(indices, [1, -1]), [width, 1])
    y = op.Transpose(op.GatherElements(stored, columns, axis=1), perm=[1, 0])
    dims = [size if isinstance(size, int) else -1 for size in old.shape.dims]
    target = dims if dims.count(-1) <= 1 else op.Concat(op.shape(indices), [width], axis=0)
    _take_place(op, op.Reshape(y, target), [lookup], before)


def _take_place(op: Builder, y: ir.Value, nodes: list[ir.Node], before: Collection[ir.Node]) -> None:
    """Let `y` be what `nodes` have made; `before`: the nodes that did not make it."""
    (old,) = nodes[-1].outputs
    y.shape = old.shape if old.shape is not None else y.shape
    for node in op.graph:
        if node not in before:
            copy_scope(nodes[-1], node)
    replace(old, y)
    for node in reversed(nodes):
        op.graph.remove(node, safe=True)


def _linear(weight: ir.Value, reader: ir.Node) -> tuple[list[ir.Node], ir.Value, ir.Value | None] | None:
    """The nodes that compute x @ W^T + b, `reader` first; x; b, if there is one."""
    if reader.op_type == "Gemm":
        kept = all(reader.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        turned = reader.attributes.get_int("transB", 0) and not reader.attributes.get_int("transA", 0)
        x, w, *bias = reader.inputs
        bias = bias[0] if bias else None
        if w is not weight or not kept or not turned or not (bias is None or _is_bias(bias, weight)):
            return None
        return [reader], x, bias
    if reader.op_type != "Transpose" or reader.attributes.get_ints("perm", (1, 0)) not in ([1, 0], (1, 0)):
        return None
    product = _only_reader(reader.outputs[0])
    if product is None or product.op_type != "MatMul" or product.inputs[1] is not reader.outputs[0]:
        return None
    x, y = product.inputs[0], product.outputs[0]
    if x.shape is None or len(x.shape) < 2:
        return None
    addition = _only_reader(y)
    if addition is not None and addition.op_type == "Add":
        bias = next((value for value in addition.inputs if value is not y), None)
        if bias is not None and _is_bias(bias, weight):
            return [reader, product, addition], x, bias
    return [reader, product], x, None


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads `value`, if it is the only one, in the same graph."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not value.producer().graph:
        return None
    return uses[0].node


def _is_bias(value: ir.Value, weight: ir.Value) -> bool:
    return value.is_graph_input() and static_dims(value) == (weight.shape[0],)
