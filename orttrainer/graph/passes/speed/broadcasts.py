"""Tensors that are repeated along an axis for an operator that repeats them itself."""

from __future__ import annotations

import functools

import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_dim, same_shape
from orttrainer.graph.scopes import put_in_place

BINARY = frozenset(["Add", "Div", "Max", "Min", "Mul", "Sub"])
UNARY = frozenset(["Abs", "Exp", "Identity", "Log", "Neg", "Reciprocal", "Sqrt"])


class BroadcastPass(ir.passes.InPlacePass):
    """Mul(Expand(x), y) -> Mul(x, y), where y has the sizes that x lacks; so for all that works element by element.

    The gradient of a sum is repeated for each element that was summed, and then multiplied by what the element was. ONNX
    Runtime's Expand takes several times as long as the product: 16 x 40 x 40 x 1 to 32 more, with the product 1.75 -> 0.35
    ms. What is done to all of a repeated tensor alike is done before it is repeated. Of images with channels the mean of
    each stays repeated: such products are taken in blocks of channels.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph, modified = model.graph, False
        if not any(_is_expand(node) for node in graph):
            return ir.passes.PassResult(model, modified=False)
        op = Builder(graph, "broadcast")
        for node in list(graph):
            if node.domain or node.op_type not in BINARY | UNARY or len(node.outputs) != 1:
                continue
            while (place := _needless(node)) is not None:
                node.replace_input_with(place, node.inputs[place].producer().inputs[0])
                modified = True
            if (place := _alike(node)) is not None:
                put_in_place(op, node, functools.partial(_repeated_behind, place=place))
                modified = True
        if modified:
            graph.sort()  # the builder appends
        return ir.passes.PassResult(model, modified)


def _is_expand(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Expand" and not node.domain


def _needless(node: ir.Node) -> int | None:
    """The operand that need not be repeated, since the other one has what it lacks; None if neither is such."""
    if node.op_type not in BINARY or len(node.inputs) != 2:
        return None
    for place, x in enumerate(node.inputs):
        if _is_repeated(x) and _fill(x.producer().inputs[0], node.inputs[1 - place], node.outputs[0]):
            return place
    return None


def _fill(a: ir.Value, b: ir.Value, y: ir.Value) -> bool:
    """Whether `a` and `b` surely have the shape of `y` together."""
    if b.shape is None or y.shape is None or len(y.shape) > max(len(a.shape), len(b.shape)):
        return False
    rank = len(y.shape)
    sizes = [[1] * (rank - len(x.shape)) + list(x.shape.dims) for x in (a, b)]
    return all(same_dim(p, size) or same_dim(q, size) for p, q, size in zip(*sizes, y.shape.dims))


def _repeated_behind(op: Builder, node: ir.Node, place: int) -> ir.Value:
    expand = node.inputs[place].producer()
    inputs = [expand.inputs[0] if k == place else x for k, x in enumerate(node.inputs)]
    return op.Expand(op.node(node.op_type, *inputs), expand.inputs[1])


def _alike(node: ir.Node) -> int | None:
    """The operand that is repeated, where the others are single numbers."""
    repeated = [k for k, x in enumerate(node.inputs) if _is_repeated(x)]
    others = [x for k, x in enumerate(node.inputs) if k not in repeated]
    if len(repeated) != 1 or any(x is None or x.shape is None or len(x.shape) for x in others):
        return None
    return repeated[0]


def _is_repeated(x: ir.Value | None) -> bool:
    """Whether this is made by an Expand of fewer elements, and is no image of means."""
    if x is None or not _is_expand(x.producer()) or x.shape is None:
        return False
    of = x.producer().inputs[0]
    if of.shape is None or x.is_graph_output() or same_shape(of, x):
        return False
    return not (len(of.shape) == len(x.shape) == 4 and all(size == 1 for size in of.shape.dims[2:]))
