"""How the state holds a weight: as the products of a step read and write it, not as the model declares it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from orttrainer.graph.builder import Builder, static_dims
from orttrainer.graph.passes.counter_hash import replace
from orttrainer.graph.scopes import copy_scope

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class WideLinearLayoutPass(ir.passes.InPlacePass):
    """x @ W^T + b, W [outputs, inputs] -> [x 1] @ S, S = [W^T; b] [inputs + 1, outputs], where outputs >> inputs.

    For the decoder of a language model. Its weight gradient is then one product [x 1]^T @ dy that reads dy as it lies
    and gives the gradient of the bias as well; no pass over dy adds or sums a bias, none over W transposes it.

    Args:
        parameters: names of graph inputs that may be stored so.
        may_hold: (weight, bias) -> whether one buffer may hold both; else the bias stays apart.

    Attributes:
        stored: name of each weight whose input is S now -> name of the bias in its last row, which is no input any more;
            None if there is none.
    """

    WIDE = 8  # outputs over inputs
    LARGE = 1 << 18  # elements of W

    def __init__(self, parameters: Collection[str], may_hold: Callable[[str, str], bool]):
        self._parameters, self._may_hold = frozenset(parameters), may_hold
        self.stored: dict[str, str | None] = {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        op = Builder(model.graph, "layout")
        for weight in [value for value in model.graph.inputs if self._is_wide(value)]:
            if (linear := _linear(weight)) is not None:
                self._store(op, weight, *linear)
        if self.stored:
            common.TopologicalSortPass()(model)
        return ir.passes.PassResult(model, bool(self.stored))

    def _is_wide(self, weight: ir.Value) -> bool:
        dims = static_dims(weight)
        if weight.name not in self._parameters or weight.dtype not in FLOATS or dims is None or len(dims) != 2:
            return False
        return dims[0] >= self.WIDE * dims[1] and dims[0] * dims[1] >= self.LARGE

    def _may_join(self, weight: ir.Value, bias: ir.Value) -> bool:
        fits = bias.name in self._parameters and bias.dtype == weight.dtype and len(bias.uses()) == 1
        return fits and self._may_hold(weight.name, bias.name)

    def _store(self, op: Builder, weight: ir.Value, nodes: list[ir.Node], x: ir.Value, bias: ir.Value | None) -> None:
        """Take `nodes`, which compute x @ W^T + b, out of the graph; write the product with what is stored."""
        (outputs, inputs), (old,), joined = static_dims(weight), nodes[-1].outputs, None
        if bias is not None and self._may_join(weight, bias):
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
        y.shape = old.shape if old.shape is not None else y.shape
        for node in op.graph:
            if node not in before:
                copy_scope(nodes[-1], node)
        replace(old, y)
        for node in reversed(nodes):
            op.graph.remove(node, safe=True)
        if joined is not None:
            op.graph.inputs.remove(joined)
        self.stored[weight.name] = None if joined is None else joined.name


def _linear(weight: ir.Value) -> tuple[list[ir.Node], ir.Value, ir.Value | None] | None:
    """The nodes that compute x @ W^T + b, if nothing else reads W; x; b, if there is one."""
    reader = _only_reader(weight)
    if reader is None:
        return None
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
    uses = value.uses()
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _is_bias(value: ir.Value, weight: ir.Value) -> bool:
    return value.is_graph_input() and static_dims(value) == (weight.shape[0],)
