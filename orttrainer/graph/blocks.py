"""The structure of a forward that its values show: blocks with one value between them, and attention."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from orttrainer.graph.activations import VIEWS, Activations
from orttrainer.graph.subgraphs import node_inputs

_ATTENTION = frozenset(["Attention", "GroupQueryAttention", "MultiHeadAttention"])
_PRODUCTS = frozenset(["Einsum", "FusedMatMul", "MatMul"])
# What probabilities may pass between the softmax and the product with the values.
_PASSING = VIEWS | {"Cast", "Dropout", "Mul", "Transpose", "Where"}
_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])


def attention_products(activations: Activations) -> list[ir.Node]:
    """The nodes that multiply attention probabilities with values."""
    return [
        node for node in activations.forward if node.op_type in _ATTENTION or _reads_probabilities(activations, node)
    ]


def softmax_before(value: ir.Value | None) -> ir.Node | None:
    """The Softmax whose probabilities `value` is, but for dropout and layout."""
    for _ in range(8):
        node = value.producer() if value is not None else None
        if node is None or node.op_type == "Softmax":
            return node
        if node.op_type not in _PASSING:
            return None
        inner = [x for x in node.inputs if x is not None and x.dtype in _FLOATS and x.producer() is not None]
        found = [softmax for x in inner if (softmax := softmax_before(x)) is not None] if len(inner) > 1 else []
        if len(inner) != 1:
            return found[0] if found else None
        value = inner[0]
    return None


def blocks(activations: Activations) -> list[list[ir.Node]]:
    """The nodes that compute activations from trained weights, cut where a single value leads from one part to the next."""
    trained: set[ir.Value] = set()
    for node in activations.forward:
        if any(x in trained or (x in activations.weights and x.dtype in _FLOATS) for x in node_inputs(node)):
            trained.update(node.outputs)
    flow = [n for n in activations.forward if any(_flows(activations, y, trained) for y in n.outputs)]
    position = {node: index for index, node in enumerate(flow)}
    last = {}
    for node in flow:
        for y in node.outputs:
            ends = [position[reader] for reader in activations.readers(y) if reader in position]
            if _flows(activations, y, trained) and ends:
                last[y] = max(ends)
    found, block, open_ = [], [], set()
    for index, node in enumerate(flow):
        block.append(node)
        open_.update(y for y in node.outputs if y in last)
        open_ = {y for y in open_ if last[y] > index}
        if len(open_) == 1 and next(iter(open_)) in node.outputs:
            found.append(block)
            block = []
    return [*found, block] if block else found


def with_what_they_alone_read(activations: Activations, nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """`nodes` and those before them that no other node of the forward reads, such as the masks of their dropouts."""
    found = dict.fromkeys(nodes)
    stack = list(found)
    while stack:
        for x in node_inputs(stack.pop()):
            node = x.producer()
            if node is None or node in found or node not in activations.position or x.is_graph_output():
                continue
            readers = [r for y in node.outputs for r in activations.readers(y) if r in activations.position]
            if all(reader in found for reader in readers):
                found[node] = None
                stack.append(node)
    return list(found)


def _flows(activations: Activations, value: ir.Value, trained: set[ir.Value]) -> bool:
    return value in trained and value.dtype in _FLOATS and activations.is_activation(value)


def _reads_probabilities(activations: Activations, node: ir.Node) -> bool:
    if node.op_type not in _PRODUCTS or sum(x in activations.varying for x in node.inputs) < 2:
        return False
    return any(softmax_before(x) is not None for x in node.inputs)
