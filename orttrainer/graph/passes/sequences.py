"""Sequences whose length is known: each is a list of tensors, and needs no operator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from orttrainer.graph.builder import Builder
from orttrainer.graph.passes.order import TopologicalOrderPass
from orttrainer.graph.subgraphs import subgraphs

_Known = dict[ir.Value, "list[ir.Value] | ir.Value"]


class ResolveSequencesPass(ir.passes.InPlacePass):
    """SequenceAt(SplitToSequence(x), 1) -> Split(x)[1], and so on, wherever lengths and positions are known.

    Sequences that are a graph's input or output, or that a Loop carries, stay; so does all that depends on them. Types
    have to be inferred before, and the nodes are sorted after.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = _resolve(model.graph, Builder(model.graph, "sequence"), {})
        for node in reversed(nodes):
            if not any(y.uses() or y.is_graph_output() for y in node.outputs):
                node.graph.remove(node, safe=True)
        if nodes:
            TopologicalOrderPass()(model)
        return ir.passes.PassResult(model, bool(nodes))


def _resolve(graph: ir.Graph, op: Builder, known: _Known) -> list[ir.Node]:
    """Write what makes tensors of known sequences without them, in bodies too, which may read those from around them.

    Returns:
        The nodes that make or read sequences, in order.
    """
    nodes = []
    for node in list(graph):
        for body in subgraphs(node):
            body.opset_imports.setdefault("", op.opset)
            nodes += _resolve(body, Builder(body, f"sequence_in_{node.outputs[0].name}"), known)
        if node.domain not in ("", "ai.onnx") or node.op_type not in _RULES:
            continue
        nodes.append(node)
        with op.scope(node.name or node.op_type):
            result = _RULES[node.op_type](op, node, known)
        if isinstance(result, list) or (node.op_type == "Optional" and result is not None):
            known[node.outputs[0]] = result
        elif result is not None:
            value = op.Identity(result)  # the output may be the graph's
            node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
            value.name, node.outputs[0].name = node.outputs[0].name, value.name
    return nodes


# Each returns a list of tensors for a sequence, a value for a tensor, None for what is not known.


def _construct(op: Builder, node: ir.Node, known: _Known):
    return list(node.inputs)


def _insert(op: Builder, node: ir.Node, known: _Known):
    items = known.get(node.inputs[0])
    place = _place(op, node, 2, items, default=len(items or ()))
    return None if place is None else [*items[:place], node.inputs[1], *items[place:]]


def _erase(op: Builder, node: ir.Node, known: _Known):
    items = known.get(node.inputs[0])
    place = _place(op, node, 1, items, default=-1)
    return None if place is None else [item for k, item in enumerate(items) if k != place]


def _at(op: Builder, node: ir.Node, known: _Known):
    items = known.get(node.inputs[0])
    place = _place(op, node, 1, items)
    return None if place is None else items[place]


def _place(op: Builder, node: ir.Node, index: int, items: list | None, default: int | None = None) -> int | None:
    """The position that input `index` always is, counted from the front; None if that is not known."""
    place = default
    if index < len(node.inputs) and node.inputs[index] is not None:
        value = op.constant_value(node.inputs[index])
        place = None if value is None else int(value.item())
    if items is None or place is None:
        return None
    return place + len(items) if place < 0 else place


def _length(op: Builder, node: ir.Node, known: _Known):
    items = known.get(node.inputs[0])
    return None if items is None else op.const(np.int64(len(items)))


def _concat(op: Builder, node: ir.Node, known: _Known):
    items, axis = known.get(node.inputs[0]), node.attributes["axis"].as_int()
    if not items:
        return None
    if node.attributes.get_int("new_axis", 0):
        items = [op.Unsqueeze(item, [axis]) for item in items]
    return op.Concat(*items, axis=axis)


def _split(op: Builder, node: ir.Node, known: _Known):
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    total = x.shape[axis] if x.shape is not None else None
    given = node.inputs[1] if len(node.inputs) > 1 else None
    squeeze = given is None and not node.attributes.get_int("keepdims", 1)
    sizes = np.ones((), np.int64) if given is None else op.constant_value(given)
    if sizes is None:
        return None
    if sizes.ndim == 0:
        if not isinstance(total, int):
            return None
        size = int(sizes)
        sizes = [size] * (total // size) + ([total % size] if total % size else [])
    pieces = op.Split(x, np.asarray(sizes, np.int64), axis=axis, outputs=len(sizes)) if len(sizes) > 1 else (x,)
    return [op.Squeeze(piece, [axis]) if squeeze else piece for piece in pieces]


def _same(op: Builder, node: ir.Node, known: _Known):
    """What passes through an Identity, or in and out of an optional."""
    x = node.inputs[0] if node.inputs else None
    is_tensor = x is not None and isinstance(x.type, ir.TensorType)
    return known.get(x, x if is_tensor and node.op_type != "Identity" else None)


def _has_element(op: Builder, node: ir.Node, known: _Known):
    """Whether there is something in an optional: not in one that was made of nothing."""
    maker = node.inputs[0].producer() if node.inputs else None
    empty = not node.inputs or (maker is not None and maker.op_type == "Optional" and not maker.inputs)
    return op.const(np.array(not empty)) if empty or _same(op, node, known) is not None else None


_RULES: dict[str, Callable] = {
    "ConcatFromSequence": _concat,
    "Identity": _same,
    "Optional": _same,
    "OptionalGetElement": _same,
    "OptionalHasElement": _has_element,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": lambda op, node, known: [],
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}
