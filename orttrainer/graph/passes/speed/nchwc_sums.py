"""Sums that a convolution in blocks of channels makes itself."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from orttrainer.graph.builder import Builder, same_shape, static_dims
from orttrainer.graph.passes.speed.nchwc_nodes import DOMAIN, is_reordering


class SumIntoConvolutionPass(ir.passes.InPlacePass):
    """Add(Conv(x, w), y) -> Conv(x, w, sum=y), for `Conv` in blocks of channels, and with a Relu behind it.

    The operator of ONNX Runtime adds to what is there, in the memory of y if nobody else reads that: one pass over
    memory less. So an Add stays where y is read by others, unless the Relu pays for the copy. Sub(y, Conv(x, w)) is
    Conv(x, -w, sum=y) where w is small, that of a depthwise one. What is added outside of the blocks that both came from
    is added in them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        op, modified = Builder(graph, "sums"), False
        for node in [node for node in graph if node.op_type in ("Add", "Sub") and not node.domain]:
            with op.scope(node.name):
                modified |= _add_in_blocks(op, node)
                modified |= _sum_into(op, node)
        if modified:
            graph.sort()
        return ir.passes.PassResult(model, modified)


class _Convolved(NamedTuple):
    """What a convolution gives, in the shape that it is read in.

    Attributes:
        node: the convolution; nothing else reads its result.
        view: the Reshape behind it, if any; then one is before it too, to images of the size of the result.
    """

    node: ir.Node
    view: ir.Node | None

    @classmethod
    def of(cls, x: ir.Value) -> _Convolved | None:
        """None where `x` is not such a result, or the convolution already adds or activates."""
        view = x.producer() if x.producer() is not None and x.producer().op_type == "Reshape" else None
        y = x if view is None else view.inputs[0]
        node = y.producer()
        if node is None or (node.domain, node.op_type) != (DOMAIN, "Conv") or not all(map(_is_read_once, (x, y))):
            return None
        if view is not None and not _is_reshaped(node.inputs[0], y):
            return None
        plain = len(node.inputs) <= 3 and node.attributes.get_string("activation", None) is None
        return cls(node, view) if plain else None

    @property
    def is_depthwise(self) -> bool:
        weights = static_dims(self.node.inputs[1])
        return weights is not None and weights[0] == self.node.attributes.get_int("group", 1) > 1


def _add_in_blocks(op: Builder, node: ir.Node) -> bool:
    """Add(ReorderOutput(a), ReorderOutput(b)) -> ReorderOutput(Add(a, b)), where nothing else reads these; whether it is so."""
    ways = [x.producer() for x in node.inputs]
    if node.op_type != "Add" or not same_shape(*node.inputs) or ways[0] is ways[1]:
        return False
    if not all(
        way is not None and is_reordering(way, "ReorderOutput") and _is_read_once(way.outputs[0]) for way in ways
    ):
        return False
    (y,), (first, second) = node.outputs, ways
    for index, way in enumerate(ways):
        node.replace_input_with(index, way.inputs[0])
    op.graph.remove(first, safe=True)
    op.graph.remove(second)
    op.graph.insert_after(node, second)
    second.outputs[0].name, y.name = y.name, f"{y.name}/blocks"
    y.replace_all_uses_with(second.outputs[0], replace_graph_outputs=True)
    second.replace_input_with(0, y)
    y.shape = node.inputs[0].shape
    return True


def _sum_into(op: Builder, node: ir.Node) -> bool:
    """Let a convolution make the result of `node`; whether one can."""
    (y,), (left, right) = node.outputs, node.inputs
    if not same_shape(left, y) or not same_shape(right, y) or left is right:
        return False
    relu = _relu_behind(y)
    for x, other in ((right, left), (left, right)):
        convolved = _Convolved.of(x)
        if convolved is None or (node.op_type == "Sub" and (x is left or not convolved.is_depthwise)):
            continue
        if relu is None and not _is_free(other):
            continue
        conv, view = convolved
        inputs = [*conv.inputs, None][:3]
        if node.op_type == "Sub":
            inputs[1:] = [v if v is None else op.Neg(v) for v in inputs[1:]]
        attributes = [*conv.attributes.values(), *([ir.AttrString("activation", "Relu")] if relu is not None else [])]
        new = ir.Node(
            DOMAIN, "Conv", [*inputs, other if view is None else _viewed(op, other, conv)], attributes, name=conv.name
        )  # fmt: skip
        (made,), (before,) = new.outputs, conv.outputs
        made.name, made.type, made.shape = op.new_name("Conv"), before.type, before.shape
        op.graph.insert_before(node, new)
        if view is not None:
            made = op.node("Reshape", made, view.inputs[1], like=y)
        last = node if relu is None else relu
        last.outputs[0].replace_all_uses_with(made)
        for gone in [relu, node, view, conv]:
            if gone is not None:
                op.graph.remove(gone, safe=True)
        return True
    return False


def _viewed(op: Builder, x: ir.Value, conv: ir.Node) -> ir.Value:
    """`x` in the shape that `conv` computes in."""
    back, image = x.producer(), conv.inputs[0]
    if back is not None and back.op_type == "Reshape" and same_shape(back.inputs[0], conv.outputs[0]):
        return back.inputs[0]
    return op.node("Reshape", x, image.producer().inputs[1], like=conv.outputs[0])


def _is_reshaped(image: ir.Value, y: ir.Value) -> bool:
    """Whether a Reshape makes `image`, in the shape of `y`."""
    return image.producer() is not None and image.producer().op_type == "Reshape" and same_shape(image, y)


def _relu_behind(y: ir.Value) -> ir.Node | None:
    """The Relu that alone reads `y`."""
    if not _is_read_once(y):
        return None
    ((reader, _),) = y.uses()
    alone = reader.op_type == "Relu" and reader.graph is y.producer().graph
    return reader if alone and not reader.outputs[0].is_graph_output() else None


def _is_read_once(x: ir.Value) -> bool:
    return len(x.uses()) == 1 and not x.is_graph_output()


def _is_free(x: ir.Value) -> bool:
    """Whether the memory of `x` is nobody's else, so that it can be written to."""
    while True:
        node = x.producer()
        if node is None or not _is_read_once(x):
            return False
        if node.op_type not in ("Reshape", "Identity"):
            return True
        x = node.inputs[0]
