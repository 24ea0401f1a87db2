"""Patterns of nodes: Gelu, whole or spelled out, and the dropout of attention probabilities."""

from __future__ import annotations

import onnx_ir as ir

from orttrainer.graph.activations import Activations
from orttrainer.graph.blocks import softmax_before, with_what_they_alone_read
from orttrainer.graph.builder import static_dims

_WHOLE = frozenset(["BiasGelu", "FastGelu", "Gelu", "QuickGelu"])
_INSIDE = frozenset(["Add", "Div", "Mul", "Pow"])


def gelus(activations: Activations) -> list[list[ir.Node]]:
    """The nodes of each Gelu, x Phi(x): one operator, or spelled out with Erf or Tanh."""
    found = []
    for node in activations.forward:
        if node.op_type in _WHOLE:
            found.append([node])
        elif node.op_type in ("Erf", "Tanh") and (nodes := _spelled_out(activations, node)):
            found.append(nodes)
    return found


def _spelled_out(activations: Activations, core: ir.Node) -> list[ir.Node] | None:
    """core is Erf or Tanh: y = x * (1 + core(... x ...)) / 2, with the factor 1/2 at any of the two or at the end.

    Or (1 + core) / 2 is one HardSigmoid, as `ExpandGeluPass` writes it.
    """
    one_more = _reader(activations, core.outputs[0], "Add") or _reader(activations, core.outputs[0], "HardSigmoid")
    factor = one_more and one_more.outputs[0]
    after = [one_more]
    gate = factor and _reader(activations, factor, "Mul")
    while gate is not None and (other := _other(gate, factor)) is not None and _is_scalar(other):
        after.append(gate)
        factor = gate.outputs[0]
        gate = _reader(activations, factor, "Mul")
    if gate is None or other is None:
        return None
    before = _between(other, core)
    if (
        before is None
        and (half := other.producer()) is not None
        and half.op_type in ("Div", "Mul")
        and _has_scalar(half)
    ):
        before = next((b for x in half.inputs if not _is_scalar(x) and (b := _between(x, core)) is not None), None)
        after.append(half)
    if before is None:
        return None
    end = _reader(activations, gate.outputs[0], "Mul")
    if end is not None and _is_scalar(_other(end, gate.outputs[0])):
        after.append(end)
    return sorted(dict.fromkeys([*before, core, *after, gate]), key=activations.position.get)


def _between(x: ir.Value, core: ir.Node) -> list[ir.Node] | None:
    """The elementwise nodes from `x` to the input of `core`; None if anything else leads there."""
    found: dict[ir.Node, None] = {}
    stack = [core.inputs[0]]
    while stack:
        value = stack.pop()
        node = value.producer()
        if value is x or _is_scalar(value):
            continue
        if node is None or node.op_type not in _INSIDE or len(found) > 8:
            return None
        found[node] = None
        stack.extend(v for v in node.inputs if v is not None)
    return list(found)


def _reader(activations: Activations, value: ir.Value, op_type: str) -> ir.Node | None:
    """The one node of the forward that reads a value, if it is of that type."""
    readers = [node for node in activations.readers(value) if node in activations.position]
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return next((x for x in node.inputs if x is not value), None)


def _has_scalar(node: ir.Node) -> bool:
    return any(_is_scalar(x) for x in node.inputs if x is not None)


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and static_dims(value) in ((), (1,))


def attention_dropouts(activations: Activations) -> list[list[ir.Node]]:
    """For each dropout of attention probabilities its product with the mask, and the nodes that make the mask."""
    found = []
    for node in activations.forward:
        masks = [x for x in node.inputs if _is_mask(x)] if node.op_type == "Mul" else []
        if masks and softmax_before(node.outputs[0]) is not None:
            found.append([node, *with_what_they_alone_read(activations, [masks[0].producer()])])
    return found


def _is_mask(value: ir.Value | None) -> bool:
    """m = scale * (hash >= threshold), as `CounterHashDropoutPass` writes it."""
    scaled = value.producer() if value is not None else None
    if scaled is None or scaled.op_type != "Mul":
        return False
    cast = scaled.inputs[0].producer()
    kept = cast.inputs[0].producer() if cast is not None and cast.op_type == "Cast" else None
    return kept is not None and kept.op_type == "GreaterOrEqual" and kept.inputs[0].dtype == ir.DataType.INT32
